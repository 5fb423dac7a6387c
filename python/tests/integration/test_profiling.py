"""What profilers see of calls."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve
from torch.autograd import profiler_legacy


def multiply(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("inside"):
        return x.mul(3)


def forward(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, multiply, args=(x,)) + 1


def fail() -> None:
    raise KeyError("planted")


def names(events: Any) -> list[tuple[str, int, bool]]:
    return [(event.name, event.node_id, event.is_remote) for event in events]


def profile_nested(worker: Worker) -> tuple[list[tuple[str, int, bool]], list[tuple[float, float]]]:
    with worker.joined():
        x = torch.ones(2)
        with profiler_legacy.profile() as profile, torch.autograd.profiler.record_function("around"):
            assert rpc.rpc_sync("w1", forward, args=("w2", x)).tolist() == [4, 4]
        events = profile.function_events
        chosen = [event for event in events if event.name == "around" or event.node_id != -1]
        return names(chosen), [(event.time_range.start, event.time_range.end) for event in chosen]


def test_events_of_callees_and_of_their_callees_stand_in_the_callers_profile(group: Group) -> None:
    found, times = group.run(profile_nested, serve, serve)[0]

    outer = "rpc_sync#forward(w0 -> w1)"
    inner = f"{outer}#remote_op: rpc_sync#multiply(w1 -> w2)"
    assert found[:2] == [("around", -1, False), (outer, 0, False)]
    assert (inner, 1, True) in found
    assert (f"{inner}#remote_op: inside", 2, True) in found
    assert (f"{inner}#remote_op: aten::mul", 2, True) in found
    assert (f"{outer}#remote_op: aten::add", 1, True) in found
    assert not any("marker" in name for name, _, _ in found)
    for begin, end in times:
        assert times[0][0] <= begin <= end <= times[0][1]


def profile_failures(worker: Worker) -> list[tuple[str, int, bool]]:
    with worker.joined():
        with profiler_legacy.profile() as profile:
            with pytest.raises(KeyError, match="planted"):
                rpc.rpc_sync("w1", fail)
            with pytest.raises(RuntimeError, match="could not find destination"):
                rpc.rpc_sync("nobody", fail)
            rref = rpc.remote("w1", fail)
            rref._get_profiling_future().add_done_callback(lambda _: None)
            with pytest.raises(KeyError, match="planted"):
                rref.to_here()
            with pytest.raises(KeyError, match="planted"):
                rref._get_profiling_future().wait()
        rpc.rpc_sync("w1", min, args=(1, 2))
        return names(profile.function_events)


def test_calls_that_fail_do_so_as_without_a_profiler(group: Group) -> None:
    found = group.run(profile_failures, serve)[0]

    assert ("rpc_sync#fail(w0 -> w1)", 0, False) in found
    assert ("rpc_remote#fail(w0 -> w1)", 0, False) in found
    assert not any("#min" in name for name, _, _ in found)


def profile_locally(worker: Worker) -> list[str]:
    with worker.joined():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            first = rpc.rpc_async("w1", multiply, args=(torch.ones(2),))
            rpc.rpc_sync("w1", multiply, args=(torch.ones(2),))
            first.wait()
        return [event.name for event in profile.events()]


def test_other_profilers_have_the_local_part_of_calls_as_ranges(group: Group) -> None:
    found = group.run(profile_locally, serve)[0]

    assert found.count("rpc#multiply(w0 -> w1)") == 2
    assert "inside" not in found


def wait_all(worker: Worker) -> list[str]:
    with worker.joined():
        with profiler_legacy.profile() as profile, rpc.api._wait_all():
            rpc.rpc_async("w1", time.sleep, args=(0.05,))
            rpc.rpc_async("w1", multiply, args=(torch.ones(2),))
        return [event.name for event in profile.function_events]


def test_waiting_for_all_waits_for_their_events(group: Group) -> None:
    found = group.run(wait_all, serve)[0]

    assert "rpc_async#multiply(w0 -> w1)#remote_op: aten::mul" in found
    assert "rpc_async#sleep(w0 -> w1)" in found
