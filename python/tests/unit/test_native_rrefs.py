"""References as the extension has them: two agents in one process, without the package's interface."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from native_pair import NativeWorker, joined
from tensorcall import _tensorcall
from tensorcall.rpc import _call

SOON = 20.0
NO_RREFS = {"num_owner_rrefs": 0, "num_pending_users": 0, "num_pending_futures": 0, "num_forks": 0}


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


class Worker(NativeWorker):
    """Knows a few functions; what it is given it keeps."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.given: list[_tensorcall.RRef] = []
        self.go = threading.Event()
        self.laters: list[_tensorcall.Later] = []

    def resolve(self, name: str) -> Callable[..., Any]:
        return {
            "ones": torch.ones,
            "wait": self.wait,
            "fail": self.fail,
            "set": lambda: {1, 2},
            "later": self.later,
        }[name]

    def run_pickled_here(self, payload: bytes, tensors: Any, rrefs: Any, caller: int, autograd: Any) -> Any:
        if payload == b"take":
            self.given.extend(rrefs)
            return [rref.confirmed() for rref in rrefs]
        if payload == b"fail":
            raise KeyError("pickled")
        return super().run_pickled_here(payload, tensors, rrefs, caller, autograd)

    def dump_result(self, obj: object, autograd: Any, caller: int) -> Any:
        if obj == "given":
            return 1, b"given", [], self.given, autograd
        return super().dump_result(obj, autograd, caller)

    def run_value(self, function: Any, args: Any, kwargs: Any, caller: int) -> Any:
        return function(*args, **kwargs)

    def wait(self) -> set[int]:
        assert self.go.wait(SOON)
        return {3}

    def fail(self) -> None:
        raise ValueError("no luck")

    def later(self) -> _tensorcall.Later:
        self.laters.append(_tensorcall.Later(self))
        return self.laters[-1]


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    with joined(Worker(0), Worker(1)) as pair:
        yield pair


def value(rref: _tensorcall.RRef) -> Any:
    return take(rref.fetch(SOON))


def take(call: _tensorcall.Call) -> Any:
    assert call.wait(SOON)
    return _call.decode(*call.result())


def remote(worker: Worker, to: int, name: str, *args: Any) -> tuple[_tensorcall.RRef, _tensorcall.Call]:
    made = worker.native.remote(to, name, args, {}, SOON)
    assert made is not None
    return made


def test_a_value_stays_with_its_owner_and_is_copied_by_each_fetch(workers: tuple[Worker, Worker]) -> None:
    here, there = workers

    rref, creation = remote(here, 1, "ones", 3)

    assert torch.equal(value(rref), torch.ones(3))
    assert torch.equal(value(rref), torch.ones(3))
    assert take(creation) is None
    assert not rref.is_owner()
    assert rref.owner() == 1
    assert rref.confirmed()
    assert (rref.rref_id(), rref.fork_id(), rref.state()) == ((0, 0), (0, 1), "ok")
    assert repr(rref).startswith("UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=0), ")
    assert there.native.rref_counts() == {**NO_RREFS, "num_owner_rrefs": 1, "num_forks": 1}
    del rref
    eventually(lambda: there.native.rref_counts() == NO_RREFS)


def test_a_value_is_fetched_before_it_is_there(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    rref, _ = remote(here, 1, "wait")

    fetch = rref.fetch(SOON)
    assert not fetch.wait(0.01)
    there.go.set()

    assert take(fetch) == {3}


def test_an_exception_of_the_function_comes_with_every_fetch(workers: tuple[Worker, Worker]) -> None:
    here, _ = workers
    rref, creation = remote(here, 1, "fail")
    creation.disregard()

    for _ in range(2):
        with pytest.raises(ValueError, match="no luck"):
            value(rref)

    pickled, _ = here.native.remote_pickled(1, "label", b"fail", [], [], SOON)
    with pytest.raises(KeyError, match="pickled"):
        value(pickled)


def test_an_rref_of_oneself_has_the_very_object(workers: tuple[Worker, Worker]) -> None:
    here, _ = workers
    rref, _ = remote(here, 0, "wait")

    assert rref.is_owner()
    assert rref.confirmed()
    assert rref.fork_id() == rref.rref_id()
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref.local_value(0.01)
    here.go.set()
    assert rref.local_value(SOON) == {3}
    assert rref.local_value(None) is rref.local_value(None)

    failed, creation = remote(here, 0, "fail")
    creation.disregard()
    for _ in range(2):
        with pytest.raises(ValueError, match="no luck"):
            failed.local_value(SOON)


def test_a_local_rref_enters_the_table_when_it_is_shared(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    thing = {"a": torch.zeros(2)}
    rref = here.native.make_rref(thing)
    assert rref.local_value(None) is thing
    assert here.native.rref_counts() == NO_RREFS

    call = here.native.call_pickled(1, "take", b"take", [], [rref, rref], SOON)

    assert take(call) == [True, True]
    assert [given.rref_id() for given in there.given] == [rref.rref_id()] * 2
    assert here.native.rref_counts() == {**NO_RREFS, "num_owner_rrefs": 1, "num_forks": 2}
    assert torch.equal(value(there.given[0])["a"], torch.zeros(2))
    leak = here.native.leaks()[0]
    assert (leak[0], leak[1], leak[2]) == (rref.rref_id(), there.given[0].fork_id(), 1)
    del rref
    assert torch.equal(value(there.given[1])["a"], torch.zeros(2))
    there.given.clear()
    eventually(lambda: here.native.rref_counts() == NO_RREFS)


def test_a_result_that_comes_later_stays_too(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    rref, creation = remote(here, 1, "later")
    eventually(lambda: len(there.laters) == 1)
    fetch = rref.fetch(SOON)

    assert there.laters[0].returned({5})

    assert take(creation) is None
    assert take(fetch) == {5}


def test_values_go_while_their_owner_is_idle(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    gone = threading.Event()

    class Value:
        def __del__(self) -> None:
            gone.set()

    there.wait = Value  # type: ignore[method-assign, assignment]
    rref, creation = remote(here, 1, "wait")
    assert creation.wait(SOON)
    gc.collect()
    assert not gone.is_set()

    del rref

    assert gone.wait(SOON)


def test_after_the_end_a_handle_says_what_happened(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    rref, creation = remote(here, 1, "set")
    assert creation.wait(SOON)

    assert here.native.delete_rrefs(SOON)
    assert there.native.delete_rrefs(SOON)

    assert rref.state() == "deleted"
    with pytest.raises(
        RuntimeError, match=r"has been deleted. Cannot call to_here\(\) on it after deletion."
    ):
        rref.fetch(SOON)
    with pytest.raises(RuntimeError, match=r"has been deleted. Cannot call fork an UserRRef after deletion."):
        here.native.call_pickled(1, "take", b"take", [], [rref], SOON)
    here.native.close(True)
    assert (rref.owner(), rref.state()) == (1, "deleted")
    assert there.native.leaks() == []


def test_a_creation_that_times_out_marks_its_rref(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    made = here.native.remote(1, "wait", (), {}, 0.02)
    assert made is not None
    rref, creation = made
    assert creation.wait(SOON)

    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        creation.result()
    timed_out = r"RRef creation via rpc.remote\(\) timed out, and it is possible"
    with pytest.raises(RuntimeError, match=timed_out):
        rref.fetch(SOON)
    with pytest.raises(RuntimeError, match=timed_out):
        here.native.call_pickled(1, "", b"", [], [rref], SOON)
    assert rref.state() == "failed"
    there.go.set()
    del rref, made
    eventually(lambda: there.native.rref_counts() == NO_RREFS)
