"""Futures can be awaited: in any loop, in many, and however they end."""

from __future__ import annotations

import ast
import asyncio
import threading
import time
from types import CodeType, CoroutineType
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

release = threading.Event()


def block() -> int:
    release.wait(20)
    return 7


def let_go() -> None:
    release.set()


def add(a: Any, b: Any) -> Any:
    return a + b


class Odd(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(code, why)
        self.code = code


def fail(code: int) -> None:
    raise Odd(code, "on purpose")


async def await_everything() -> list[Any]:
    seen: list[Any] = [await rpc.rpc_async("w1", add, (1, 2))]
    seen.append(await asyncio.gather(*(rpc.rpc_async("w1", add, (i, 1)) for i in range(200))))
    seen.append(await rpc.rpc_async("w1", add, (1, 2)).then(lambda future: future.wait() * 10))
    both = await torch.futures.collect_all([rpc.rpc_async("w1", add, (i, i)) for i in range(3)])
    seen.append([future.wait() for future in both])
    done = rpc.rpc_async("w1", add, (2, 2))
    done.wait()
    seen.append([await done, await done])
    return seen


def awaiting(worker: Worker) -> list[Any]:
    with worker.joined():
        return asyncio.run(await_everything())


def test_calls_callbacks_and_collections_can_be_awaited(group: Group) -> None:
    seen = group.run(awaiting, serve)[0]

    assert seen == [3, list(range(1, 201)), 30, [0, 2, 4], [4, 4]]


async def await_failures() -> tuple[Any, str]:
    with pytest.raises(Odd) as raised:
        await rpc.rpc_async("w1", fail, (5,))
    with pytest.raises(RuntimeError, match="more than set timeout") as late:
        await rpc.rpc_async("w1", block, timeout=0.2)
    return raised.value.code, str(late.value)


def awaiting_failures(worker: Worker) -> Any:
    with worker.joined():
        seen = asyncio.run(await_failures())
        rpc.rpc_sync("w1", let_go)
        return seen


def test_errors_keep_their_type_when_awaited(group: Group) -> None:
    code, late = group.run(awaiting_failures, serve)[0]

    assert code == 5
    assert "block" in late


async def give_up_waiting() -> Any:
    future = rpc.rpc_async("w1", block)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(future, 0.1)
    task = asyncio.ensure_future(future)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not future.done()
    rpc.rpc_async("w1", let_go)
    return await future


def cancelling(worker: Worker) -> Any:
    with worker.joined():
        return asyncio.run(give_up_waiting())


def test_cancelling_the_task_that_waits_leaves_the_call_alone(group: Group) -> None:
    assert group.run(cancelling, serve)[0] == 7


async def block_in_the_loop() -> list[Any]:
    local: rpc._futures.Future[int] = rpc._futures.Future()
    asyncio.get_running_loop().call_later(0.05, local.set_result, 1)
    ticks = []

    async def tick() -> None:
        ticks.append(await rpc.rpc_async("w1", add, (1, 1)))

    task = asyncio.ensure_future(tick())
    blocking = [rpc.rpc_sync("w1", add, (1, 2)), rpc.rpc_async("w1", add, (2, 2)).wait()]
    await task
    return [*blocking, await local, ticks]


def blocking(worker: Worker) -> list[Any]:
    with worker.joined():
        return asyncio.run(block_in_the_loop())


def test_a_blocking_call_in_a_coroutine_and_a_future_that_the_loop_completes_work(group: Group) -> None:
    assert group.run(blocking, serve)[0] == [3, 4, 1, [2]]


def await_in_threads(worker: Worker) -> list[Any]:
    seen: list[Any] = []

    def run() -> None:
        for _ in range(3):  # each time a new loop
            seen.append(asyncio.run(await_everything()))

    with worker.joined():
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    return [len(seen), all(one == seen[0] for one in seen)]


def test_several_loops_of_several_threads_can_wait_at_once(group: Group) -> None:
    assert group.run(await_in_threads, serve)[0] == [9, True]


def outlive_a_loop(worker: Worker) -> list[Any]:
    futures = []

    async def start() -> None:
        future = rpc.rpc_async("w1", block)
        futures.append(future)
        waiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        futures.append(waiting)

    with worker.joined():
        asyncio.run(start())
        rpc.rpc_sync("w1", let_go)
        first = futures[0].wait()

        async def again() -> Any:
            return await futures[0]

        return [first, asyncio.run(again())]


def test_a_call_may_outlive_the_loop_that_waited_for_it(group: Group) -> None:
    assert group.run(outlive_a_loop, serve)[0] == [7, 7]


CELL = """
first = await rpc.rpc_async("w1", add, (1, 2))
second = rpc.rpc_sync("w1", add, (first, 1))
third = (await asyncio.gather(rpc.rpc_async("w1", add, (second, 1))))[0]
"""


async def run_cell(code: CodeType, names: dict[str, Any]) -> None:
    """As a notebook runs what is typed: in a loop that is running already, on the main thread."""
    result = eval(code, names)
    if isinstance(result, CoroutineType):
        await result


def notebook(worker: Worker) -> list[Any]:
    names = dict(globals())
    code = compile(CELL, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with worker.joined():
        asyncio.run(run_cell(code, names))
    return [names[name] for name in ("first", "second", "third")]


def test_futures_can_be_awaited_in_a_notebook(group: Group) -> None:
    assert group.run(notebook, serve)[0] == [3, 4, 5]


async def many() -> float:
    began = time.monotonic()
    for _ in range(10):
        await asyncio.gather(*(rpc.rpc_async("w1", add, (1, 1)) for _ in range(500)))
    return time.monotonic() - began


def burst(worker: Worker) -> float:
    with worker.joined():
        return asyncio.run(many())


def test_many_completions_wake_the_loop_rarely(group: Group) -> None:
    assert group.run(burst, serve)[0] < 15
