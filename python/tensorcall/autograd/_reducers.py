"""DistributedDataParallel in a distributed autograd context.

Its reducer waits for the gradients of its parameters in ``.grad``, averages them with the other replicas and
leaves them there. So the part of a pass that reaches such parameters accumulates as an ordinary backward
does, while what ``.grad`` holds otherwise is put aside; the results then go to the context. One pass of the
process at a time does that.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_lock = threading.RLock()
"""Held by the pass whose gradients are in ``.grad``."""
_groups: Any = WeakIdKeyDictionary()
"""By parameter, all parameters of its reducers."""
_torch_reducer: Any = None


def begin_anew() -> None:
    """In a forked child: have a free lock."""
    global _lock
    _lock = threading.RLock()


def patch() -> None:
    """From now on see which parameters have reducers; those that have one already are looked for."""
    global _torch_reducer
    if _torch_reducer is not None or not torch.distributed.is_available():
        return
    distributed: Any = torch.distributed
    _torch_reducer = distributed.Reducer
    distributed.Reducer = _make_reducer
    if not distributed.is_initialized():
        return
    kind = torch.nn.parallel.DistributedDataParallel
    for found in gc.get_objects():
        if type(found) is kind or (isinstance(type(found), type) and issubclass(type(found), kind)):
            _note([parameter for parameter in found.module.parameters() if parameter.requires_grad])


def unpatch() -> None:
    """Undo :func:`patch`."""
    global _torch_reducer
    if _torch_reducer is not None:
        distributed: Any = torch.distributed
        distributed.Reducer, _torch_reducer = _torch_reducer, None


def _make_reducer(parameters: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    _note(parameters)
    return _torch_reducer(parameters, *args, **kwargs)


def _note(parameters: Iterable[torch.Tensor]) -> None:
    group = [weakref.ref(parameter) for parameter in parameters]
    for reference in group:
        parameter = reference()
        if parameter is not None:
            _groups[parameter] = [*_groups.get(parameter, []), group]


def partners(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
    """Leaves, and the parameters that are reduced with some of them; ``None`` if none are reduced."""
    if not _groups:
        return None
    found: dict[int, torch.Tensor] = {}
    reduced = False
    for leaf in leaves:
        found[id(leaf)] = leaf
        for group in _groups.get(leaf, ()):
            reduced = True
            others = (reference() for reference in group)
            found.update((id(other), other) for other in others if other is not None)
    return list(found.values()) if reduced else None


class own_gradients:
    """In the block, ``.grad`` of these tensors belongs to one pass, and is empty to begin with."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def __enter__(self) -> own_gradients:
        _lock.acquire()
        self._before = [tensor.grad for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.grad = None
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for tensor, gradient in zip(self._tensors, self._before, strict=True):
            tensor.grad = gradient
        _lock.release()

    def take(self) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients that have come, by their tensors."""
        found = {}
        for tensor in self._tensors:
            if tensor.grad is not None:
                # It may be memory that the reducer goes on using.
                found[tensor] = tensor.grad.clone() if tensor in _groups else tensor.grad
                tensor.grad = None
        return found
