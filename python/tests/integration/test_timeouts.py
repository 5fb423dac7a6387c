"""Every wait ends: by its result or by its limit."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

release = threading.Event()
runs = 0


def block() -> int:
    global runs
    runs += 1
    release.wait(20)
    return 7


def let_go() -> int:
    release.set()
    return runs


def identity(value: object) -> object:
    return value


def fall_behind(worker: Worker) -> dict[str, Any]:
    """Asks a worker with one thread for more than it can do in time."""
    worker.start(threads=1, timeout=0.5)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as by_argument:
        rpc.rpc_sync("w1", block, timeout=0.2)
    seconds = time.monotonic() - began
    with pytest.raises(RuntimeError) as in_queue:  # the only thread of w1 is still in block()
        rpc.rpc_async("w1", identity, args=(1,), timeout=0.2).wait()
    with pytest.raises(RuntimeError) as by_default:
        rpc.rpc_sync("w1", identity, args=(1,))
    worker.tell("release w1")
    after = rpc.rpc_sync("w1", identity, args=(5,), timeout=10)
    times = rpc.rpc_sync("w1", let_go, timeout=10)
    rpc._set_rpc_timeout(30)
    rpc.shutdown()
    texts = [str(raised.value) for raised in (by_argument, in_queue, by_default)]
    return {"seconds": seconds, "texts": texts, "after": after, "runs": times}


def serve_and_release(worker: Worker) -> None:
    worker.start(threads=1)
    worker.hear()
    release.set()
    rpc.shutdown()


def test_calls_end_at_their_limit_and_late_replies_do_no_harm(group: Group) -> None:
    """LOG row 15."""
    group.start(fall_behind, serve_and_release)
    group.hear(0)
    group.tell(1, "release")

    seen = group.finish()[0].value

    assert 0.15 < seen["seconds"] < 1.5
    assert "RPC ran for more than set timeout (200 ms)" in seen["texts"][0]
    assert "(200 ms)" in seen["texts"][1]
    assert "(500 ms)" in seen["texts"][2]
    assert seen["after"] == 5
    assert seen["runs"] == 1


def set_default(worker: Worker) -> list[object]:
    worker.start(timeout=30)
    seen: list[object] = [rpc.get_rpc_timeout()]
    rpc._set_rpc_timeout(0.2)
    seen.append(round(rpc.get_rpc_timeout(), 3))
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync("w1", block)
    seen.append(str(raised.value))
    rpc._set_rpc_timeout(30)
    rpc.rpc_sync("w1", let_go)
    rpc.shutdown()
    return seen


def test_the_default_limit_can_be_changed(group: Group) -> None:
    """LOG row 20."""
    seen = group.run(set_default, serve)[0]

    assert seen[:2] == [30, 0.2]
    assert "(200 ms)" in str(seen[2])


def miss_a_peer(worker: Worker) -> tuple[float, str]:
    began = time.monotonic()
    with pytest.raises(Exception) as raised:  # noqa: PT011  (which type is the store's business)
        worker.start(timeout=1)
    return time.monotonic() - began, str(raised.value)


def test_a_peer_that_never_comes_is_an_error_in_bounded_time(group: Group) -> None:
    group.add(miss_a_peer, rank=0, world_size=2)

    seconds, text = group.finish()[0].value

    assert seconds < 15
    assert text


def interrupt(worker: Worker) -> float:
    worker.start()
    signal.signal(signal.SIGALRM, _raise_interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync("w1", block)
    seconds = time.monotonic() - began
    rpc.rpc_sync("w1", let_go)
    rpc.shutdown()
    return seconds


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_wait_can_be_interrupted_by_a_signal(group: Group) -> None:
    seconds = group.run(interrupt, serve)[0]

    assert seconds < 2


def wait_twice(worker: Worker) -> bool:
    worker.start()
    done = rpc.rpc_async("w1", identity, args=(torch.ones(2),))
    value = done.wait()
    again = done.wait()
    rpc.shutdown()
    return value is again


def test_a_future_gives_the_same_object_each_time(group: Group) -> None:
    assert group.run(wait_twice, serve)[0]


def hurry(worker: Worker) -> list[str]:
    """Calls whose limit passes now at the caller, now on the way, now at the callee."""
    texts = []
    with worker.joined():
        for number in range(300):
            future = rpc.rpc_async("w1", identity, args=(number,), timeout=0.001)
            try:
                assert future.wait() == number
            except RuntimeError as error:
                texts.append(str(error))
    return texts


def test_wherever_a_limit_passes_the_text_is_the_same(group: Group) -> None:
    for text in group.run(hurry, serve)[0]:
        assert "RPC ran for more than set timeout" in text
