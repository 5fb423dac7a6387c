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


def pack_gradients(gradients: Gradients, placement: Placement) -> PackedGradients | None:
    """The gradients of a message, as they travel; nothing if there are none."""
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


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_cpu
