"""What keeps workers from meeting is told to every one of them, in bounded time: what, and who."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.rpc as rpc
from harness import Group, Worker

PATIENCE = 3.0
"""Seconds for meeting, in place of the five that workers get at least. They all start within it."""
LATE = 4 * PATIENCE


def fail_to_join(worker: Worker, init_methods: dict[int, str] | None = None) -> dict[str, Any]:
    from tensorcall.rpc import _membership

    _membership.MIN_PATIENCE = PATIENCE
    if init_methods:
        worker.init_method = init_methods.get(worker.rank, worker.init_method)
    began = time.monotonic()
    with pytest.raises(Exception) as raised:  # noqa: PT011  (the store may be the one to notice)
        worker.start(timeout=PATIENCE)
    seconds = time.monotonic() - began
    return {"text": str(raised.value), "seconds": seconds, "set": rpc.api._is_current_rpc_agent_set()}


def texts(group: Group) -> list[str]:
    found = []
    for outcome in group.finish():
        assert outcome.value["seconds"] < LATE, outcome.value
        assert not outcome.value["set"], outcome.value
        found.append(outcome.value["text"])
    return found


def test_a_worker_that_does_not_come_is_named_to_all(group: Group) -> None:
    """LOG row 13: who is late fails nobody else's start without being named."""
    for rank in (0, 2):
        group.add(fail_to_join, rank, world_size=3)

    for text in texts(group):
        assert "missing rank(s) [1] of world size 3" in text


def test_a_wrong_port_is_named_where_it_was_given_and_its_worker_elsewhere(group: Group) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    group.start(fail_to_join, fail_to_join, arguments=({1: f"tcp://127.0.0.1:{port}"},))

    here, there = texts(group)

    assert "missing rank(s) [1]" in here
    assert "127.0.0.1" in there
    assert str(port) in there


def test_a_host_that_does_not_exist_is_named(group: Group) -> None:
    group.start(fail_to_join, fail_to_join, arguments=({1: "tcp://no.such.host.invalid:1"},))

    here, there = texts(group)

    assert "missing rank(s) [1]" in here
    assert "no.such.host.invalid" in there


def test_a_port_that_somebody_else_has_is_named_to_all(group: Group) -> None:
    """Somebody who takes connections and says nothing, or something else."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        init_method = f"tcp://127.0.0.1:{port}"
        group.start(fail_to_join, fail_to_join, arguments=({0: init_method, 1: init_method},))

        for text in texts(group):
            assert str(port) in text


def leave_a_file(worker: Worker, folder: str) -> None:
    worker.init_method = f"file://{folder}/store"
    worker.start()
    worker.tell("joined")
    time.sleep(60)


@pytest.mark.parametrize("size_before", [1, 2], ids=["a smaller job", "a job alike"])
def test_a_file_that_an_earlier_job_left_is_named(group: Group, tmp_path: Path, size_before: int) -> None:
    group.start(*[leave_a_file] * size_before, arguments=(str(tmp_path),))
    for index in range(size_before):
        assert group.hear(index) == "joined"
    for index in range(size_before):
        group.kill(index)
    store = tmp_path / "store"
    assert store.exists()

    places = [group.add(fail_to_join, rank, 2, ({rank: f"file://{store}"},)) for rank in (0, 1)]

    outcomes = group.finish(expect_killed=tuple(range(size_before)))
    for place in places:
        text = outcomes[place].value["text"]
        assert f"{store} is left from an earlier job" in text, text
        assert outcomes[place].value["seconds"] < LATE


def live_as_different_ranks(worker: Worker, folder: str) -> list[int]:
    seen = []
    for life in range(3):
        worker.init_method = f"file://{folder}/store"
        worker.rank = 1 - worker.rank
        worker.start()
        seen.append(rpc.rpc_sync(f"w{1 - worker.rank}", max, args=(life, worker.rank)))
        rpc.shutdown()
    return seen


def test_a_process_joins_again_as_another_rank(group: Group, tmp_path: Path) -> None:
    first, second = group.run(live_as_different_ranks, live_as_different_ranks, arguments=(str(tmp_path),))

    assert (first, second) == ([1, 1, 2], [0, 1, 2])
