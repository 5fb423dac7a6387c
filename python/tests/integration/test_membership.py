"""Joining and leaving, well and badly."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.rpc as rpc
from harness import ENGINE_VARIABLE, Group, Worker, serve

on_tensorcall = pytest.mark.skipif(
    os.environ.get(ENGINE_VARIABLE, "tensorcall") != "tensorcall", reason="torch hangs here"
)


def echo(value: Any) -> Any:
    return value


def two_lives(worker: Worker, folder: str) -> list[int]:
    seen = []
    for life in range(3):
        worker.init_method = f"file://{folder}/life-{life}"
        worker.start()
        seen.append(rpc.rpc_sync(f"w{1 - worker.rank}", echo, args=(life,)))
        rpc.shutdown()
    return seen


def test_a_process_can_join_again_after_it_left(group: Group, tmp_path: Path) -> None:
    assert group.run(two_lives, two_lives, arguments=(str(tmp_path),)) == [[0, 1, 2]] * 2


def same_name(worker: Worker) -> tuple[str, bool]:
    with pytest.raises(RuntimeError) as raised:
        worker.start(name="same", timeout=5)
    return str(raised.value), rpc.api._is_current_rpc_agent_set()


def test_two_workers_of_one_name_are_told_so(group: Group) -> None:
    """LOG row 47."""
    for text, agent_is_set in group.run(same_name, same_name):
        assert "same is not unique" in text
        assert not agent_is_set


def bad_rank(worker: Worker) -> tuple[float, str, bool]:
    began = time.monotonic()
    worker.rank = 7 if worker.rank else 0
    with pytest.raises(Exception) as raised:  # noqa: PT011  (the store may be the one to notice)
        worker.start(name=f"w{worker.rank}", timeout=2)
    return time.monotonic() - began, str(raised.value), rpc.api._is_current_rpc_agent_set()


@on_tensorcall
def test_a_rank_beyond_the_world_is_an_error_on_every_worker(group: Group) -> None:
    """LOG row 48."""
    outcomes = group.run(bad_rank, bad_rank)

    for seconds, text, agent_is_set in outcomes:
        assert seconds < 20
        assert text
        assert not agent_is_set
    assert "7" in outcomes[1][1]


def fail_to_join(worker: Worker) -> tuple[float, str, bool]:
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        worker.start(timeout=10)
    return time.monotonic() - began, str(raised.value), rpc.api._is_current_rpc_agent_set()


@on_tensorcall
@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        (["one", "other", "one"], r"rank\(s\) \[0, 2\] have one, rank\(s\) \[1\] have another"),
        (["one", None, "one"], r"rank\(s\) \[1\] have (no secret|another)"),
        ([None, "one", None], r"rank\(s\) \[0, 2\] have (one|no secret), rank\(s\) \[1\] have (one|another)"),
    ],
)
def test_workers_of_different_secrets_are_told_whose_differ(
    group: Group, secrets: list[str | None], said: str
) -> None:
    for rank, secret in enumerate(secrets):
        group.environment["TENSORCALL_SECRET"] = secret or ""
        group.add(fail_to_join, rank, world_size=3)

    for outcome in group.finish():
        seconds, text, agent_is_set = outcome.value
        assert seconds < 9
        assert "different secrets" in text
        assert re.search(said, text)
        assert not agent_is_set


def meet_by_secret(worker: Worker) -> int:
    with worker.joined():
        return int(rpc.rpc_sync(f"w{1 - worker.rank}", echo, args=(5,)))


def test_workers_of_one_secret_meet(group: Group) -> None:
    group.environment["TENSORCALL_SECRET"] = "the same secret"

    assert group.run(meet_by_secret, meet_by_secret) == [5, 5]


def join_twice(worker: Worker, folder: str) -> str:
    worker.init_method = f"file://{folder}/store"
    worker.start()
    with pytest.raises(RuntimeError) as raised:
        worker.start()
    rpc.shutdown()
    return str(raised.value)


def test_joining_twice_is_an_error(group: Group, tmp_path: Path) -> None:
    texts = group.run(join_twice, arguments=(str(tmp_path),))

    assert "RPC is already initialized" in texts[0]


def leave_twice(worker: Worker) -> list[str]:
    seen = []
    worker.start()
    rpc.shutdown()
    for act in (rpc.shutdown, lambda: rpc.rpc_sync("w0", echo, args=(1,)), rpc.get_worker_info):
        with pytest.raises(RuntimeError) as raised:
            act()
        seen.append(str(raised.value))
    return seen


def test_without_an_agent_every_call_says_so(group: Group) -> None:
    for text in group.run(leave_twice, leave_twice)[0]:
        assert "RPC has not been initialized" in text


def unknown_worker(worker: Worker) -> list[str]:
    seen = []
    with worker.joined():
        for to, error in (("nobody", RuntimeError), (5, RuntimeError), (-1, RuntimeError), (0.5, ValueError)):
            with pytest.raises(error) as raised:
                rpc.rpc_sync(to, echo, args=(1,))
            seen.append(str(raised.value))
    return seen


def test_calling_somebody_who_does_not_exist_is_an_error_at_once(group: Group) -> None:
    assert len(group.run(unknown_worker, serve)[0]) == 4


def look_around(worker: Worker) -> tuple[tuple[str, int], tuple[str, int]]:
    with worker.joined():
        me, first = rpc.get_worker_info(), rpc.get_worker_info("w0")
    return (me.name, me.id), (first.name, first.id)


def test_workers_know_each_other_by_name_and_rank(group: Group) -> None:
    seen = group.run(look_around, look_around, look_around)

    assert seen == [((f"w{rank}", rank), ("w0", 0)) for rank in range(3)]


def exit_without_leaving(worker: Worker) -> None:
    worker.start()
    rpc.rpc_sync(f"w{1 - worker.rank}", echo, args=(1,))


@on_tensorcall
def test_ending_without_shutdown_ends_well(group: Group) -> None:
    group.run(exit_without_leaving, serve)


def shut_down_unevenly(worker: Worker) -> float:
    worker.start()
    if worker.rank == 2:
        worker.hear()
    began = time.monotonic()
    rpc.shutdown()
    return time.monotonic() - began


def test_graceful_shutdown_waits_for_the_last_worker(group: Group) -> None:
    group.start(shut_down_unevenly, shut_down_unevenly, shut_down_unevenly)
    with pytest.raises(AssertionError, match="were still there"):
        _ends_within(group, 1.5)


def _ends_within(group: Group, seconds: float) -> None:
    group.deadline = time.monotonic() + seconds
    group.finish()
