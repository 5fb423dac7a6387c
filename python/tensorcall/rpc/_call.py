"""One call on its way out: from a function and its arguments to a `Call` of the extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import _tensorcall
from . import _remote_error, _target, internal
from ._handler import RAISED

if TYPE_CHECKING:
    from .._tensorcall import Call
    from ._agent import TensorPipeAgent

_EXPIRED = 1e-9
"""Seconds: a limit that has passed before the call is made (0 would mean none)."""


class Unsent:
    """Stands for the `Call` that could not be made, since its worker is gone or had no room in time.

    That is an outcome of the call, not a mistake in making it: it comes through the future.
    """

    def __init__(self, error: RuntimeError) -> None:
        self.error = error.with_traceback(None)

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self, timeout: float | None) -> bool:
        """There is nothing to wait for."""
        return True

    def complete(self) -> bool:
        """It was complete before."""
        return False

    def cancel(self) -> None:
        """Too late."""

    def disregard(self) -> None:
        """Its error is told to those who ask, and logged by a future."""

    def ring(self, bell: _tensorcall.Bell, number: int) -> None:
        """Ring at once."""
        bell.ring(number)

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run `callback` on a thread outside of the worker's count, as a `Call` does."""
        done = _tensorcall.Call()
        done.complete()
        done.on_done(callback)

    def result(self) -> tuple[int, Any, list[torch.Tensor]]:
        """Raise why there was no call."""
        raise self.error


def start(
    agent: TensorPipeAgent,
    to: Any,
    func: Any,
    args: Any,
    kwargs: Any,
    timeout: float,
    pickler: Any,
    *,
    waits: bool = False,
) -> Call | Unsent:
    """Send a call and return what its outcome will come through.

    Args:
        agent: who makes the call.
        to: name, rank or ``WorkerInfo`` of the callee.
        func: what to call there.
        args: its positional arguments.
        kwargs: its keyword arguments.
        timeout: seconds; -1 for the agent's default, 0 for no limit.
        pickler: what serializes arguments that are not plain data.
        waits: whether the caller stands still until the outcome is there, so that large memory in the
            arguments need not be copied.

    Raises:
        TypeError: `func` cannot be called.
        RuntimeError, ValueError: there is no worker `to`; the arguments do not fit an operator.
        Exception: whatever pickling the arguments raised.
    """
    if not callable(func):
        raise TypeError("function should be callable.")
    rank = agent._rank_of(to)
    if timeout < 0:
        timeout = agent.rpc_timeout if timeout == -1 else _EXPIRED
    args = args if args else ()
    kwargs = kwargs if kwargs else {}
    name = _target.name_of(func, args, kwargs)
    if pickler is internal._internal_rpc_pickler and name is not None:
        call = _start_plain(agent, rank, name, args, kwargs, timeout)
        if call is not None:
            return call
    if name is not None:
        func = _by_name(func, name)
    _target.check_sendable(func)
    options = {"lend": True} if waits and pickler is internal._internal_rpc_pickler else {}
    payload, tensors = pickler.serialize(internal.PythonUDF(func, args, kwargs), **options)
    _target.check_devices(tensors, "Request", agent._name_of(rank))
    label = name or str(getattr(func, "__qualname__", None) or type(func).__qualname__)
    try:
        return agent._native.call_pickled(rank, label, payload, tensors, timeout)
    except NotImplementedError:
        # A tensor without memory: a mistake in making the call.
        raise
    except RuntimeError as error:
        return Unsent(error)


def take(call: Call | Unsent) -> Any:
    """The result of a call that is done; raises if it failed."""
    if torch.is_inference_mode_enabled():
        # Who waits does not decide what kind of tensor comes.
        with torch.inference_mode(False):
            return decode(*call.result())
    return decode(*call.result())


def decode(encoding: int, payload: Any, tensors: list[torch.Tensor]) -> Any:
    """The value of an answer; raises the exception that it brings."""
    if encoding == 0:
        return payload
    if encoding == RAISED:
        raise _remote_error.load(payload, tensors)
    return internal.deserialize(payload, tensors)


def _start_plain(
    agent: TensorPipeAgent, rank: int, name: str, args: Any, kwargs: Any, timeout: float
) -> Call | Unsent | None:
    if type(args) is not tuple:
        try:
            args = tuple(args)
        except TypeError:
            # The callee will say so.
            return None
    if type(kwargs) is not dict:
        return None
    try:
        return agent._native.call(rank, name, args, kwargs, timeout)
    except RuntimeError as error:
        return Unsent(error)


def _by_name(func: Any, name: str) -> Any:
    """What stands for a torch function in a pickle; other functions pickle by themselves."""
    if _target.is_torchs(name):
        return _target.TorchTarget(name, func)
    return func
