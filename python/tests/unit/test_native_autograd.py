"""What the extension passes on of distributed autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensorcall import _tensorcall
from tensorcall.rpc._handler import Handler
from tensorcall.rpc._worker import WorkerInfo

SOON = 10.0


class Worker(Handler):
    """A worker that notes the places in autograd contexts that it gets, and answers with others."""

    def __init__(self, rank: int) -> None:
        super().__init__(WorkerInfo(f"worker{rank}", rank))
        self.asked: list[tuple[Any, ...]] = []
        self.native = _tensorcall.Agent(
            f"worker{rank}",
            rank,
            job="test_native_autograd",
            secret=b"secret",
            num_worker_threads=2,
            host=None,
            handler=self,
        )

    def run_pickled_here(self, payload: bytes, tensors: Any, rrefs: Any, caller: int, autograd: Any) -> Any:
        self.asked.append(("run", caller, autograd))
        return 5

    def dump_result(self, obj: object, autograd: Any, caller: int) -> Any:
        self.asked.append(("dump", caller, autograd))
        return 1, b"result", [], [], (7, 8)


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    pair = Worker(0), Worker(1)
    roster = [(f"worker{rank}", rank, worker.native.contact()) for rank, worker in enumerate(pair)]
    for worker in pair:
        worker.native.open(roster, False)
    try:
        yield pair
    finally:
        for worker in pair:
            worker.native.close(False)


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
    assert there.asked == [("run", 0, place), ("dump", 0, place)]


def test_a_value_that_stays_is_recorded_when_it_is_fetched(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    rref, creation = here.native.remote_pickled(1, "label", b"", [], [], SOON, (3, 4))
    assert isinstance(creation, _tensorcall.Call)

    assert take(creation) == (0, None, [], [], None)
    assert take(rref.fetch(SOON, "to_here", (3, None)))[4] == (7, 8)
    assert there.asked == [("run", 0, (3, 4)), ("dump", 0, (3, None))]


def test_without_a_context_results_are_plain_data_if_they_can_be(workers: tuple[Worker, Worker]) -> None:
    here, there = workers
    rref, _ = here.native.remote_pickled(1, "label", b"", [], [], SOON)

    assert take(rref.fetch(SOON)) == (0, 5, [], [], None)
    assert there.asked == [("run", 0, None)]
    assert torch.is_grad_enabled()
