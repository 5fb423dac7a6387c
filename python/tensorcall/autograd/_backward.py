"""Beginning a backward pass.

A context that never left this worker needs no messages: its pass is one run of torch's engine, here. Any
other is driven by the extension, and the parts of this worker run in the thread that waits for the pass.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from . import _context
from ._context import DistAutogradContext
from ._engine import engine


class _Waiting(threading.local):
    interrupt: BaseException | None = None


_waiting = _Waiting()

_HERE = -1
"""In the place of a worker, names passes that the extension knows nothing of."""


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
    """See :func:`tensorcall.autograd.backward`."""
    _check_types(context_id, roots, retain_graph)
    context = _context.container.get(context_id)
    tensors = list(roots)
    _check_roots(tensors)
    if not torch._C._autograd._profiler_enabled():
        _run(context, tensors, retain_graph)
        return
    with record_function("torch::distributed::autograd::backward"):
        _run(context, tensors, retain_graph)


def _run(context: DistAutogradContext, roots: list[torch.Tensor], retain_graph: bool) -> None:
    from ..rpc import _agent, _call

    if context.is_local():
        _run_here(context, roots, retain_graph)
        return
    agent = _agent.current()
    timeout = _call.limit_of(agent, -1)
    call = agent._native.backward(context._context_id(), roots, retain_graph, timeout)
    _waiting.interrupt = None
    try:
        call.wait(None)
        _call.take(call)
    except BaseException:
        call.cancel()
        interrupt, _waiting.interrupt = _waiting.interrupt, None
        if interrupt is not None:
            raise interrupt from None
        raise


def interrupted(error: BaseException) -> None:
    """What ended a part of a pass in this thread was not an error of the pass: the thread is to end by it."""
    _waiting.interrupt = error


def _run_here(context: DistAutogradContext, roots: list[torch.Tensor], retain_graph: bool) -> None:
    pass_id = (_HERE, id(roots))
    context_id = context._context_id()
    engine.plan(context_id, pass_id, roots)
    try:
        engine.vjp(context_id, pass_id, [], [], last=True, retain_graph=retain_graph)
    finally:
        engine.end(context_id, pass_id)


def _check_types(context_id: Any, roots: Any, retain_graph: Any) -> None:
    fits = (
        isinstance(context_id, int)
        and isinstance(roots, Sequence)
        and all(isinstance(root, torch.Tensor) for root in roots)
        and isinstance(retain_graph, bool)
    )
    if not fits:
        raise TypeError(
            "backward(): incompatible function arguments. It takes the id of a context (int), roots (a "
            f"sequence of tensors) and retain_graph (bool), not {context_id!r}, {roots!r}, {retain_graph!r}"
        )


def _check_roots(roots: list[torch.Tensor]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"{_named(root)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError(f"{_named(root)} does not have a valid gradient function.")


def _named(root: torch.Tensor) -> str:
    return f"the root of shape {tuple(root.shape)}"
