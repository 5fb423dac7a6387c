"""What this worker does with a call that came in.

The extension calls these methods on pool threads, one request at a time per thread. A method
whose result is a reply never raises: what goes wrong becomes a reply too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _target, internal
from ._remote_error import ErrorCarrier
from ._worker import WorkerInfo

Reply = tuple[int, bytes, list[torch.Tensor]]
"""Encoding (1 a pickled result, 2 a pickled exception), payload, tensors."""

RETURNED = 1
RAISED = 2


class Handler:
    """Runs functions for other workers (and for this one) and packs their outcomes."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._errors = ErrorCarrier(info)

    def run_pickled(self, payload: bytes, tensors: Sequence[torch.Tensor], caller: int) -> Reply:
        """Run the pickled function with its pickled arguments."""
        try:
            func, args, kwargs = internal.deserialize(payload, tensors)
        except (AttributeError, ImportError) as error:
            return self._raised(RuntimeError(_not_here(error)))
        except BaseException as error:
            text = f"Error on Node {self._info.id}: {type(error).__name__}: {error}"
            return self._raised(RuntimeError(text).with_traceback(error.__traceback__))
        try:
            result = self.run_value(func, args, kwargs, caller)
        except BaseException as error:
            return self.dump_exception(error)
        return self.dump_result(result)

    def resolve(self, name: str) -> Callable[..., Any]:
        """Find the function that a caller named.

        Raises:
            RuntimeError: this worker has no such function.
        """
        try:
            found: Callable[..., Any] = _target.find(name)
        except (AttributeError, ImportError) as error:
            raise RuntimeError(_not_here(error)) from error
        return found

    def run_value(self, function: Callable[..., Any], args: Any, kwargs: Any, caller: int) -> Any:
        """Run a function with the thread state that a new thread has; its exceptions pass."""
        if not torch.is_grad_enabled():
            torch._C._set_grad_enabled(True)
        return function(*args, **kwargs)

    def dump_result(self, obj: object) -> Reply:
        """Pack a result; if it cannot be sent, the exception that says so."""
        try:
            payload, tensors = internal.serialize(obj)
            _target.check_devices(tensors, "Response", "the caller")
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            return self._raised(RuntimeError(text).with_traceback(error.__traceback__))
        return RETURNED, payload, tensors

    def dump_exception(self, exc: BaseException) -> Reply:
        """Show an exception on this worker's ``sys.stderr`` and pack it for the caller."""
        try:
            return self._raised(exc)
        except BaseException as error:
            # For example a __repr__ that raises.
            text = f"{type(exc).__name__} on {self._info}, which could not be described: {error!r}"
            return self._raised(RuntimeError(text))

    def _raised(self, error: BaseException) -> Reply:
        payload, tensors, text = self._errors.dump(error)
        if text and sys.stderr is not None:
            print(text, file=sys.stderr)  # noqa: T201 (programs redirect sys.stderr and read this)
        return RAISED, payload, tensors


def _not_here(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {error}. The RPC pickler does not serialize code: the function, its "
        "module and the classes of its arguments must exist on both workers."
    )
