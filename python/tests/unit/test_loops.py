"""How event loops are woken."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import weakref

import pytest
from tensorcall import _tensorcall
from tensorcall.rpc._futures import Future, collect_all


def readable(bell):
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def test_many_rings_are_one_wake_up_and_all_numbers_arrive_in_order():
    bell = _tensorcall.Bell()
    for number in range(5):
        bell.ring(number)

    assert int.from_bytes(os.read(bell.fileno(), 8), "little") == 1
    assert bell.take() == [0, 1, 2, 3, 4]
    assert not readable(bell)
    bell.ring(7)
    assert readable(bell)
    assert bell.take() == [7]


def test_a_call_rings_when_it_is_done_or_at_once_if_it_is():
    bell, call = _tensorcall.Bell(), _tensorcall.Call()
    call.ring(bell, 1)
    assert bell.take() == []

    call.complete()
    call.ring(bell, 2)

    assert bell.take() == [1, 2]


def test_local_futures_and_collections_of_them_can_be_awaited():
    async def wait():
        first, second = Future(), Future()
        asyncio.get_running_loop().call_soon(first.set_result, 1)
        asyncio.get_running_loop().call_soon(second.set_exception, KeyError("x"))
        seen = [await first.then(lambda future: future.value() + 1)]
        with pytest.raises(KeyError):
            await second
        with pytest.raises(KeyError):
            await collect_all([first, second])
        return seen

    assert asyncio.run(wait()) == [2]


def test_a_future_awaited_by_several_tasks_wakes_all():
    async def wait():
        future = Future()

        async def one():
            return await future

        tasks = [asyncio.ensure_future(one()) for _ in range(5)]
        tasks[0].cancel()
        await asyncio.sleep(0)
        future.set_result("x")
        return await asyncio.gather(*tasks[1:])

    assert asyncio.run(wait()) == ["x"] * 4


def test_without_a_loop_there_is_no_waiting():
    with pytest.raises(RuntimeError, match="no running event loop"):
        Future().__await__().send(None)


def test_a_closed_loop_is_let_go_and_may_be_rung():
    async def begin(future):
        waiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        assert not waiting.done()
        return weakref.ref(asyncio.get_running_loop())

    future = Future()
    loop = asyncio.run(begin(future))
    future.set_result(1)
    asyncio.run(asyncio.wait_for(future, 1))
    gc.collect()

    assert loop() is None
