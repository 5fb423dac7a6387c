"""Beginning a backward pass.

A context that never left this worker needs no messages: its pass is one run of torch's engine, here. Any
other is driven by the extension, and the parts of this worker run on its threads. With a profiler on,
which sees only its own thread, they run in the thread that waits for the pass.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from . import _context
from ._context import DistAutogradContext
from ._engine import Roots, engine

_HERE = -1
"""In the place of a worker, names passes that the extension knows nothing of."""


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
    """See :func:`tensorcall.autograd.backward`."""
    _check_types(context_id, roots, retain_graph)
    context = _context.container.get(context_id)
    tensors = list(roots)
    _check_roots(tensors)
    if not torch._C._autograd._profiler_enabled():
        _run(context, Roots(tensors), retain_graph, None)
        return
    with record_function("torch::distributed::autograd::backward"):
        waiting = _WaitingThread()
        _run(context, Roots(tensors, waiting.run), retain_graph, waiting)


def _run(
    context: DistAutogradContext, roots: Roots, retain_graph: bool, waiting: _WaitingThread | None
) -> None:
    from ..rpc import _agent, _call

    if context.is_local():
        _run_here(context, roots.tensors, retain_graph)
        return
    agent = _agent.current()
    timeout = _call.limit_of(agent, -1)
    call = agent._native.backward(context._context_id(), roots, retain_graph, timeout)
    try:
        if waiting is not None:
            waiting.wait(call)
        call.wait(None)
    except BaseException:
        call.cancel()
        raise
    _call.take(call)


def _run_here(context: DistAutogradContext, tensors: Sequence[torch.Tensor], retain_graph: bool) -> None:
    pass_id = (_HERE, id(tensors))
    context_id = context._context_id()
    engine.plan(context_id, pass_id, Roots(tensors))
    try:
        engine.vjp(context_id, pass_id, [], [], last=True, retain_graph=retain_graph)
    finally:
        engine.end(context_id, pass_id)


class _WaitingThread:
    """Runs what others hand over, while it waits for a call."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self, work: Callable[[], Any]) -> Any:
        """Have `work` run in the thread that waits; returns what it returns, and raises what it raises."""
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((work(), None))
            except BaseException as error:
                done.put((None, error))

        self._work.put(run)
        result, error = done.get()
        if error is not None:
            raise error
        return result

    def wait(self, call: Any) -> None:
        """Wait until the call is done, and do the others' work meanwhile."""
        call.on_done(lambda: self._work.put(None))
        while (work := self._work.get()) is not None:
            work()


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
