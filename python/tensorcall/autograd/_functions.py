"""The two ends of a tensor's trip, as nodes of torch's graph.

A *send function* takes in the tensors of a message that need gradients; it is what the graph of the
sender ends in. A *recv function* has the tensors that arrived as its outputs; it is what the graph of the
receiver begins with. The id of the message joins them. In a backward pass a send function hands out the
gradients that its recv function has brought, and a recv function hands in those that it was given; both
find the pass that runs in their thread (`Run`).

The tensors that arrive become outputs in place: they are the very objects that the message was unpickled
to, may be changed in place themselves, and are leaves no longer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ._context import DistAutogradContext

Gradients = list[torch.Tensor | None]
"""One for each tensor of a message."""


class Run:
    """What flows between the nodes and the pass, while torch's engine runs."""

    def __init__(self) -> None:
        self.arrived: dict[Any, Gradients] = {}
        """What send functions hand out."""
        self.found: dict[Any, Gradients] = {}
        """What recv functions hand in."""


class _Thread(threading.local):
    run: Run | None = None


_thread = _Thread()


class running:
    """In the block, nodes that this thread executes belong to a run of a pass."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        # A function of the graph may begin a pass of its own.
        self._outer, _thread.run = _thread.run, self._run

    def __exit__(self, *exception: object) -> None:
        _thread.run = self._outer


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # Nothing uses it but the engine, which begins here.
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return tuple(_run_of(ctx).arrived[ctx])


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        _run_of(ctx).found[ctx] = list(gradients)
        return (None,) * (1 + len(gradients))


def _run_of(node: Any) -> Run:
    run = _thread.run
    if run is None:
        raise RuntimeError(
            "this graph leads to another worker: use torch.distributed.autograd.backward(context_id, ...) in "
            "the place of backward()"
        )
    return run


# What torch calls them, for those who look at the graph or at a profile.
_send_kind: Any = _Send
_recv_kind: Any = _Recv
_send_kind._backward_cls.__name__ = "torch::distributed::autograd::SendRpcBackward"
_recv_kind._backward_cls.__name__ = "torch::distributed::autograd::RecvRpcBackward"
RecvNode: type[Any] = _recv_kind._backward_cls

LeafNode: type[Any] = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)
"""What the graph has in the place of leaves."""


def record_send(
    context: DistAutogradContext, message: int, rank: int, tensors: Sequence[torch.Tensor]
) -> None:
    """Make the send function of a message to a worker; `tensors` need gradients."""
    out: Any = _Send.apply(*tensors)
    node = out.grad_fn
    node.context_id, node.rank = context._context_id(), rank
    context.add_send(message, node)


def record_recv(
    context: DistAutogradContext,
    message: int,
    tensors: Sequence[torch.Tensor],
    is_answer: bool = False,
) -> None:
    """Make the recv function of a message; `tensors` have just been received, and become its outputs."""
    if not tensors:
        context.add_recv(message, None, is_answer)
        return
    for tensor in tensors:
        tensor.requires_grad_(False)
    # torch's engine executes what leads to the leaves that it is asked for: this is the recv function's.
    anchor = torch.zeros((), requires_grad=True)
    if torch.is_grad_enabled():
        _Recv.apply(anchor, *tensors)
    else:
        with torch.enable_grad():
            _Recv.apply(anchor, *tensors)
    node: Any = tensors[0].grad_fn
    node.context_id = context._context_id()
    context.add_recv(message, node, is_answer)


def send_edge(node: Any) -> GradientEdge:
    """Where the engine begins for a send function."""
    return GradientEdge(node, 0)


def recv_edge(node: Any) -> GradientEdge:
    """Where the engine ends for a recv function."""
    return GradientEdge(node.next_functions[0][0], 0)


def outputs_of(node: Any) -> int:
    """How many tensors a recv function has."""
    return len(node.next_functions) - 1
