"""Groups that workers join, leave and come back to at run time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker


def double(value: Any) -> Any:
    return value * 2


def pause(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def member(worker: Worker, init_method: str) -> None:
    """Does what the test says until it says no more."""
    pending: list[rpc.Future[Any]] = []
    while (order := worker.hear()) is not None:
        try:
            worker.tell(obey(order, init_method, pending))
        except Exception as error:
            worker.tell(error)


def obey(order: tuple[Any, ...], init_method: str, pending: list[Any]) -> Any:
    what, *arguments = order
    match what:
        case "join":
            name, rank = arguments
            options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=15)
            rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
            return rpc.api._get_current_rpc_agent().is_static_group
        case "join static":
            name, rank, size = arguments
            options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=15)
            return rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
        case "call":
            to, value = arguments
            return rpc.rpc_sync(to, double, args=(value,))
        case "start pause":
            to, seconds = arguments
            return pending.append(rpc.rpc_async(to, pause, args=(seconds,)))
        case "wait":
            return [future.wait() for future in pending]
        case "names":
            agent = rpc.api._get_current_rpc_agent()
            return [info.name for info in agent.get_worker_infos()]
        case "leave":
            return rpc.shutdown()
        case "hold the turn":
            from tensorcall.rpc import _dynamic, _membership

            agent = rpc.api._get_current_rpc_agent()
            turn = _dynamic._Turn(_membership.keys_of(agent.store), "stuck")
            return turn._acquire(_membership.Deadline(5))
    raise ValueError(what)


class Members:
    """Worker processes that are told what to do, one order after the other."""

    def __init__(self, group: Group, init_method: str) -> None:
        self.group = group
        self.init_method = init_method

    def add(self) -> int:
        """Starts one more process; its number."""
        return self.group.add(member, 0, 0, (self.init_method,))

    def order(self, number: int, *order: Any) -> Any:
        """What comes of an order; raises what it raised."""
        self.group.tell(number, order)
        outcome = self.group.hear(number)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def end(self, *killed: int) -> None:
        """Lets all of them end."""
        for number in range(len(self.group._processes)):
            if number not in killed:
                self.group.tell(number, None)
        self.group.finish(expect_killed=killed)


@pytest.fixture
def members(group: Group, tmp_path: Path) -> Members:
    group.deadline = time.monotonic() + 60
    return Members(group, f"file://{tmp_path / 'store'}")


def test_workers_come_one_after_the_other_and_call_each_other(members: Members) -> None:
    """LOG row 111."""
    numbers = [members.add() for _ in range(3)]

    for number in numbers:
        assert members.order(number, "join", f"w{number}", number) is False
        for one in numbers[: number + 1]:
            for other in numbers[: number + 1]:
                assert members.order(one, "call", f"w{other}", torch.ones(2)).tolist() == [2, 2]

    for number in numbers:
        assert members.order(number, "names") == [f"w{other}" for other in numbers[number:]]
        members.order(number, "leave")
    members.end()


def test_a_worker_that_left_is_unknown_and_may_come_back(members: Members) -> None:
    """LOG row 111."""
    for number in (members.add(), members.add()):
        members.order(number, "join", f"w{number}", number)
    members.order(1, "leave")

    assert members.order(0, "names") == ["w0"]
    with pytest.raises(RuntimeError, match="could not find destination"):
        members.order(0, "call", "w1", 1)

    members.order(1, "join", "again", 5)
    assert members.order(0, "call", "again", 4) == 8
    assert members.order(0, "call", 5, 4) == 8
    assert members.order(1, "call", "w0", 4) == 8
    members.order(0, "leave")
    members.order(1, "leave")
    members.end()


def test_a_worker_that_was_killed_comes_back_under_its_name(members: Members) -> None:
    """LOG row 111."""
    for number in (members.add(), members.add(), members.add()):
        members.order(number, "join", f"w{number}", number)
    members.order(0, "start pause", "w1", 30)
    members.group.kill(1)
    with pytest.raises(RuntimeError, match="w1"):
        members.order(0, "wait")

    again = members.add()
    members.order(again, "join", "w1", 1)

    for one in (0, 2, again):
        for other in ("w0", "w1", "w2"):
            assert members.order(one, "call", other, 21) == 42
    members.end(1)


def test_members_join_after_the_first_one_has_left_or_died(members: Members) -> None:
    """LOG row 112."""
    for number in (members.add(), members.add(), members.add()):
        members.order(number, "join", f"w{number}", number)
    members.order(0, "leave")
    members.group.kill(1)

    later = members.add()
    members.order(later, "join", "later", 3)

    assert members.order(later, "call", "w2", 3) == 6
    assert members.order(2, "call", "later", 4) == 8
    members.order(2, "leave")
    members.order(later, "leave")
    members.end(1)


def test_the_name_or_rank_of_a_live_worker_is_refused_and_does_no_harm(members: Members) -> None:
    first, second = members.add(), members.add()
    members.order(first, "join", "w0", 0)

    with pytest.raises(RuntimeError, match="is not unique"):
        members.order(second, "join", "w0", 1)
    with pytest.raises(RuntimeError, match="two workers claim rank 0: w0 and other"):
        members.order(second, "join", "other", 0)

    members.order(second, "join", "other", 1)
    assert members.order(first, "call", "other", 2) == 4
    members.end()


def test_static_and_dynamic_members_do_not_mix(members: Members) -> None:
    first, second = members.add(), members.add()
    members.order(first, "join", "w0", 0)

    with pytest.raises(RuntimeError, match="mixes statically and dynamically"):
        members.order(second, "join static", "w1", 0, 1)
    members.end()


def test_a_worker_leaves_when_its_own_calls_are_answered(members: Members) -> None:
    for number in (members.add(), members.add()):
        members.order(number, "join", f"w{number}", number)
    members.order(1, "start pause", "w0", 0.5)

    members.order(1, "leave")

    assert members.order(1, "wait") == ["done"]
    members.order(0, "leave")
    members.end()


def test_who_stops_while_joining_is_passed_over(members: Members) -> None:
    """LOG row 112."""
    first, second = members.add(), members.add()
    members.order(first, "join", "w0", 0)
    members.order(first, "hold the turn")
    began = time.monotonic()

    members.order(second, "join", "w1", 1)

    assert 8 < time.monotonic() - began < 14
    assert members.order(first, "call", "w1", 3) == 6
    members.end()


def test_without_the_store_members_go_on_and_leave_and_nobody_joins(group: Group) -> None:
    """LOG row 112."""
    group.deadline = time.monotonic() + 90
    members = Members(group, f"tcp://127.0.0.1:{group._port}")
    for number in (members.add(), members.add(), members.add()):
        members.order(number, "join", f"w{number}", number)
    group.kill(0)

    assert members.order(1, "call", "w2", 3) == 6
    late = members.add()
    began = time.monotonic()
    with pytest.raises((RuntimeError, OSError)):
        members.order(late, "join", "late", 3)
    assert time.monotonic() - began < 60

    members.order(1, "leave")
    with pytest.raises(RuntimeError, match="could not find destination"):
        members.order(2, "call", "w1", 1)
    members.order(2, "leave")
    members.end(0)


def test_a_rank_has_to_be_given(tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path / 'store'}")
    with pytest.raises(ValueError, match="rank parameter missing"):
        rpc.init_rpc("w0", rpc_backend_options=options)
    assert "RANK" not in os.environ
