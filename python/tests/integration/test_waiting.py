"""Every wait ends at its limit or by Ctrl-C, and lets signal handlers run meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed.rpc as rpc
import torch.futures
from harness import Group, Worker, serve

release = threading.Event()

LATER = 0.3
"""Seconds until a signal comes."""


def block() -> int:
    release.wait(20)
    return 7


def let_go() -> None:
    release.set()


def hold() -> None:
    release.clear()


def add(a: int, b: int) -> int:
    return a + b


def none_of(_: Any) -> None:
    return None


def wait_for_call() -> Any:
    return rpc.rpc_sync("w1", block)


def wait_for_future() -> Any:
    return rpc.rpc_async("w1", block).wait()


def wait_for_callback() -> Any:
    return rpc.rpc_async("w1", block).then(lambda future: future.wait()).wait()


def wait_for_all() -> Any:
    return torch.futures.wait_all([rpc.rpc_async("w1", add, (1, 2)), rpc.rpc_async("w1", block)])


def wait_for_collected() -> Any:
    return torch.futures.collect_all([rpc.rpc_async("w1", block)]).wait()[0].wait()


def wait_in_a_block() -> None:
    with rpc._wait_all():
        rpc.rpc_async("w1", block)


WAITS: list[Callable[[], Any]] = [
    wait_for_call,
    wait_for_future,
    wait_for_callback,
    wait_for_all,
    wait_for_collected,
    wait_in_a_block,
]


@contextmanager
def alarm(handler: Callable[..., object]) -> Iterator[None]:
    """`handler` is called by a signal in a while."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, LATER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


def seconds_until_interrupted(wait: Callable[[], Any]) -> float:
    with alarm(ctrl_c):
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait()
        return time.monotonic() - began - LATER


def interrupt_every_wait(worker: Worker) -> dict[str, float]:
    seen = {}
    with worker.joined():
        for wait in WAITS:
            seen[wait.__name__] = seconds_until_interrupted(wait)
            assert rpc.rpc_sync("w1", add, (1, 2)) == 3
        rpc.rpc_sync("w1", let_go)
    return seen


def test_ctrl_c_ends_every_wait_and_calls_work_afterwards(group: Group) -> None:
    for name, seconds in group.run(interrupt_every_wait, serve)[0].items():
        assert seconds < 0.5, name


def handle_signals(worker: Worker) -> dict[str, float]:
    seen = {}
    with worker.joined():
        for wait in WAITS:
            handled: list[float] = []

            def handler(*_: object, handled: list[float] = handled) -> None:
                handled.append(time.monotonic())
                rpc.rpc_async("w1", let_go)

            with alarm(handler):
                began = time.monotonic()
                wait()
            seen[wait.__name__] = handled[0] - began - LATER
            rpc.rpc_sync("w1", hold)
    return seen


def test_other_signal_handlers_run_during_every_wait_and_do_not_end_it(group: Group) -> None:
    for name, seconds in group.run(handle_signals, serve)[0].items():
        assert seconds < 0.5, name


def limits(worker: Worker) -> list[tuple[float, str]]:
    seen = []
    with worker.joined():
        future = rpc.rpc_async("w1", block)
        both = torch.futures.collect_all([future, rpc.rpc_async("w1", add, (1, 2))])
        for waiting in (future, future.then(none_of), both):
            began = time.monotonic()
            with pytest.raises(TimeoutError) as raised:
                waiting.wait(0.2)  # type: ignore[call-arg]  (torch's own has no limit)
            seen.append((time.monotonic() - began, str(raised.value)))
            assert not waiting.done()
        rpc.rpc_sync("w1", let_go)
        assert future.wait() == 7
    return seen


def test_every_future_waits_no_longer_than_it_is_told(group: Group) -> None:
    """LOG row 17."""
    for seconds, text in group.run(limits, serve)[0]:
        assert 0.15 < seconds < 1
        assert "0.2 s" in text


def leave_alone(worker: Worker) -> tuple[float, str, bool]:
    worker.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        rpc.shutdown(timeout=0.5)
    seconds = time.monotonic() - began
    worker.tell("left")
    return seconds, str(raised.value), rpc.api._is_current_rpc_agent_set()


def stay(worker: Worker) -> None:
    worker.start()
    worker.hear()
    rpc.shutdown(graceful=False)


def test_shutdown_takes_no_longer_than_it_is_told(group: Group) -> None:
    """LOG row 2."""
    group.start(leave_alone, stay)
    group.hear(0)
    group.tell(1, "leave")

    seconds, text, agent_is_set = group.finish()[0].value

    assert seconds < 3
    assert "w1" in text or "w0" in text
    assert not agent_is_set


def interrupted_shutdown(worker: Worker) -> tuple[float, bool]:
    worker.start()
    seconds = seconds_until_interrupted(rpc.shutdown)
    worker.tell("left")
    return seconds, rpc.api._is_current_rpc_agent_set()


def test_ctrl_c_ends_shutdown_and_the_agent_is_gone(group: Group) -> None:
    group.start(interrupted_shutdown, stay)
    group.hear(0)
    group.tell(1, "leave")

    seconds, agent_is_set = group.finish()[0].value

    assert seconds < 2
    assert not agent_is_set


def interrupted_start(worker: Worker, folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for scheme, url in (("tcp", worker.init_method), ("file", f"file://{folder}/store")):
        worker.init_method = url
        seen[scheme] = seconds_until_interrupted(worker.start)
    assert not rpc.api._is_current_rpc_agent_set()
    worker.world_size = 1
    worker.init_method = f"file://{folder}/alone"
    with worker.joined():
        seen["alone"] = rpc.rpc_sync("w0", add, (1, 2))
    return seen


def test_ctrl_c_ends_init_and_another_init_works(group: Group, tmp_path: Any) -> None:
    group.add(interrupted_start, rank=0, world_size=2, arguments=(str(tmp_path),))

    seen = group.finish()[0].value

    assert seen["tcp"] < 2
    assert seen["file"] < 2
    assert seen["alone"] == 3


def give_up(worker: Worker) -> list[str]:
    texts = []
    with worker.joined(threads=1):
        for function in (block, add):
            with pytest.raises(RuntimeError) as raised:
                rpc.rpc_sync("w1", function, (1, 2) if function is add else (), timeout=1.6)
            texts.append(str(raised.value))
        worker.tell("timed out")
    return texts


def serve_with_one_thread(worker: Worker) -> None:
    worker.start(threads=1)
    worker.hear()
    release.set()
    rpc.shutdown()


def test_a_time_out_says_how_far_the_call_had_come(group: Group) -> None:
    """LOG row 19."""
    group.start(give_up, serve_with_one_thread)
    group.hear(0)
    group.tell(1, "release")

    running, waiting = group.finish()[0].value

    assert "block on worker 'w1' was running there" in running
    assert "add on worker 'w1' was waiting for a thread there" in waiting
