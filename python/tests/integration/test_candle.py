"""Backward passes over workers with torch, in Python, and workers with candle, in Rust.

They need the candle worker: `cargo build -p tensorcall --features candle --example candle_worker`, whose path
`TENSORCALL_CANDLE_WORKER` tells. CI has a step for that; without it these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from harness import Group, Worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "programs"))

import gradients as programs

BINARY = os.environ.get("TENSORCALL_CANDLE_WORKER", "")
TOLERANCE = 1e-9
"""Of the larger number, or of 1: all is double precision, and sums are made in another order."""
LAYOUTS = ["pc", "pcc", "pcpc"]
"""Kinds of workers by rank: p with torch, c with candle."""

pytestmark = pytest.mark.skipif(not BINARY, reason="there is no worker that computes with candle")

here: dict[str, Any] = {}
"""What the functions of this worker need."""


class CandleWorkers:
    """The processes of workers in Rust."""

    def __init__(self, group: Group, folder: Path) -> None:
        self._group = group
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, world_size: int) -> None:
        log = (self._folder / f"candle-{rank}.log").open("wb")
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._group._port),
        }
        self._processes.append(
            subprocess.Popen([BINARY], env=environment, stdout=log, stderr=subprocess.STDOUT)
        )
        log.close()

    def finish(self) -> None:
        """Wait until all have ended, well."""
        for process in self._processes:
            assert process.wait(10) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(file.read_text(errors="replace") for file in sorted(self._folder.glob("candle-*.log")))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def candle(group: Group, tmp_path: Path) -> Iterator[CandleWorkers]:
    workers = CandleWorkers(group, tmp_path)
    yield workers
    workers.close()


def _call(to: int, seed: int, depth: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = rpc.rpc_sync(f"w{to}", "run", args=(seed, depth, inputs))
    return outputs


def run(seed: int, depth: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return programs.run(here["variables"], here["workers"], _call, seed, depth, inputs)


def drive(seed: int, depth: int, passes: int) -> list[list[torch.Tensor]]:
    with dist_autograd.context() as number:
        loss = programs.loss(run(seed, depth, []))
        for left in reversed(range(passes)):
            dist_autograd.backward(number, [loss], retain_graph=left > 0)
        return [rpc.rpc_sync(f"w{to}", "gradients", args=(number,)) for to in range(here["workers"])]


def gradients(number: int) -> list[torch.Tensor]:
    try:
        found = dist_autograd.get_gradients(number)
    except RuntimeError:
        # No call came here in that context.
        found = {}
    return [found.get(variable, torch.zeros_like(variable)) for variable in here["variables"]]


def contexts() -> int:
    return int(dist_autograd._get_debug_info()["num_autograd_contexts"])


def _begin(worker: Worker) -> None:
    import tensorcall.rpc as ours

    here.update(variables=programs.variables(worker.rank), workers=worker.world_size)
    for function in (run, drive, gradients, contexts):
        ours.function(function)


def serving(worker: Worker, *_: Any) -> None:
    _begin(worker)
    with worker.joined():
        pass


def comparing(worker: Worker, count: int) -> float:
    """How far gradients are from those of one process; each worker drives some of the programs."""
    _begin(worker)
    worst = 0.0
    workers = worker.world_size
    with worker.joined():
        for number in range(count):
            first, seed, depth, passes = number % workers, 100 + number, 1 + number % 3, 1 + number % 2
            found = rpc.rpc_sync(f"w{first}", "drive", args=(seed, depth, passes))
            expected = programs.expected(workers, first, seed, depth)
            for to in range(workers):
                for got, wanted in zip(found[to], expected[to], strict=True):
                    off = programs.distance(got, wanted * passes)
                    assert off <= TOLERANCE, (number, first, to, got, wanted * passes)
                    worst = max(worst, off)
        eventually_no_contexts(workers)
    return worst


def eventually_no_contexts(workers: int) -> None:
    for _ in range(1000):
        left = [rpc.rpc_sync(f"w{to}", "contexts") for to in range(workers)]
        if not any(left):
            return
        torch.ones(1).sum()
    raise AssertionError(f"contexts have not ended: {left}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_over_torch_and_candle_are_those_of_one_process(
    group: Group, candle: CandleWorkers, layout: str
) -> None:
    for rank, kind in enumerate(layout):
        if kind == "p":
            group.add(comparing if rank == 0 else serving, rank, len(layout), (40,))
        else:
            candle.start(rank, len(layout))

    group.finish()

    candle.finish()
