"""The examples that train compute the gradients that they compute on torch's own agent.

What runs in the same order is equal bit by bit. In the pipeline the gradients of four micro-batches are added
up as they arrive, which is another order in each run, on either agent: there 1e-5 of a gradient's size is
allowed, which is some hundred times what one addition of floats may be off.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from harness import ENGINE_VARIABLE, Group, Worker

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.append(str(EXAMPLES))  # the workers load this file, too
STEPS = 3
TOLERANCE = 1e-5

warnings.simplefilter("ignore")  # torch calls TorchScript, which functional optimizers use, deprecated

Gradients = list[tuple[str, list[torch.Tensor]]]
"""For each pass and worker: its name, and the gradients that it has."""


def gradients_here(context: int) -> list[torch.Tensor]:
    """This worker's gradients, in the order of what they are of: the ids of parameters tell nothing."""
    found = dist_autograd.get_gradients(context)
    return [found[of] for of in sorted(found, key=lambda of: (of.shape, of.flatten().tolist()))]


def watched(module: Any, names: list[str]) -> Gradients:
    """Has a program look at the gradients of all workers after each of its backward passes."""
    seen: Gradients = []

    def backward(context: int, roots: list[torch.Tensor]) -> None:
        dist_autograd.backward(context, roots)
        for name in names:
            seen.append((name, rpc.rpc_sync(name, gradients_here, args=(context,))))

    module.dist_autograd = SimpleNamespace(context=dist_autograd.context, backward=backward)
    return seen


def of_the_parameter_server(module: Any) -> list[float]:
    """Two trainers, in turn: both here, so that the order is known."""
    server = rpc.remote("server", module.Server)
    torch.manual_seed(5)
    trainers = [module.Trainer(server, seed) for seed in (1, 2)]
    return [trainer.step() for _ in range(STEPS) for trainer in trainers]


def of_the_pipeline(module: Any) -> list[float]:
    pipeline = module.Pipeline()
    return [pipeline.step() for _ in range(STEPS)]


def of_the_rnn(module: Any) -> list[float]:
    return list(module.Network().train(STEPS))


RUNS: dict[str, tuple[Callable[[Any], list[float]], list[str]]] = {
    "train_parameter_server": (of_the_parameter_server, ["trainer", "server"]),
    "train_pipeline": (of_the_pipeline, ["master", "first", "second"]),
    "train_rnn": (of_the_rnn, ["trainer", "embeddings", "decoder"]),
}


def work(worker: Worker, program: str) -> None:
    torch.set_num_threads(1)
    run, names = RUNS[program]
    module = importlib.import_module(program)
    worker.start(name=names[worker.rank])
    if worker.rank == 0:
        seen = watched(module, names)
        losses = run(module)
        worker.tell((losses, [(name, [g.tolist() for g in gradients]) for name, gradients in seen]))
    rpc.shutdown()


def outcome(program: str, engine: str, folder: Path) -> tuple[torch.Tensor, Gradients]:
    """What a program came to: its losses, and the gradients after each pass on each worker."""
    folder.mkdir()
    group = Group(Path(__file__), folder, deadline=50)
    group.environment = {ENGINE_VARIABLE: engine}
    try:
        group.start(*[work] * len(RUNS[program][1]), arguments=(program,))
        # Nobody waits for the end: torch's agents now and then take each other's store away.
        losses, seen = group.hear(0)
    finally:
        group.close()
    return torch.tensor(losses), [(name, [torch.tensor(g) for g in gradients]) for name, gradients in seen]


@pytest.mark.slow
@pytest.mark.timeout(110)
@pytest.mark.parametrize("program", RUNS)
def test_the_gradients_of_an_example_are_those_of_torch(program: str, tmp_path: Path) -> None:
    """LOG row 121, whose pipelines need gradients that can be trusted."""
    exact = program != "train_pipeline"

    losses, ours = outcome(program, "tensorcall", tmp_path / "ours")
    their_losses, theirs = outcome(program, "torch", tmp_path / "theirs")

    names = RUNS[program][1]
    assert [name for name, _ in ours] == names * (len(ours) // len(names))
    assert sum(len(gradients) for _, gradients in ours) >= STEPS * 3
    assert all(gradient.any() for _, gradients in ours for gradient in gradients)
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(losses, their_losses, **close)
    for (name, mine), (their_name, their) in zip(ours, theirs, strict=True):
        assert name == their_name
        assert len(mine) == len(their)
        for one, other in zip(mine, their, strict=True):
            torch.testing.assert_close(one, other, **close)
