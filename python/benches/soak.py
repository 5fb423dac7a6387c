"""Calls for a long time and watches what the two processes come to hold: memory, descriptors, threads.

    python soak.py                                   a million small calls, 10,000 of 1 MiB each way
    python soak.py --small 50000 --large 1000        what CI runs

Two phases, one after the other. In each, what both processes hold is compared between the mark, when a
fifth of the calls has been made, and the end: memory may grow by less than 2 MiB, open descriptors and
threads not at all. The bound is the same for a short run, which therefore only sees larger leaks; the
report says how many bytes per call it would have seen. Exit status 1 if something grew.

Small calls are of all kinds: plain data, pickled, small tensors, futures with callbacks, and errors.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import tensorcall.rpc as rpc
import torch

MARK = 0.2
BOUND = 2 << 20
WINDOW = 64
THREADS = 16
BLOCK = 1000
REST = 15.0
"""Seconds that threads which were made for a burst may take to end; they linger for five."""
TO = "callee"


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    memory: int
    descriptors: int
    threads: int


def held() -> Held:
    """What this process holds at rest; of memory, what is resident."""
    agent, end = rpc._get_current_rpc_agent(), time.monotonic() + REST
    while _threads_beyond(agent.get_metrics()) and time.monotonic() < end:
        time.sleep(0.1)
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return Held(memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def _threads_beyond(metrics: dict[str, str]) -> bool:
    return int(metrics["agent.num_threads"]) > int(metrics["agent.thread_pool_size"])


class Point:
    """What has to be pickled."""

    def __init__(self, x: int, y: list[int]) -> None:
        self.x, self.y = x, y


def echo(*arguments: Any, **named: Any) -> Any:
    """Gives back what it got."""
    return arguments, named


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Gives a tensor back."""
    return tensor


def fail(number: int) -> None:
    """Fails."""
    raise ValueError(f"number {number}")


def plain(count: int) -> None:
    """Plain data, one call after another."""
    for number in range(count):
        rpc.rpc_sync(TO, echo, args=(number, "text", b"bytes", [1.5, None]), kwargs={"a": number})


def pickled(count: int) -> None:
    """Objects that only pickle can send."""
    for number in range(count):
        rpc.rpc_sync(TO, echo, args=(Point(number, [number] * 4),))


def tensors(count: int) -> None:
    """Small tensors there and back."""
    tensor = torch.ones(16)
    for _ in range(count):
        rpc.rpc_sync(TO, torch.add, args=(tensor, 1))


def bursts(count: int) -> None:
    """Many calls at once, with callbacks."""
    for first in range(0, count, WINDOW):
        window = range(first, min(first + WINDOW, count))
        futures = [
            rpc.rpc_async(TO, echo, args=(number,)).then(lambda done: done.wait()) for number in window
        ]
        torch.futures.wait_all(futures)


def errors(count: int) -> None:
    """One call in fifty fails; the others have plain data."""
    for number in range(count):
        if number % 50:
            rpc.rpc_sync(TO, echo, args=(number,))
        else:
            with suppress(ValueError):
                rpc.rpc_sync(TO, fail, args=(number,))


def large(count: int) -> None:
    """A MiB there and back."""
    tensor = torch.ones(1 << 18)
    for _ in range(count):
        back = rpc.rpc_sync(TO, same, args=(tensor,))
        assert back.shape == tensor.shape


KINDS: tuple[Callable[[int], None], ...] = (plain, pickled, tensors, bursts, errors)


def blocks(name: str, count: int) -> Callable[[int], int]:
    """Makes the calls of a phase from a given number on; returns how many were made."""
    if name == "1 MiB":
        size = max(1, min(100, count // 20))
        return lambda made: _run(large, min(size, count - made))
    size = max(1, min(BLOCK, count // 50))
    return lambda made: _run(KINDS[made // size % len(KINDS)], min(size, count - made))


def _run(kind: Callable[[int], None], count: int) -> int:
    kind(count)
    return count


_meeting = threading.Barrier(THREADS)


def meet() -> None:
    """Waits until all threads of the worker are here."""
    _meeting.wait(60)


def warm_up() -> None:
    """Has both workers start all their threads, which they keep."""
    for who in ("caller", TO):
        torch.futures.wait_all([rpc.rpc_async(who, meet) for _ in range(THREADS)])


def phase(name: str, count: int) -> dict[str, Any]:
    """Makes `count` calls; what both processes held at the mark and at the end."""
    step = blocks(name, count)
    made, mark, began = 0, None, time.monotonic()
    while made < count:
        made += step(made)
        if mark is None and made >= MARK * count:
            mark = both()
            marked = made
    seconds = time.monotonic() - began
    assert mark is not None
    end = both()
    return {
        "phase": name,
        "calls": count,
        "seconds": round(seconds, 1),
        "bytes per call seen": round(BOUND / (count - marked), 1),
        "workers": {who: compare(mark[who], end[who]) for who in end},
    }


def both() -> dict[str, Held]:
    """What the two processes hold."""
    rpc.rpc_sync(TO, held)  # what it makes itself counts at the mark too
    return {"caller": held(), "callee": rpc.rpc_sync(TO, held)}


def compare(mark: Held, end: Held) -> dict[str, Any]:
    """What changed between two points, and whether that is too much."""
    growth = end.memory - mark.memory
    steady = (mark.descriptors, mark.threads) == (end.descriptors, end.threads)
    return {
        "memory MiB": [round(mark.memory / (1 << 20), 2), round(end.memory / (1 << 20), 2)],
        "growth KiB": growth // 1024,
        "descriptors": [mark.descriptors, end.descriptors],
        "threads": [mark.threads, end.threads],
        "ok": growth < BOUND and steady,
    }


def work(rank: int, store: str, options: argparse.Namespace, results: Any) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process: `fail` is shown there)
    backend = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=THREADS, init_method=f"file://{store}", rpc_timeout=120
    )
    rpc.init_rpc(("caller", TO)[rank], rank=rank, world_size=2, rpc_backend_options=backend)
    if rank == 0:
        warm_up()
        for name, count in (("small", options.small), ("1 MiB", options.large)):
            if count:
                results.put(phase(name, count))
        results.put(None)
    rpc.shutdown()


def main() -> int:
    """Runs the two processes, prints what came of it; the exit status."""
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", type=int, default=1_000_000, help="small calls")
    parser.add_argument("--large", type=int, default=10_000, help="calls of 1 MiB each way")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = [
            context.Process(target=work, args=(r, store, options, results), daemon=True) for r in range(2)
        ]
        for worker in workers:
            worker.start()
        good = True
        while (result := _next(results, workers)) is not None:
            print(json.dumps(result, indent=1), flush=True)
            good &= all(worker["ok"] for worker in result["workers"].values())
        for worker in workers:
            worker.join(60)
        good &= all(worker.exitcode == 0 for worker in workers)
    print("nothing grew" if good else "SOMETHING GREW, or a worker failed", flush=True)
    return 0 if good else 1


def _next(results: Any, workers: list[Any]) -> dict[str, Any] | None:
    """The next result; none at the end, or if a worker died."""
    while True:
        with suppress(queue.Empty):
            found: dict[str, Any] | None = results.get(timeout=1)
            return found
        if any(worker.exitcode for worker in workers):
            return None


if __name__ == "__main__":
    sys.exit(main())
