"""Backward passes over workers with torch, in Python, and workers with candle, in Rust.

Those with candle need its worker, which `TENSORCALL_CANDLE_WORKER` names and is made by
`cargo build -p tensorcall --features candle --example candle_worker`. CI has a step for that; without it they
are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
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
PATIENCE = 10.0
"""Seconds in which whatever happens on its own has happened."""
TOLERANCE = 1e-9
"""Of the larger number, or of 1: all is double precision, and sums are made in another order."""
LAYOUTS = ["pp", "pc", "pcc", "pcpc"]
"""Kinds of workers by rank: p with torch, c with candle."""

here: dict[str, Any] = {}
"""What the functions of this worker need."""


class CandleWorkers:
    """The processes of workers in Rust."""

    def __init__(self, group: Group, folder: Path) -> None:
        self._group = group
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, world_size: int) -> None:
        if not BINARY:
            pytest.skip("there is no worker that computes with candle")
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
        return "\n".join(
            file.read_text(errors="replace") for file in sorted(self._folder.glob("candle-*.log"))
        )

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


def comparing(worker: Worker, count: int) -> int:
    """Compare gradients with those of one process; each worker drives some of the programs.

    Returns on how many workers there were gradients in all.
    """
    _begin(worker)
    spread = 0
    workers = worker.world_size
    with worker.joined():
        for number in range(count):
            first, seed, depth, passes = number % workers, 100 + number, 1 + number % 3, 1 + number % 2
            found = rpc.rpc_sync(f"w{first}", "drive", args=(seed, depth, passes))
            expected = programs.expected(workers, first, seed, depth)
            for to in range(workers):
                spread += any(bool(wanted.any()) for wanted in expected[to])
                for got, wanted in zip(found[to], expected[to], strict=True):
                    off = programs.distance(got, wanted * passes)
                    assert off <= TOLERANCE, (number, first, to, got, wanted * passes)
        wait_for_no_contexts(workers)
    return spread


def wait_for_no_contexts(workers: int) -> None:
    end = time.monotonic() + PATIENCE
    while any(rpc.rpc_sync(f"w{to}", "contexts") for to in range(workers)):
        assert time.monotonic() < end, "contexts have not ended"
        time.sleep(0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_over_torch_and_candle_are_those_of_one_process(
    group: Group, candle: CandleWorkers, layout: str
) -> None:
    start(group, candle, layout, comparing, 40)

    spread = group.finish()[0].value

    candle.finish()
    # The programs are not such that one worker does all.
    assert spread > 40 * 1.4


def start(group: Group, candle: CandleWorkers, layout: str, first: Any, *arguments: Any) -> None:
    """Start workers of these kinds; that of rank 0, with torch, runs `first`."""
    for rank, kind in enumerate(layout):
        if kind == "c":
            candle.start(rank, len(layout))
    for rank, kind in enumerate(layout):
        if kind == "p":
            group.add(first if rank == 0 else serving, rank, len(layout), arguments)


def lookup(weight: torch.Tensor) -> torch.Tensor:
    """Has a sparse gradient."""
    return torch.nn.functional.embedding(torch.tensor([2, 0, 2]), weight, sparse=True)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> torch.Tensor:
        raise ValueError("no gradient today")


def broken(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Broken.apply(x)
    return out


def unrelated(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x)


def half(x: torch.Tensor) -> torch.Tensor:
    return x.float() / 2


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def parameter() -> torch.Tensor:
    """A parameter is sent as what it is: a tensor that needs gradients."""
    return here["module"].weight  # type: ignore[no-any-return]


def passing(worker: Worker) -> dict[str, Any]:
    """What candle's worker says of a pass through functions of this one."""
    import tensorcall.rpc as ours

    _begin(worker)
    here["module"] = Weight()
    for function in (lookup, broken, unrelated, half, parameter):
        ours.function(function)
    found: dict[str, Any] = {}
    with worker.joined():
        for name in ("lookup", "half", "unrelated"):
            found[name] = rpc.rpc_sync("w1", "pass_through", args=("w0", name)).tolist()
        with pytest.raises(RuntimeError) as raised:
            rpc.rpc_sync("w1", "pass_through", args=("w0", "broken"))
        found["broken"] = str(raised.value)
        # The next pass works.
        found["again"] = rpc.rpc_sync("w1", "pass_through", args=("w0", "half")).tolist()
        with dist_autograd.context() as number:
            output = rpc.rpc_sync("w1", "multiply", args=(here["module"].weight,))
            rref = rpc.remote("w1", "multiply", args=(here["module"].weight,))
            later = rpc.rpc_async("w1", "multiply_later", args=("w1", here["module"].weight))
            total = output.sum() + 10 * rref.to_here().sum() + 100 * later.wait().sum()
            dist_autograd.backward(number, [total])
            found["parameter"] = dist_autograd.get_gradients(number)[here["module"].weight].tolist()
        with dist_autograd.context() as number:
            output = rpc.rpc_sync("w1", "fail_backward", args=(here["module"].weight,))
            with pytest.raises(RuntimeError, match=r"candle: .*upsample_bilinear2d"):
                dist_autograd.backward(number, [output.sum()])
        wait_for_no_contexts(2)
    return found


def test_passes_go_through_functions_of_all_kinds_and_fail_with_the_error_of_either(
    group: Group, candle: CandleWorkers
) -> None:
    start(group, candle, "pc", passing)

    found = group.finish()[0].value

    candle.finish()
    assert found["lookup"] == [[1.0] * 3, [0.0] * 3, [2.0] * 3]
    assert found["half"] == found["again"] == [[0.5] * 3] * 3
    assert found["unrelated"] == [[0.0] * 3] * 3
    assert "Error on Node 0: no gradient today" in found["broken"]
    variable = programs.variables(1)[0].detach()
    assert torch.allclose(torch.tensor(found["parameter"], dtype=torch.float64), 111 * variable)
