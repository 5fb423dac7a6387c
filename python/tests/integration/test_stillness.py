"""A worker that gives no sign of life is lost; one that is merely busy, or has nothing to say, is not."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

SILENCE = 1.0
"""Seconds after which a silent peer is lost (TENSORCALL_SILENCE_LIMIT)."""
LONG = 3.5 * SILENCE


@pytest.fixture(autouse=True)
def impatient(group: Group) -> None:
    group.environment["TENSORCALL_SILENCE_LIMIT"] = str(SILENCE)


def wait_for(seconds: float) -> str:
    time.sleep(seconds)
    return "waited"


def compute_for(seconds: float) -> str:
    """Holds the interpreter lock all that time, as C code may."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "computed"


def miss_a_stopped_peer(worker: Worker) -> None:
    worker.start(timeout=60)
    pending = [rpc.rpc_async("w1", wait_for, args=(60,)) for _ in range(3)]
    other = rpc.rpc_async("w2", wait_for, args=(2 * SILENCE,))
    rpc.rpc_sync("w1", max, args=(1, 2))
    worker.tell("calls are under way")
    worker.hear()
    began = time.monotonic()
    said = []
    for future in pending:
        with pytest.raises(RuntimeError) as raised:
            future.wait()
        said.append(str(raised.value))
    seconds = time.monotonic() - began
    unharmed = other.wait()
    began = time.monotonic()
    rpc.shutdown()
    worker.tell({"said": said, "seconds": seconds, "other": unharmed, "shutdown": time.monotonic() - began})


def test_calls_to_a_stopped_worker_fail_in_time_and_name_it(group: Group) -> None:
    """LOG row 33."""
    group.start(miss_a_stopped_peer, serve, serve)
    group.hear(0)
    os.kill(group.pid(1), signal.SIGSTOP)
    group.tell(0, "stopped")

    seen: dict[str, Any] = group.hear(0)
    group.kill(1)
    group.finish(expect_killed=(1,))

    assert seen["seconds"] < 3 * SILENCE
    for text in seen["said"]:
        assert "w1" in text
        assert "no sign of life for 1 s" in text
    assert seen["other"] == "waited"
    assert seen["shutdown"] < 10


def have_it_compute(worker: Worker) -> tuple[float, str, int]:
    worker.start(timeout=60)
    began = time.monotonic()
    computed = rpc.rpc_async("w1", compute_for, args=(LONG,))
    # Waits behind the one that holds the lock.
    waiting = rpc.rpc_async("w1", max, args=(1, 2))
    results = computed.wait(), waiting.wait()
    seconds = time.monotonic() - began
    rpc.shutdown()
    return seconds, *results


def test_a_worker_that_computes_for_long_and_holds_the_interpreter_lock_is_not_lost(group: Group) -> None:
    """LOG rows 20 and 22."""
    seconds, *results = group.run(have_it_compute, serve)[0]

    assert seconds > LONG
    assert results == ["computed", 2]


def do_nothing_for_long(worker: Worker) -> tuple[int, int]:
    worker.start(timeout=60)
    peer = f"w{1 - worker.rank}"
    before = rpc.rpc_sync(peer, max, args=(1, 2))
    time.sleep(LONG)
    after = rpc.rpc_sync(peer, max, args=(3, 4))
    rpc.shutdown()
    return before, after


def test_a_pair_that_is_idle_for_long_is_well(group: Group) -> None:
    """LOG row 14."""
    assert group.run(do_nothing_for_long, do_nothing_for_long) == [(2, 4)] * 2
