"""Distributed autograd comes to what it comes to with torch's own RPC.

Bit by bit, but for the pipeline: there it is chance in which order the gradients of the parts are added up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from engines import told_on
from harness import Worker, serve
from torch import nn
from torch.distributed.optim import DistributedOptimizer

warnings.simplefilter("ignore")  # torch calls TorchScript, which functional optimizers use, deprecated


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


class Stage(nn.Module):
    """A part of a network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        kinds: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
            "convolution": lambda: nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.ReLU()),
            "recurrent": lambda: nn.GRUCell(6, 6),
            "embedding": lambda: nn.Embedding(10, 6, sparse=True),
        }
        self.body = seeded(kinds[kind])
        if kind == "linear":
            # The first tanh of a process is now and then less exact if two threads take it at once, with
            # torch alone too.
            torch.tanh(torch.zeros(12))

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return self.body(*x)  # type: ignore[no-any-return]

    def gradients(self, context_id: int) -> Any:
        found = dist_autograd.get_gradients(context_id)
        return [found[p].to_dense().tolist() if p in found else None for p in self.parameters()]

    def parameter_rrefs(self) -> Any:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def state(self) -> Any:
        return [parameter.tolist() for parameter in self.parameters()]


def run_stage(stage: Any, x: torch.Tensor) -> torch.Tensor:
    return stage.local_value().forward(x)  # type: ignore[no-any-return]


def data(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3))


def gradients(context_id: int, *tensors: torch.Tensor) -> Any:
    found = dist_autograd.get_gradients(context_id)
    return [found[tensor].tolist() if tensor in found else None for tensor in tensors]


def of_a_pipeline() -> Any:
    first, second = (rpc.remote(to, Stage, args=("linear",)) for to in ("w1", "w2"))
    x = data(4, 6).requires_grad_()
    with dist_autograd.context() as number:
        # Not by `first.rpc_async()`: there torch forgets the context, and with it the gradients.
        parts = [rpc.rpc_async("w1", run_stage, args=(first, part)) for part in x.split(2)]
        loss = torch.cat([second.rpc_sync().forward(part.wait()) for part in parts]).square().sum()
        dist_autograd.backward(number, [loss])
        return (
            loss.item(),
            gradients(number, x),
            first.rpc_sync().gradients(number),
            second.rpc_sync().gradients(number),
        )


def of_a_convolution() -> Any:
    first, second = (rpc.remote(to, Stage, args=("convolution",)) for to in ("w1", "w2"))
    with dist_autograd.context() as number:
        loss = second.remote().forward(first.rpc_sync().forward(data(2, 2, 8))).to_here().sum()
        dist_autograd.backward(number, [loss])
        return loss.item(), first.rpc_sync().gradients(number), second.rpc_sync().gradients(number)


def of_a_recurrence() -> Any:
    cell = rpc.remote("w1", Stage, args=("recurrent",))
    x, state = data(3, 2, 6).requires_grad_(), torch.zeros(2, 6)
    with dist_autograd.context() as number:
        for step in x:
            state = cell.rpc_sync().forward(step, state)
        dist_autograd.backward(number, [state.sum()])
        return gradients(number, x), cell.rpc_sync().gradients(number)


def of_sparse_gradients() -> Any:
    table, head = rpc.remote("w1", Stage, args=("embedding",)), rpc.remote("w2", Stage, args=("linear",))
    with dist_autograd.context() as number:
        rows = table.rpc_sync().forward(torch.tensor([1, 4, 4, 9]))
        dist_autograd.backward(number, [head.rpc_sync().forward(rows).sum()])
        return table.rpc_sync().gradients(number), head.rpc_sync().gradients(number)


def of_two_passes() -> Any:
    stage = rpc.remote("w1", Stage, args=("linear",))
    x = data(2, 6).requires_grad_()
    with dist_autograd.context() as number:
        loss = stage.rpc_sync().forward(x).sum()
        dist_autograd.backward(number, [loss], retain_graph=True)
        dist_autograd.backward(number, [loss])
        return gradients(number, x), stage.rpc_sync().gradients(number)


def of_training(kind: str, **options: Any) -> Any:
    stages = [rpc.remote(to, Stage, args=("linear",)) for to in ("w1", "w2")]
    rrefs = [rref for stage in stages for rref in stage.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(getattr(torch.optim, kind), rrefs, **options)
    losses = []
    for _ in range(3):
        with dist_autograd.context() as number:
            x = data(4, 6)
            for stage in stages:
                x = stage.rpc_sync().forward(x)
            loss = x.square().mean()
            dist_autograd.backward(number, [loss])
            optimizer.step(number)
            losses.append(loss.item())
    return losses, [stage.rpc_sync().state() for stage in stages]


def of_no_grad() -> Any:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context(), torch.no_grad():
        result = rpc.rpc_sync("w1", torch.add, args=(x, 1))
        context = dist_autograd._current_context()
        return result.requires_grad, len(context._send_functions()), len(context._recv_functions())


def of_what_is_known() -> Any:
    with dist_autograd.context() as number:
        rpc.rpc_sync("w1", torch.add, args=(torch.ones(1), 1))
        before = dist_autograd._current_context()._known_worker_ids()
        rpc.rpc_sync("w2", len, args=([],))
        return number, before, dist_autograd._current_context()._known_worker_ids()


def scale(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(3)


def of_changes_in_place() -> Any:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as number:
        result = rpc.rpc_sync("w1", scale, args=(x,))
        result.add_(1)
        dist_autograd.backward(number, [(result * result).sum()])
        return gradients(number, x)


USES: dict[str, Callable[[], Any]] = {
    "a pipeline": of_a_pipeline,
    "a convolution": of_a_convolution,
    "a recurrence": of_a_recurrence,
    "sparse gradients": of_sparse_gradients,
    "two passes": of_two_passes,
    "SGD": lambda: of_training("SGD", lr=0.1, momentum=0.9),
    "Adam": lambda: of_training("Adam", lr=0.1),
    "ASGD": lambda: of_training("ASGD", lr=0.1),  # without a functional form
    "no_grad": of_no_grad,
    "what is known": of_what_is_known,
    "changes in place": of_changes_in_place,
}


NEARLY = ("a pipeline",)
"""Equal within 1e-6 of the largest number."""


def outcome(name: str) -> Any:
    try:
        found = USES[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found if name in NEARLY else repr(found)


def numbers(nested: Any) -> list[float]:
    return (
        [number for each in nested for number in numbers(each)]
        if isinstance(nested, (list, tuple))
        else [nested]
    )


def same(name: str, ours: Any, theirs: Any) -> bool:
    if name not in NEARLY or isinstance(ours, str):
        return bool(ours == theirs)
    return numbers(ours) == pytest.approx(numbers(theirs), abs=1e-6 * max(map(abs, numbers(theirs))))


def use_all(worker: Worker) -> None:
    worker.start()
    worker.tell({name: outcome(name) for name in USES})
    rpc.shutdown()


def outcomes(folder: Path, engine: str) -> dict[str, Any]:
    found: dict[str, Any] = told_on(engine, Path(__file__), folder, use_all, serve, serve)
    return found


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_every_use_comes_to_what_it_comes_to_with_torch(tmp_path: Path) -> None:
    ours = outcomes(tmp_path / "ours", "tensorcall")
    theirs = outcomes(tmp_path / "theirs", "torch")

    differing = {n: (ours[n], theirs[n]) for n in theirs if not same(n, ours[n], theirs[n])}
    assert differing == {}, "\n".join(f"{name}: {both}" for name, both in differing.items())
    assert not [result for result in ours.values() if "Error" in repr(result)]
