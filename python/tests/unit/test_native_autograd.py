"""What the extension passes on of distributed autograd."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_pair import NativeWorker, joined
from tensorcall import _tensorcall
from tensorcall.rpc import _call

SOON = 10.0


class Worker(NativeWorker):
    """A worker that notes the places in autograd contexts that it gets, and answers with others."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.value: Any = 5
        self.asked: list[tuple[Any, ...]] = []

    def run_pickled(self, payload: bytes, tensors: Any, rrefs: Any, caller: int, autograd: Any) -> Any:
        self.asked.append(("run", caller, autograd))
        return 1, b"result", [], [], (7, 8)

    def run_pickled_here(self, payload: bytes, tensors: Any, rrefs: Any, caller: int, autograd: Any) -> Any:
        self.asked.append(("run", caller, autograd))
        return self.value

    def dump_result(self, obj: object, autograd: Any, caller: int) -> Any:
        self.asked.append(("dump", caller, autograd))
        return 1, b"result", [], [], (7, 8)

    def record_result(self, tensors: list[torch.Tensor], autograd: Any, caller: int) -> Any:
        self.asked.append(("record", caller, autograd))
        return (7, 8)


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    with joined(Worker(0), Worker(1)) as pair:
        yield pair


def take(call: _tensorcall.Call) -> Any:
    assert call.wait(SOON)
    return call.result()


@pytest.mark.parametrize("place", [(3, 4), ((1 << 48) + 1, None)])
def test_a_call_and_its_result_bring_their_places_in_a_context(
    workers: tuple[Worker, Worker], place: tuple[int, int | None]
) -> None:
    here, there = workers

    answer = take(here.native.call_pickled(1, "label", b"", [], [], SOON, place))

    assert answer == (1, b"result", [], [], (7, 8))
    assert there.asked == [("run", 0, place)]


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        (5, []),
        (torch.ones(2), []),
        (torch.ones(2, requires_grad=True), [("record", 0, (3, None))]),
        ({1}, [("dump", 0, (3, None))]),
    ],
)
def test_a_value_that_stays_is_recorded_when_it_is_fetched(
    workers: tuple[Worker, Worker], value: Any, asked: list[Any]
) -> None:
    here, there = workers
    there.value = value
    rref, creation = here.native.remote_pickled(1, "label", b"", [], [], SOON, (3, 4))
    assert isinstance(creation, _tensorcall.Call)

    assert take(creation) == (0, None, [], [], None)
    assert take(rref.fetch(SOON, "to_here", (3, None)))[4] == ((7, 8) if asked else None)
    assert there.asked == [("run", 0, (3, 4)), *asked]


def test_without_a_context_results_are_plain_data_if_they_can_be(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    rref, _ = here.native.remote_pickled(1, "label", b"", [], [], SOON)

    assert take(rref.fetch(SOON)) == (0, 5, [], [], None)
    assert there.asked == [("run", 0, None)]
    assert torch.is_grad_enabled()


class Engine(Worker):
    """A worker with a local engine for one context: worker 0 sent a tensor to 1, and its double came back."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.told: list[Any] = []
        self.trouble: BaseException | None = None

    def autograd_plan(self, context: int, pass_: Any, roots: Any) -> Any:
        self.told.append(("plan", context, pass_, roots))
        if self._info.id == 0:
            return [(10, 1)], [(11, 1, [1])], [1]
        return [(11, 0)], [(10, 0, [0])], []

    def autograd_vjp(
        self, context: int, pass_: Any, arrived: Any, wanted: Any, last: bool, keep: bool
    ) -> Any:
        self.told.append(("vjp", [message for message, _ in arrived], wanted, last, keep))
        if self.trouble is not None and self._info.id == 1:
            raise self.trouble
        if self._info.id == 0:
            self.gradient = arrived[0][1]
            return [(message, (None, [torch.ones(2), None])) for message in wanted]
        payload, (tensor, nothing) = arrived[0][1]
        assert payload is None
        assert nothing is None
        return [(10, (b"packed by Python", [tensor * 2]))]

    def autograd_end(self, context: int, pass_: Any, error: Any) -> None:
        self.told.append(("end", repr(error)))


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    with joined(Engine(0), Engine(1)) as pair:
        yield pair


def test_a_backward_pass_asks_the_handlers_of_both_workers(engines: tuple[Engine, Engine]) -> None:
    here, there = engines

    for number in range(2):
        answer = take(here.native.backward(5, "roots", True, SOON))

        assert answer == (0, None, [], [], None)
        plan = ("plan", 5, (0, number))
        end = ("end", "None")
        assert here.told == [
            (*plan, "roots"),
            ("vjp", [None], [11], False, True),
            ("vjp", [10], [], True, True),
            end,
        ]
        assert there.told == [(*plan, None), ("vjp", [11], [10], True, True), end]
        payload, tensors = here.gradient
        assert payload == b"packed by Python"
        assert torch.equal(tensors[0], torch.full((2,), 2.0))
        assert here.native.current_passes() == there.native.current_passes() == 0
        here.told.clear()
        there.told.clear()


def test_an_exception_of_a_local_engine_reaches_the_caller_and_all_workers(
    engines: tuple[Engine, Engine],
) -> None:
    here, there = engines
    there.trouble = ValueError("no luck")

    call = here.native.backward(5, "roots", False, SOON)

    assert call.wait(SOON)
    with pytest.raises(RuntimeError, match=r"^no luck$"):
        _call.decode(*call.result())
    assert "no luck" in here.told[-1][1]
    # The other worker is told without the caller waiting for that.
    end = time.monotonic() + SOON
    while "no luck" not in there.told[-1][1] and time.monotonic() < end:
        time.sleep(0.01)
    assert "no luck" in there.told[-1][1]
    there.trouble = None
    assert take(here.native.backward(5, "roots", False, SOON))[0] == 0


def test_a_pass_ends_when_a_worker_is_gone(engines: tuple[Engine, Engine]) -> None:
    here, there = engines
    there.native.close(False)

    call = here.native.backward(5, "roots", False, SOON)

    assert call.wait(SOON)
    with pytest.raises(RuntimeError, match="worker1"):
        call.result()
    assert "worker1" in here.told[-1][1]
