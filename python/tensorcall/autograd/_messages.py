"""What a message carries of an autograd context.

A message that belongs to a context brings its id, and if tensors in it need gradients an id of its own.
The pickle of such a message says which tensors these are (`rpc/internal.py`), sparse ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _tensorcall
from ..rpc import internal
from ..rpc._devices import Placement
from . import _context, _functions
from ._context import DistAutogradContext
from ._functions import Gradients

Mark = tuple[int, int | None]
"""The id of a context, and that of the message if there are tensors that need gradients."""
PackedGradients = tuple[bytes | None, list[Any]]
"""The gradients of a message: pickled with a table of tensors, or just these, `None` for those not there."""


def pack(
    context: DistAutogradContext, rank: int, pickler: Any, obj: Any, **options: Any
) -> tuple[bytes, list[torch.Tensor], list[_tensorcall.RRef], int | None]:
    """As :func:`internal.pack`, for a message to a worker; also the id of the message if it has one."""
    recorded: list[torch.Tensor] = []
    with internal.recording(recorded if torch.is_grad_enabled() else None):
        payload, tensors, rrefs = internal.pack(pickler, obj, **options)
    if not recorded:
        return payload, tensors, rrefs, None
    message = _context.container.new_message()
    _functions.record_send(context, message, rank, recorded)
    return payload, tensors, rrefs, message


def unpack(
    mark: Mark | None,
    payload: bytes,
    tensors: Sequence[torch.Tensor],
    rrefs: Sequence[_tensorcall.RRef],
    *,
    is_answer: bool,
) -> Any:
    """As :func:`internal.unpack`; tensors that need gradients become outputs of the recv function."""
    context = None if mark is None or mark[1] is None else _context.container.find(mark[0])
    if mark is None or mark[1] is None or context is None:
        return internal.unpack(payload, tensors, rrefs)
    recorded: dict[int, torch.Tensor] = {}
    try:
        with internal.collecting_recorded(recorded):
            obj = internal.unpack(payload, tensors, rrefs)
    except BaseException:
        # The sender waits for an answer all the same.
        context.add_recv(mark[1], None, is_answer)
        raise
    _functions.record_recv(context, mark[1], [recorded[place] for place in sorted(recorded)], is_answer)
    return obj


class Recording:
    """Plain data that is about to be sent in a context; the extension hands over its tensors.

    Args:
        context: the context.
        rank: the worker that it goes to.
        always: whether it carries the context even without tensors that need gradients.
    """

    def __init__(self, context: DistAutogradContext, rank: int, always: bool = True) -> None:
        self._context = context
        self._rank = rank
        self._carries = always
        self.message: int | None = None

    def __call__(self, tensors: list[torch.Tensor]) -> Mark | None:
        """Make the send function for those that need gradients; what the message carries."""
        if tensors and torch.is_grad_enabled():
            message = _context.container.new_message()
            _functions.record_send(self._context, message, self._rank, tensors)
            self.message, self._carries = message, True
        if not self._carries:
            return None
        self._context.sends_to(self._rank)
        return self._context._context_id(), self.message

    def made(self, call: Any) -> None:
        """The call was made, or it could not be."""
        if isinstance(call, _tensorcall.Call):
            if self._carries:
                self._context.add_call(call, self.message)
        elif self.message is not None:
            self._context.drop_send(self.message)


def record_plain(
    context: DistAutogradContext | None, mark: Mark, tensors: Sequence[torch.Tensor], *, is_answer: bool
) -> None:
    """Plain data has brought tensors that its sender has recorded: they become outputs of a recv function."""
    if context is not None and mark[1] is not None:
        _functions.record_recv(context, mark[1], tensors, is_answer)


def taken(call: Any) -> None:
    """A call's outcome was taken: its context need not look after it."""
    context = _context.context_of_call.get(id(call))
    if context is not None:
        context.drop_call(call)


def failed(call: Any) -> None:
    """A call had no answer: no gradients will come for its arguments."""
    context = _context.context_of_call.get(id(call))
    message = None if context is None else context.drop_call(call)
    if context is not None and message is not None:
        context.drop_send(message)


def pack_gradients(gradients: Gradients, placement: Placement, plain: bool = False) -> PackedGradients | None:
    """The gradients of a message, as they travel; nothing if there are none.

    For one with `plain` data, whose sender may read nothing else, they are ordinary tensors in main memory.
    """
    if plain:
        gradients = [None if gradient is None else _plain(gradient) for gradient in gradients]
    found = [gradient for gradient in gradients if gradient is not None]
    if not found:
        return None
    if all(_is_plain(gradient) for gradient in found):
        return None, gradients
    payload, tensors, _ = internal.pack(internal._internal_rpc_pickler, gradients)
    return payload, placement.stage(tensors)


def unpack_gradients(packed: PackedGradients) -> Gradients:
    """What :func:`pack_gradients` was given."""
    payload, tensors = packed
    if payload is None:
        return tensors
    gradients: Gradients = internal.unpack(payload, tensors, [])
    return gradients


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return gradient.cpu().resolve_conj().resolve_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_cpu
