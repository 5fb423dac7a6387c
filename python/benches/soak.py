"""Calls for a long time and watches what the processes come to hold: memory, descriptors, references …

    python soak.py       a million small calls, 10,000 of 1 MiB each way, 100,000 references
    python soak.py --small 30000 --large 500 --references 5000

Three phases, one after the other. In each, what the processes hold is compared between the mark, when a
fifth of the calls has been made, and the end: memory may grow by less than 2 MiB, open descriptors and
threads not at all, and nobody may have or own a reference at the end. The bound is the same for a short
run, which therefore only sees larger leaks; the report says how many bytes per call it would have seen.
Exit status 1 if something grew.

Small calls are of all kinds: plain data, pickled, small tensors, futures with callbacks, and errors.
References are to results that stay on the callee and to objects of the caller; each is passed on to a
third process, which drops it later than the caller does.
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
from collections import deque
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
FRIEND = "friend"
WORKERS = ("caller", TO, FRIEND)
REFERENCES = ("num_owner_rrefs", "num_pending_users", "num_forks")


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    memory: int
    descriptors: int
    threads: int
    references: int


def held() -> Held:
    """What this process holds at rest; of memory, what is resident."""
    agent, end = rpc._get_current_rpc_agent(), time.monotonic() + REST
    _passed_on.clear()
    gc.collect()
    while (
        _threads_beyond(agent.get_metrics()) or _references() or _shares_memory()
    ) and time.monotonic() < end:
        time.sleep(0.1)
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    descriptors, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return Held(memory, descriptors, threads, _references())


def _threads_beyond(metrics: dict[str, str]) -> bool:
    return int(metrics["agent.num_threads"]) > int(metrics["agent.thread_pool_size"])


def _shares_memory() -> bool:
    """Whether large tensors still have memory that both ends mapped; it is given up after ten seconds."""
    with open("/proc/self/maps") as maps:
        return any("memfd:tensorcall" in line for line in maps)


def _references() -> int:
    figures = rpc._rref_context_get_debug_info()
    return sum(int(figures[name]) for name in REFERENCES)


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


_passed_on: deque[Any] = deque(maxlen=WINDOW)


def keep(rref: Any) -> None:
    """Has a reference until as many others have come."""
    _passed_on.append(rref)


def references(count: int) -> None:
    """References to what the callee made and to what is here, passed on and dropped."""
    for first in range(0, count, WINDOW):
        window = range(first, min(first + WINDOW, count))
        rrefs = [
            rpc.remote(TO, echo, args=(number,)) if number % 4 else rpc.RRef(Point(number, []))
            for number in window
        ]
        torch.futures.wait_all([rpc.rpc_async(FRIEND, keep, args=(rref,)) for rref in rrefs])


KINDS: tuple[Callable[[int], None], ...] = (plain, pickled, tensors, bursts, errors)


def blocks(name: str, count: int) -> Callable[[int], int]:
    """Makes the calls of a phase from a given number on; returns how many were made."""
    if name != "small":
        size = max(1, min(100 if name == "1 MiB" else BLOCK, count // 20))
        kind = large if name == "1 MiB" else references
        return lambda made: _run(kind, min(size, count - made))
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
    """Has the workers start all their threads, which they keep."""
    for who in WORKERS:
        torch.futures.wait_all([rpc.rpc_async(who, meet) for _ in range(THREADS)])


def phase(name: str, count: int) -> dict[str, Any]:
    """Makes `count` calls; what the processes held at the mark and at the end."""
    step = blocks(name, count)
    made, mark, began = 0, None, time.monotonic()
    while made < count:
        made += step(made)
        if mark is None and made >= MARK * count:
            mark = everybody()
            marked = made
    seconds = time.monotonic() - began
    assert mark is not None
    end = everybody()
    return {
        "phase": name,
        "calls": count,
        "seconds": round(seconds, 1),
        "bytes per call seen": round(BOUND / (count - marked), 1),
        "workers": {who: compare(mark[who], end[who]) for who in end},
    }


def everybody() -> dict[str, Held]:
    """What each process holds."""
    for who in reversed(WORKERS):
        rpc.rpc_sync(who, held)  # what it makes itself counts at the mark too
    return {who: rpc.rpc_sync(who, held) for who in WORKERS}


def compare(mark: Held, end: Held) -> dict[str, Any]:
    """What changed between two points, and whether that is too much."""
    growth = end.memory - mark.memory
    steady = (mark.descriptors, mark.threads, 0) == (end.descriptors, end.threads, end.references)
    return {
        "memory MiB": [round(mark.memory / (1 << 20), 2), round(end.memory / (1 << 20), 2)],
        "growth KiB": growth // 1024,
        "descriptors": [mark.descriptors, end.descriptors],
        "threads": [mark.threads, end.threads],
        "references": [mark.references, end.references],
        "ok": growth < BOUND and steady,
    }


def work(rank: int, store: str, options: argparse.Namespace, results: Any) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process: `fail` is shown there)
    backend = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=THREADS, init_method=f"file://{store}", rpc_timeout=120
    )
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS), rpc_backend_options=backend)
    if rank == 0:
        warm_up()
        phases = {"small": options.small, "1 MiB": options.large, "references": options.references}
        for name, count in phases.items():
            if count:
                results.put(phase(name, count))
        results.put(None)
    rpc.shutdown()


def main() -> int:
    """Runs the processes, prints what came of it; the exit status."""
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", type=int, default=1_000_000, help="small calls")
    parser.add_argument("--large", type=int, default=10_000, help="calls of 1 MiB each way")
    parser.add_argument("--references", type=int, default=100_000, help="references passed on and dropped")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = [
            context.Process(target=work, args=(rank, store, options, results), daemon=True)
            for rank in range(len(WORKERS))
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
