"""Calls that wait for calls never use up the threads of a pool."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker

DEPTH = 50
LOCK = threading.Lock()
finished = 0


def by_rpc_sync(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + rpc.rpc_sync(_other(), by_rpc_sync, args=(depth - 1,))


def by_wait(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + rpc.rpc_async(_other(), by_wait, args=(depth - 1,)).wait()


def by_wait_all(depth: int) -> int:
    if depth == 0:
        return 0
    futures = [rpc.rpc_async(_other(), by_wait_all, args=(d,)) for d in (depth - 1, 0)]
    return 1 + max(torch.futures.wait_all(futures))


def by_callback(depth: int) -> int:
    """Waits on a `then` child whose callback calls back."""
    if depth == 0:
        return 0

    def call_back(_: Any) -> int:
        return 1 + rpc.rpc_sync(_other(), by_callback, args=(depth - 1,))

    return rpc.rpc_async(_other(), by_callback, args=(0,)).then(call_back).wait()


def _other() -> str:
    return "w1" if rpc.get_worker_info().id == 0 else "w0"


def descend(worker: Worker, function: str) -> int | None:
    worker.start(threads=1)
    depth = None
    if worker.rank == 0:
        depth = rpc.rpc_sync("w1", globals()[function], args=(DEPTH,))
    rpc.shutdown()
    return depth


@pytest.mark.parametrize("function", ["by_rpc_sync", "by_wait", "by_wait_all", "by_callback"])
def test_one_thread_each_is_enough_to_nest_fifty_deep(group: Group, function: str) -> None:
    """LOG row 85."""
    depths = group.run(descend, descend, arguments=(function,))

    assert depths[0] == DEPTH


def bounce(hops: int) -> int:
    """Sends a call back while it holds the lock that all others need, and waits without it."""
    global finished
    with LOCK:
        future = rpc.rpc_async(_other(), bounce, args=(hops - 1,)) if hops else None
    below = future.wait() if future is not None else 0
    with LOCK:
        finished += 1
    return 1 + below


def call_each_other(worker: Worker) -> tuple[list[int], int]:
    worker.start(threads=2)
    results = torch.futures.wait_all([rpc.rpc_async(_other(), bounce, args=(3,)) for _ in range(100)])
    rpc.shutdown()
    return results, finished


def test_two_hundred_mutually_nested_calls_that_share_a_lock_finish(group: Group) -> None:
    group.environment["TENSORCALL_MAX_OUTSTANDING_CALLS"] = "4"

    outcomes = group.run(call_each_other, call_each_other)

    assert [results for results, _ in outcomes] == [[4] * 100, [4] * 100]
    assert sum(count for _, count in outcomes) == 800


def exhaust(worker: Worker) -> tuple[str, int] | None:
    worker.start(threads=1)
    seen = None
    if worker.rank == 0:
        with pytest.raises(RuntimeError) as raised:
            rpc.rpc_sync("w1", by_rpc_sync, args=(DEPTH,))
        seen = str(raised.value), rpc.rpc_sync("w1", by_rpc_sync, args=(3,))
    rpc.shutdown()
    return seen


def test_at_the_cap_of_threads_a_call_fails_clearly_and_later_calls_work(group: Group) -> None:
    """LOG row 85."""
    group.environment["TENSORCALL_MAX_THREADS"] = "8"

    outcomes = group.run(exhaust, exhaust)

    text, depth = outcomes[0]
    assert "exhaust" in text
    assert depth == 3
