"""Distributed autograd: the names of ``torch.distributed.autograd``.

with context() as context_id:
    loss = rpc.rpc_sync("worker1", step, args=(inputs,))
    backward(context_id, [loss])
    gradients = get_gradients(context_id)

Calls that are made in a context are recorded: the tensors that they bring to other workers and back are
part of one graph. A backward pass goes through all of it, and leaves the gradients in the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from . import _backward, _context, _engine, _release
from ._context import DistAutogradContext as DistAutogradContext

__all__ = ["context", "is_available"]


class context:
    """A distributed forward and backward pass: what calls do in the block is recorded.

    Entering gives the id of the context, which is the same on all workers that calls lead to. Leaving
    releases it everywhere, with its gradients.

    Raises:
        RuntimeError: this thread is in a context already, or RPC was never initialized.
    """

    autograd_context: DistAutogradContext

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The program may have released it itself.
        _release.release(self.autograd_context._context_id())


def is_available() -> bool:
    """Whether distributed autograd can be used: it can."""
    return True


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Run the backward pass from `roots` through all workers; returns when all gradients are there.

    They are added to those that the context has; ``.grad`` of no tensor is touched.

    Args:
        context_id: the context whose calls are part of the graph.
        roots: tensors with one element each.
        retain_graph: keep the graph for another pass.

    Raises:
        TypeError: `roots` is not a sequence of tensors.
        RuntimeError: there is no such context, a root has no graph, or the pass failed on some worker.
            The context can be used again then.
    """
    _backward.backward(context_id, roots, retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that backward passes have brought to tensors of this worker, by these.

    Raises:
        RuntimeError: there is no such context on this worker.
    """
    return _retrieve_context(context_id).gradients()


def _init(worker_id: int) -> None:
    """Be the worker of that rank; called by ``init_rpc``."""
    _context.container.join(worker_id)


def _new_context() -> DistAutogradContext:
    """Begin a context in this thread."""
    return _context.begin()


def _release_context(context_id: int) -> None:
    """End a context, here and on the workers that it was sent to. May be called in any thread."""
    if not _release.release(context_id):
        _context.container.get(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """The context of that id on this worker."""
    return _context.container.get(context_id)


def _current_context() -> DistAutogradContext:
    """The context of this thread."""
    found = _context.open_context()
    if found is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: `with "
            "torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return found


def _is_valid_context(context_id: int) -> None:
    """Raise unless there is a context of that id on this worker."""
    _context.container.get(context_id)


def _get_max_id() -> int:
    """The largest id that a context of this worker can have."""
    return _context.container.max_id()


def _get_debug_info() -> dict[str, str]:
    """How many backward passes and contexts there are on this worker."""
    return {
        "num_current_backward_passes": str(_engine.engine.count()),
        "num_autograd_contexts": str(_context.container.count()),
    }
