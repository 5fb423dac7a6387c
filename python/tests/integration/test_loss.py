"""A worker that is killed takes its own calls with it, and nothing else."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

LIMIT = 2.0
"""Seconds in which the loss of a worker must show."""

release = threading.Event()


def block() -> str:
    release.wait(30)
    return "released"


def let_go() -> None:
    release.set()


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def witness(worker: Worker) -> dict[str, object]:
    """Has calls under way on the victim and on a third worker when the victim dies."""
    worker.start(timeout=25)
    lost = [rpc.rpc_async("w1", block) for _ in range(8)]
    kept = rpc.rpc_async("w2", block)
    rpc.rpc_sync("w1", add_one, args=(torch.zeros(2),))  # so the ones before are there
    worker.tell("calls are under way")
    began = worker.hear()
    errors = []
    for future in lost:
        with pytest.raises(RuntimeError) as raised:
            future.wait()
        errors.append(str(raised.value))
    seconds = time.monotonic() - began
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync("w1", add_one, args=(torch.zeros(2),))
    seconds_later = time.monotonic() - began
    other = rpc.rpc_sync("w2", add_one, args=(torch.zeros(2),))
    rpc.rpc_sync("w2", let_go)
    kept_value = kept.wait()
    began = time.monotonic()
    rpc.shutdown(graceful=True)
    return {
        "errors": [*errors, str(raised.value)],
        "seconds": seconds,
        "seconds_later": seconds_later,
        "other": other.tolist(),
        "kept": kept_value,
        "shutdown": time.monotonic() - began,
    }


def test_killing_a_worker_fails_its_calls_within_two_seconds_and_harms_nobody_else(
    group: Group,
) -> None:
    """LOG row 33."""
    group.start(witness, serve, serve)
    group.hear(0)
    group.kill(1)
    group.tell(0, time.monotonic())

    seen = group.finish(expect_killed=(1,))[0].value

    assert seen["seconds"] < LIMIT
    assert seen["seconds_later"] < 2 * LIMIT
    for error in seen["errors"]:
        assert "w1" in error
    assert seen["other"] == [1, 1]
    assert seen["kept"] == "released"
    assert seen["shutdown"] < 10


def leave_and_be_missed(worker: Worker) -> str:
    worker.start(timeout=25)
    pending = rpc.rpc_async("w1", block)
    worker.tell("call is under way")
    rpc.shutdown(graceful=False)
    with pytest.raises(RuntimeError) as raised:
        pending.wait()
    return str(raised.value)


def stay(worker: Worker) -> str:
    worker.start(timeout=25)
    with pytest.raises(RuntimeError) as raised:
        while True:  # until the loss of w0 shows
            rpc.rpc_sync("w0", add_one, args=(torch.zeros(1),))
            time.sleep(0.01)
    let_go()
    rpc.shutdown(graceful=False)
    return str(raised.value)


def test_leaving_without_grace_fails_the_calls_of_both_sides(group: Group) -> None:
    errors = group.run(leave_and_be_missed, stay)

    assert all(errors)


def shut_down_with_a_dead_peer(worker: Worker) -> float:
    worker.start(timeout=25)
    worker.tell("ready")
    worker.hear()
    began = time.monotonic()
    rpc.shutdown(graceful=True)
    return time.monotonic() - began


def test_graceful_shutdown_returns_when_a_peer_was_killed_while_idle(group: Group) -> None:
    group.start(shut_down_with_a_dead_peer, shut_down_with_a_dead_peer, serve)
    for index in (0, 1):
        group.hear(index)
    group.kill(2)
    for index in (0, 1):
        group.tell(index, "go")

    outcomes = group.finish(expect_killed=(2,))

    assert max(outcome.value for outcome in outcomes[:2]) < 10


def test_graceful_shutdown_returns_when_rank_zero_was_killed(group: Group) -> None:
    group.start(serve, shut_down_with_a_dead_peer, shut_down_with_a_dead_peer)
    for index in (1, 2):
        group.hear(index)
    group.kill(0)
    for index in (1, 2):
        group.tell(index, "go")

    outcomes = group.finish(expect_killed=(0,))

    assert max(outcome.value for outcome in outcomes[1:]) < 10
