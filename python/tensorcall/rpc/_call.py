"""One call on its way out: from a function and its arguments to a `Call` of the extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import _tensorcall
from ..autograd import _context, _messages
from . import _remote_error, _target, internal
from ._handler import RAISED, RAISED_PLAIN

if TYPE_CHECKING:
    from .._tensorcall import Call
    from ..autograd._context import DistAutogradContext
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

    def result(self) -> tuple[int, Any, list[torch.Tensor], list[_tensorcall.RRef], _messages.Mark | None]:
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
        func: what to call there, or the name that it has there.
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
    native = agent._native
    if isinstance(func, str):
        return _start_named(agent, native.call_named, to, func, args, kwargs, timeout)  # type: ignore[no-any-return]
    called: Call | Unsent = _start(
        agent, native.call, native.call_pickled, to, func, args, kwargs, timeout, pickler, waits
    )[0]
    return called


def start_remote(
    agent: TensorPipeAgent, to: Any, func: Any, args: Any, kwargs: Any, timeout: float, pickler: Any
) -> tuple[_tensorcall.RRef, Call | Unsent, str]:
    """As :func:`start`, but the result stays there: a reference to it, the call, and the call's label."""
    native = agent._native
    if isinstance(func, str):
        made, label = _start_named(agent, native.remote_named, to, func, args, kwargs, timeout), func
    else:
        made, label = _start(
            agent, native.remote, native.remote_pickled, to, func, args, kwargs, timeout, pickler, False
        )
    if isinstance(made, Unsent):
        raise made.error
    rref, call = made
    return rref, Unsent(call) if isinstance(call, RuntimeError) else call, label


def _start_named(
    agent: TensorPipeAgent,
    named: Callable[..., Any],
    to: Any,
    name: str,
    args: Any,
    kwargs: Any,
    timeout: float,
) -> Any:
    """What `named` of the extension made of the call of a function by its name, with plain data.

    Raises:
        TypeError: an argument is not plain data; it is named.
    """
    rank = agent._rank_of(to)
    limit = limit_of(agent, timeout)
    return _made(_recording(rank, name), named, rank, name, tuple(args or ()), dict(kwargs or {}), limit)


def _recording(rank: int, name: str) -> _messages.Recording | None:
    """What records the tensors of a call by name to a worker, in a context."""
    context = _context.open_context()
    if context is None:
        return None
    # What a torch operator returns needs gradients only if an argument does.
    return _messages.Recording(context, rank, always=not _target.is_torchs(name))


def _made(recording: _messages.Recording | None, make: Callable[..., Any], *args: Any) -> Any:
    """What the extension made of a call by name; `Unsent` if it could not be sent."""
    if recording is None:
        return _sent(make, *args)
    made: Any = None
    try:
        made = _sent(make, *args, recording)
    finally:
        recording.made(made[1] if isinstance(made, tuple) else made)
    return made


def _sent(make: Callable[..., Any], *args: Any) -> Any:
    try:
        return make(*args)
    except NotImplementedError:
        # A tensor without memory: a mistake in making the call.
        raise
    except RuntimeError as error:
        return Unsent(error)


def _start(
    agent: TensorPipeAgent,
    plain: Callable[..., Any],
    pickled: Callable[..., Any],
    to: Any,
    func: Any,
    args: Any,
    kwargs: Any,
    timeout: float,
    pickler: Any,
    waits: bool,
) -> tuple[Any, str]:
    """What `plain` or `pickled` of the extension made of the call, and the call's label."""
    if not callable(func):
        raise TypeError("function should be callable.")
    rank = agent._rank_of(to)
    timeout = limit_of(agent, timeout)
    args = args if args else ()
    kwargs = kwargs if kwargs else {}
    name = _target.name_of(func, args, kwargs)
    label = func.__qualname__ if type(func) is _target.Method else name
    moved = bool(agent._options.device_maps) and agent._devices.moves_arguments(agent._name_of(rank))
    if name is not None and not moved and pickler is internal._internal_rpc_pickler:
        call = _start_plain(plain, rank, name, func, args, kwargs, timeout)
        if call is not None:
            return call, label or name
    if agent._native.is_plain(rank):
        raise TypeError(_not_python(agent._name_of(rank), func, name))
    if name is not None:
        func = _by_name(func, name)
    _target.check_sendable(func)
    context = _context.open_context()
    options = {"lend": True} if waits and pickler is internal._internal_rpc_pickler else {}
    label = label or str(getattr(func, "__qualname__", None) or type(func).__qualname__)
    request = internal.PythonUDF(func, args, kwargs)
    if context is not None:
        return _start_recorded(
            agent, context, pickled, rank, label, request, timeout, pickler, options
        ), label
    payload, tensors, rrefs = internal.pack(pickler, request, **options)
    tensors = agent._devices.requests(agent._name_of(rank)).stage(tensors)
    try:
        return pickled(rank, label, payload, tensors, rrefs, timeout), label
    except NotImplementedError:
        # A tensor without memory: a mistake in making the call.
        raise
    except RuntimeError as error:
        return Unsent(error), label


def _start_recorded(
    agent: TensorPipeAgent,
    context: DistAutogradContext,
    pickled: Callable[..., Any],
    rank: int,
    label: str,
    request: internal.PythonUDF,
    timeout: float,
    pickler: Any,
    options: dict[str, Any],
) -> Any:
    """What `pickled` made of a call in an autograd context."""
    payload, tensors, rrefs, message = _messages.pack(context, rank, pickler, request, **options)
    # What a torch operator returns needs gradients only if an argument does.
    mark = None if message is None and _target.is_torchs(label) else (context._context_id(), message)
    try:
        tensors = agent._devices.requests(agent._name_of(rank)).stage(tensors)
        if mark is not None:
            context.sends_to(rank)
        made = pickled(rank, label, payload, tensors, rrefs, timeout, mark)
    except BaseException as error:
        if message is not None:
            context.drop_send(message)
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            return Unsent(error)
        raise
    call = made[1] if isinstance(made, tuple) else made
    if mark is not None and isinstance(call, _tensorcall.Call):
        context.add_call(call, message)
    return made


def limit_of(agent: TensorPipeAgent, timeout: float) -> float:
    """The seconds that the extension is given for a ``timeout`` argument."""
    if timeout >= 0:
        return timeout
    return float(agent.rpc_timeout) if timeout == -1 else _EXPIRED


def take(call: Call | Unsent) -> Any:
    """The result of a call that is done; raises if it failed."""
    if torch.is_inference_mode_enabled():
        # Who waits does not decide what kind of tensor comes.
        with torch.inference_mode(False):
            return _take(call)
    return _take(call)


def _take(call: Call | Unsent) -> Any:
    try:
        encoding, payload, tensors, rrefs, mark = call.result()
    except BaseException:
        if _context.context_of_call:
            _messages.failed(call)
        raise
    if _context.context_of_call:
        _messages.taken(call)
    return decode(encoding, payload, tensors, rrefs, mark)


def decode(
    encoding: int,
    payload: Any,
    tensors: list[torch.Tensor],
    rrefs: list[_tensorcall.RRef],
    mark: _messages.Mark | None = None,
) -> Any:
    """The value of an answer; raises the exception that it brings."""
    if encoding == 0:
        if mark is not None:
            _messages.record_plain(_context.container.find(mark[0]), mark, tensors, is_answer=True)
        return payload
    if encoding == RAISED:
        raise internal.unpack(payload, tensors, rrefs, _remote_error.load)
    if encoding == RAISED_PLAIN:
        raise _remote_error.load_plain(*payload)
    return _messages.unpack(mark, payload, tensors, rrefs, is_answer=True)


def _start_plain(
    plain: Callable[..., Any], rank: int, name: str, func: Any, args: Any, kwargs: Any, timeout: float
) -> Any:
    """The call, if its arguments are plain data."""
    if type(args) is not tuple:
        try:
            args = tuple(args)
        except TypeError:
            # The callee will say so.
            return None
    if type(kwargs) is not dict:
        return None
    label = name
    if type(func) is _target.Method:
        label, args, kwargs = func.__qualname__, (func.rref, func.__qualname__, args, kwargs), {}
    return _made(_recording(rank, name), plain, rank, name, args, kwargs, timeout, label)


def _not_python(worker: str, func: Any, name: str | None) -> str:
    shown = name or getattr(func, "__qualname__", None) or type(func).__qualname__
    return (
        f"{shown} cannot be called on worker '{worker}', which runs no Python: call a function by the name "
        "that it is registered with there, with plain data"
    )


def _by_name(func: Any, name: str) -> Any:
    """What stands for a torch function in a pickle; other functions pickle by themselves."""
    if _target.is_torchs(name):
        return _target.TorchTarget(name, func)
    return func
