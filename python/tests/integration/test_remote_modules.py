"""Modules on other workers: made without a wait, passed on, used from anywhere."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

may_be_made = threading.Event()


class Scale(nn.Module):
    """One parameter."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def slowly(factor: float) -> Scale:
    """Makes a module when it is told."""
    assert may_be_made.wait(20)
    return Scale(factor)


def go() -> None:
    may_be_made.set()


def without_waiting(worker: Worker) -> Any:
    with worker.joined():
        module = RemoteModule("w1/cpu", slowly, args=(3.0,))
        future = module.forward_async(torch.ones(2))
        early = future.done()
        rpc.rpc_sync("w1", go)
        return early, future.wait().tolist(), module(torch.ones(2)).tolist()


def test_making_a_module_and_using_it_waits_for_nothing(group: Group) -> None:
    """LOG row 118."""
    assert group.run(without_waiting, serve)[0] == (False, [3.0, 3.0], [3.0, 3.0])


def use(module: Any, x: torch.Tensor) -> Any:
    """Runs on a worker that did not make the module."""
    return type(module) is RemoteModule, module.on, module.forward(x)


def use_part(parts: dict[str, Any], x: torch.Tensor) -> Any:
    return parts["scale"].forward_async(x).wait()


def passing_on(worker: Worker) -> Any:
    with worker.joined():
        module = RemoteModule("w1", Scale, args=(2.0,))
        x = torch.ones(2)
        is_one, on, result = rpc.rpc_sync("w2", use, args=(module, x))
        at_home = rpc.rpc_sync("w1", use, args=(module, x))[2]
        within = rpc.rpc_async("w2", use_part, args=({"scale": module}, x)).wait()
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("w2", use, args=(module, x))[2].sum()
            dist_autograd.backward(context, [loss])
            DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.5).step(context)
        return is_one, on, result.tolist(), at_home.tolist(), within.tolist(), module(x).tolist()


def test_a_module_is_an_argument_like_any_other(group: Group) -> None:
    """LOG row 100: a third worker uses it, and gradients find their way back to it."""
    found = group.run(passing_on, serve, serve)[0]

    # The factor was 2, its gradient 1 + 1, the rate 0.5.
    assert found == (True, "w1", [2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [1.0, 1.0])
