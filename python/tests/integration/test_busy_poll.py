"""`TENSORCALL_BUSY_POLL`: calls, interrupts and the end are as ever, and workers at rest sleep."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

release = threading.Event()

LIMIT = 20.0
"""Seconds until a test gives up."""


def bounce(hops: int) -> list[int]:
    if hops == 0:
        return [0]
    return [*rpc.rpc_sync(f"w{hops % 2}", bounce, args=(hops - 1,)), hops]


def call(worker: Worker) -> tuple[list[int], list[float], float]:
    with worker.joined(timeout=60):
        bounced = rpc.rpc_sync("w1", bounce, args=(5,))
        futures = [rpc.rpc_async("w1", torch.add, args=(torch.ones(2), n)) for n in range(200)]
        sums = [float(future.wait()[0]) for future in futures]
        kept = float(rpc.remote("w1", torch.add, args=(torch.ones(2), 41)).to_here()[0])
    return bounced, sums, kept


@pytest.mark.parametrize("micros", [50, 20_000])
def test_calls_nested_calls_references_and_the_end_are_as_ever(group: Group, micros: int) -> None:
    group.environment["TENSORCALL_BUSY_POLL"] = str(micros)

    bounced, sums, kept = group.run(call, serve)[0]

    assert bounced == [0, 1, 2, 3, 4, 5]
    assert sums == [n + 1.0 for n in range(200)]
    assert kept == 42.0


def comes_to_rest() -> bool:
    """Whether there is a moment in which this process uses little of a processor."""
    nothing, end = threading.Event(), time.monotonic() + LIMIT
    while time.monotonic() < end:
        began, used = time.monotonic(), time.process_time()
        nothing.wait(0.3)
        if time.process_time() - used < 0.2 * (time.monotonic() - began):
            return True
    return False


def rest(worker: Worker) -> tuple[bool, bool]:
    with worker.joined(timeout=60):
        for _ in range(100):
            rpc.rpc_sync("w1", max, args=(1, 2))
        return comes_to_rest(), rpc.rpc_sync("w1", comes_to_rest)


def test_workers_at_rest_sleep(group: Group) -> None:
    """That includes the thread that waits for the other worker to find out."""
    group.environment["TENSORCALL_BUSY_POLL"] = "20000"

    assert group.run(rest, serve)[0] == (True, True)


def hold() -> None:
    release.wait(LIMIT)


def let_go() -> None:
    release.set()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def be_interrupted(worker: Worker) -> tuple[float, int]:
    signal.signal(signal.SIGALRM, interrupt)
    with worker.joined(timeout=60):
        rpc.rpc_sync("w1", max, args=(1, 2))
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_sync("w1", hold)
        took = time.monotonic() - began
        rpc.rpc_sync("w1", let_go)
        return took, rpc.rpc_sync("w1", max, args=(1, 2))


def test_an_interrupt_ends_a_wait_that_looks_for_an_answer(group: Group) -> None:
    group.environment["TENSORCALL_BUSY_POLL"] = "1000000"

    took, largest = group.run(be_interrupted, serve)[0]

    assert took < LIMIT / 2
    assert largest == 2
