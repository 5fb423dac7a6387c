"""Coroutine functions, and functions that return futures, run for other workers."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

context: contextvars.ContextVar[int] = contextvars.ContextVar("context", default=0)
opened: set[str] = set()


def add(a: Any, b: Any) -> Any:
    return a + b


async def double(value: Any) -> Any:
    await asyncio.sleep(0.01)
    return value * 2


async def ask_back(to: str, value: int) -> Any:
    here = rpc.get_worker_info().name
    awaited = await rpc.rpc_async(to, double, (value,))
    blocked = rpc.rpc_sync(to, add, (value, 1))
    return here, awaited, blocked


class Greeter:
    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    async def greet(self, name: str) -> str:
        await asyncio.sleep(0)
        return f"{self.greeting} {name}"


def call_coroutines(worker: Worker) -> list[Any]:
    with worker.joined():
        seen = [
            rpc.rpc_sync("w1", double, (4,)),
            rpc.rpc_async("w1", double, args=("ab",)).wait(),
            rpc.rpc_sync("w1", double, (torch.ones(3),)).tolist(),
            rpc.rpc_sync("w1", Greeter("hello").greet, ("you",)),
            rpc.rpc_sync("w0", double, (2,)),
            rpc.rpc_sync("w1", ask_back, ("w0", 5)),
        ]
        seen.append(asyncio.run(await_one()))
    return seen


async def await_one() -> Any:
    return await rpc.rpc_async("w1", double, (8,))


def test_coroutine_functions_can_be_called_and_call_in_turn(group: Group) -> None:
    seen = group.run(call_coroutines, serve)[0]

    assert seen == [8, "abab", [2, 2, 2], "hello you", 4, ("w1", 10, 6), 16]


async def wait_for(name: str) -> str:
    while name not in opened:
        await asyncio.sleep(0.005)
    return name


def open_up(name: str) -> None:
    opened.add(name)


def outnumber_the_threads(worker: Worker) -> list[Any]:
    with worker.joined():
        waiting = [rpc.rpc_async("w1", wait_for, (str(i),)) for i in range(50)]
        for i in reversed(range(50)):
            rpc.rpc_sync("w1", open_up, (str(i),))
        return [future.wait() for future in waiting]


def serve_with_one_thread(worker: Worker) -> None:
    with worker.joined(threads=1):
        pass


def test_a_coroutine_that_waits_holds_no_thread(group: Group) -> None:
    """LOG row 86."""
    seen = group.run(outnumber_the_threads, serve_with_one_thread)[0]

    assert seen == [str(i) for i in range(50)]


async def fail(kind: str) -> None:
    await asyncio.sleep(0)
    raise {"key": KeyError("missing"), "exit": SystemExit(3), "cancel": asyncio.CancelledError("x")}[kind]


def call_failing_coroutines(worker: Worker) -> list[Any]:
    seen: list[Any] = []
    with worker.joined():
        with pytest.raises(KeyError) as raised:
            rpc.rpc_sync("w1", fail, ("key",))
        seen.append(str(raised.value))
        for kind in ("exit", "cancel"):
            with pytest.raises(RuntimeError) as other:
                rpc.rpc_sync("w1", fail, (kind,))
            seen.append(str(other.value))
        with pytest.raises(RuntimeError) as late:
            rpc.rpc_sync("w1", wait_for, ("never",), timeout=1.6)
        seen.append(str(late.value))
        rpc.rpc_sync("w1", open_up, ("never",))
        seen.append(rpc.rpc_sync("w1", double, (1,)))
    return seen


def test_coroutines_fail_as_functions_do_and_the_loop_goes_on(group: Group) -> None:
    key, system_exit, cancelled, late, after = group.run(call_failing_coroutines, serve)[0]

    assert "missing" in key
    assert "in fail" in key
    assert system_exit.startswith("SystemExit: 3")
    assert cancelled.startswith("CancelledError")
    assert "was running there" in late
    assert after == 2


ended: list[str] = []


async def wait_and_tidy_up(name: str) -> None:
    opened.add(name)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0)  # tidying up may take its time
        ended.append(name)
        raise


async def ended_so_far(count: int) -> list[str]:
    while len(ended) < count:
        await asyncio.sleep(0.005)
    return ended


def cancel_calls(worker: Worker) -> list[Any]:
    with worker.joined():
        futures = {name: rpc.rpc_async("w1", wait_and_tidy_up, (name,)) for name in ("a", "b", "c")}
        for name in futures:
            rpc.rpc_sync("w1", wait_for, (name,))
        seen: list[Any] = [futures[name].cancel() for name in ("c", "a")]
        seen.append(rpc.rpc_sync("w1", ended_so_far, (2,)))
        assert not futures["b"].done()
        futures["b"].cancel()
        with pytest.raises(RuntimeError, match="was cancelled"):
            futures["b"].wait()
    return seen


def test_cancelling_a_call_cancels_its_coroutine_and_no_other(group: Group) -> None:
    assert group.run(cancel_calls, serve)[0] == [True, True, ["c", "a"]]
    assert "CancelledError" not in group.log(1)


def be_lost(worker: Worker) -> None:
    worker.start()
    rpc.rpc_async("w1", wait_and_tidy_up, ("orphan",))
    rpc.rpc_sync("w1", wait_for, ("orphan",))
    worker.tell("ready")
    worker.hear()


def outlive(worker: Worker) -> list[str]:
    with worker.joined():
        return rpc.rpc_sync("w1", ended_so_far, (1,))


def test_a_coroutine_whose_caller_is_lost_is_cancelled(group: Group) -> None:
    """LOG row 35: work of an owner that died ends."""
    group.start(be_lost, outlive)
    group.hear(0)
    group.kill(0)

    assert group.finish(expect_killed=(0,))[1].value == ["orphan"]


async def unpicklable() -> Any:
    return threading.Lock()


async def count_up() -> int:
    context.set(context.get() + 1)
    await asyncio.sleep(0)
    return context.get()


def call_odd_coroutines(worker: Worker) -> list[Any]:
    with worker.joined():
        with pytest.raises(RuntimeError) as raised:
            rpc.rpc_sync("w1", unpicklable)
        return [str(raised.value), [rpc.rpc_sync("w1", count_up) for _ in range(3)]]


def test_results_are_packed_as_usual_and_context_variables_do_not_leak(group: Group) -> None:
    text, counts = group.run(call_odd_coroutines, serve)[0]

    assert "pickle" in text
    assert counts == [1, 1, 1]


def leave_with_work_under_way(worker: Worker) -> Any:
    worker.start()
    future = rpc.rpc_async("w1", slow)
    rpc.shutdown()
    return future.wait()


async def slow() -> str:
    await asyncio.sleep(0.7)
    return "finished"


def test_graceful_shutdown_waits_for_coroutines(group: Group) -> None:
    assert group.run(leave_with_work_under_way, serve)[0] == "finished"


def leave_at_once(worker: Worker) -> float:
    worker.start()
    rpc.rpc_async(worker.name, wait_for, ("never",))
    rpc.rpc_sync(worker.name, double, (1,))
    began = time.monotonic()
    rpc.shutdown(graceful=False)
    return time.monotonic() - began


def test_ungraceful_shutdown_cancels_coroutines_and_ends_their_thread(group: Group) -> None:
    group.add(leave_at_once, rank=0, world_size=1)

    assert group.finish()[0].value < 2
    assert "CancelledError" not in group.log(0)


def exit_with_coroutines(worker: Worker) -> None:
    worker.start()
    rpc.rpc_async(worker.name, wait_for, ("never",))
    rpc.rpc_sync(worker.name, double, (1,))


def test_a_process_with_coroutines_ends_without_shutdown(group: Group) -> None:
    group.deadline = time.monotonic() + 15
    group.add(exit_with_coroutines, rank=0, world_size=1)

    assert group.finish()[0].exit_code == 0
    assert group.log(0) == ""


@rpc.functions.async_execution
def add_elsewhere(to: str, a: int, b: int) -> Any:
    return rpc.rpc_async(to, add, (a, b)).then(lambda future: future.wait() * 10)


@rpc.functions.async_execution
def no_future() -> int:
    return 3


@rpc.functions.async_execution
def given_up() -> Any:
    return rpc._futures.Future()


@rpc.functions.async_execution
def fail_later() -> Any:
    future: Any = torch.futures.Future()
    threading.Timer(0.05, future.set_exception, (ValueError("later"),)).start()
    return future


def call_asynchronous_functions(worker: Worker) -> list[Any]:
    seen: list[Any] = []
    with worker.joined():
        seen.append(rpc.rpc_sync("w1", add_elsewhere, ("w0", 1, 2)))
        with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future object,"):
            rpc.rpc_sync("w1", no_future)
        with pytest.raises(ValueError, match="later"):
            rpc.rpc_sync("w1", fail_later)
        future = rpc.rpc_async("w1", given_up)
        while not future.done():
            rpc.rpc_sync("w1", gc.collect)
        with pytest.raises(RuntimeError) as raised:
            future.wait()
        seen.append(str(raised.value))
    return seen


def test_a_function_may_return_a_future_of_its_result(group: Group) -> None:
    value, given_up = group.run(call_asynchronous_functions, serve)[0]

    assert value == 30
    assert "without an answer" in given_up
