"""What this worker does with a call that came in.

The extension calls these methods on pool threads, one request at a time per thread. A method
whose result is a reply never raises: what goes wrong becomes a reply too. The place of a result or
reply may be taken by a `Later`: then the outcome is not there yet, and the thread is free.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import CoroutineType
from typing import Any

import torch

from .. import _tensorcall
from ..autograd import _backward, _context, _messages
from ..autograd._context import DistAutogradContext
from ..autograd._engine import PassId, Plan
from ..autograd._engine import engine as local_engine
from ..autograd._functions import Gradients
from ..autograd._messages import Mark, PackedGradients
from . import _agent, _devices, _fork, _remote_error, _target, internal, server_process_global_profiler
from ._coroutines import Coroutines
from ._devices import Directory, Placement
from ._remote_error import ErrorCarrier, OperatorError
from ._worker import WorkerInfo
from .options import TensorPipeRpcBackendOptions

_logger = logging.getLogger("tensorcall")

Reply = tuple[int, bytes, list[torch.Tensor], list[_tensorcall.RRef], Mark | None]
"""Encoding (1 a pickled result, 2 a pickled exception), payload, tensors, references, autograd context."""

RETURNED = 1
RAISED = 2
RAISED_PLAIN = 3
"""An exception as plain data: its classes, what it says and where it was raised."""


class Handler:
    """Runs functions for other workers (and for this one) and packs their outcomes."""

    def __init__(self, info: WorkerInfo, devices: Directory | None = None) -> None:
        self._info = info
        self.devices = devices or Directory(info.name, TensorPipeRpcBackendOptions())
        self._errors = ErrorCarrier(info)
        self._coroutines = Coroutines()
        self._generation = _fork.generation()

    def stop(self) -> None:
        """Cancel what runs on the event loop, and end that."""
        self._coroutines.stop()

    def wait_until_stopped(self, limit: float) -> None:
        """Wait for the event loop's thread after :meth:`stop`, at most `limit` seconds."""
        self._coroutines.wait_until_ended(limit)

    def run_pickled(
        self,
        payload: bytes,
        tensors: Sequence[torch.Tensor],
        rrefs: Sequence[_tensorcall.RRef],
        caller: int,
        autograd: Mark | None,
    ) -> Reply | _tensorcall.Later:
        """Run the pickled function with its pickled arguments."""
        try:
            result = self.run_pickled_here(payload, tensors, rrefs, caller, autograd)
        except BaseException as error:
            return self.dump_exception(error)
        if isinstance(result, _tensorcall.Later):
            return result
        context = None if autograd is None else _context.container.find(autograd[0])
        return self._dump(result, context, caller)

    def run_pickled_here(
        self,
        payload: bytes,
        tensors: Sequence[torch.Tensor],
        rrefs: Sequence[_tensorcall.RRef],
        caller: int,
        autograd: Mark | None,
    ) -> Any:
        """As :meth:`run_pickled`, but the result stays here as it is and exceptions pass."""
        if autograd is None:
            return self._run_pickled(payload, tensors, rrefs, caller, None)
        # The context is the function's, and that of the calls which it makes.
        with _context.entered(_context.container.enter(autograd[0])):
            return self._run_pickled(payload, tensors, rrefs, caller, autograd)

    def _run_pickled(
        self,
        payload: bytes,
        tensors: Sequence[torch.Tensor],
        rrefs: Sequence[_tensorcall.RRef],
        caller: int,
        autograd: Mark | None,
    ) -> Any:
        try:
            func, args, kwargs = _messages.unpack(autograd, payload, tensors, rrefs, is_answer=False)
        except (AttributeError, ImportError) as error:
            raise RuntimeError(_not_here(error)) from None
        except BaseException as error:
            text = f"Error on Node {self._info.id}: {type(error).__name__}: {error}"
            raise RuntimeError(text).with_traceback(error.__traceback__) from None
        return self.run_value(func, args, kwargs, caller)

    def load_exception(
        self, payload: bytes, tensors: list[torch.Tensor], rrefs: Sequence[_tensorcall.RRef]
    ) -> BaseException:
        """The exception that :meth:`dump_exception` packed: a value of this worker that never came to be."""
        error: BaseException = internal.unpack(payload, tensors, rrefs, _remote_error.load)
        return error

    def describe_packed(
        self, payload: bytes, tensors: list[torch.Tensor], rrefs: Sequence[_tensorcall.RRef]
    ) -> tuple[str, str, str]:
        """Tell the exception that :meth:`dump_exception` packed in plain data."""
        told: tuple[str, str, str] = internal.unpack(payload, tensors, rrefs, _remote_error.describe_packed)
        return told

    def load_plain_exception(self, classes: str, message: str, origin: str) -> BaseException:
        """The exception that is told in plain data."""
        return _remote_error.load_plain(classes, message, origin)

    def wrap_rref(self, native: _tensorcall.RRef) -> Any:
        """A reference that came in plain data."""
        # Here, since references are made with calls, which know of this module.
        from . import _rref

        return _rref.wrap(native)

    def load_result(
        self, payload: bytes, tensors: list[torch.Tensor], rrefs: Sequence[_tensorcall.RRef]
    ) -> Any:
        """The result that :meth:`dump_result` packed."""
        return internal.unpack(payload, tensors, rrefs)

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
        """Run a function with the thread state that a new thread has; its exceptions pass.

        What a coroutine function or one marked by ``functions.async_execution`` comes to, comes later.
        """
        if not torch.is_grad_enabled():
            torch._C._set_grad_enabled(True)
        if function is _target.Method:
            rref, name, args, kwargs = args
            function = _target.Method(rref, name)
        try:
            result = self._run(function, args, kwargs)
        except BaseException as error:
            if self._generation != _fork.generation():
                _fork.end_child(error)
            raise
        if self._generation != _fork.generation():
            _fork.end_child(None)
        if type(result) is CoroutineType:
            later = _tensorcall.Later(self)
            self._coroutines.start(result, later)
            return later
        if getattr(function, "_wrapped_async_rpc_function", None) is not None:
            return self._follow(function, result)
        return result

    def run_recorded(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        caller: int,
        autograd: Mark,
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """As :meth:`run_value`, in a context; the caller has recorded these tensors of the arguments."""
        context = _context.container.enter(autograd[0])
        with _context.entered(context):
            _messages.record_plain(context, autograd, tensors, is_answer=False)
            return self.run_value(function, args, kwargs, caller)

    def record_result(self, tensors: list[torch.Tensor], autograd: Mark, caller: int) -> Mark | None:
        """Record tensors of a result in plain data, which need gradients."""
        return _messages.Recording(_context.container.enter(autograd[0]), caller, always=False)(tensors)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if server_process_global_profiler.is_on():
            with server_process_global_profiler.serving():
                return function(*args, **kwargs)
        if self.devices.cuda:
            with _devices.serving(self.devices.cuda):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def unseen_exception(self, function: str, worker: str, payload: bytes) -> None:
        """A function that this worker called raised an exception, and nobody looked at it."""
        self.unseen_error(function, worker, _remote_error.text_of(payload))

    def unseen_error(self, function: str, worker: str, text: str) -> None:
        """A call of this worker failed, and nobody looked at its outcome."""
        if not _agent.is_exiting():
            _logger.warning(
                "the call of %s on worker '%s' failed, and nobody looked at its future: %s",
                function,
                worker,
                text,
            )

    def _follow(self, function: object, future: object) -> _tensorcall.Later:
        """The outcome of a future that a function returned in the place of a result."""
        if not isinstance(future, torch._C.Future):
            if isinstance(function, _target.TorchTarget):
                kind = _target.script_type(future)
                raise OperatorError(f"Async functions must return an IValue of Future type, but got {kind}")
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but this one returned {future!r}"
            )
        later = _tensorcall.Later(self)
        future.add_done_callback(partial(_answer, later))
        return later

    def dump_result(self, obj: object, autograd: Mark | None, caller: int) -> Reply:
        """Pack a result for `caller`; if it cannot be sent, the exception that says so."""
        # Who fetches a value may be the first to bring its context here.
        context = None if autograd is None else _context.container.enter(autograd[0])
        return self._dump(obj, context, caller)

    def _dump(self, obj: object, context: DistAutogradContext | None, caller: int) -> Reply:
        mark = None
        try:
            if context is None:
                payload, tensors, rrefs = internal.pack(internal._internal_rpc_pickler, obj)
            else:
                payload, tensors, rrefs, mark = self._pack_recorded(context, obj, caller)
            tensors = self.devices.responses(caller).stage(tensors)
        except BaseException as error:
            if context is not None and mark is not None:
                context.drop_send(mark[1])
            text = f"{type(error).__name__}: {error}"
            return self._raised(RuntimeError(text).with_traceback(error.__traceback__))
        return RETURNED, payload, tensors, rrefs, mark

    def _pack_recorded(
        self, context: DistAutogradContext, obj: object, caller: int
    ) -> tuple[bytes, list[torch.Tensor], list[_tensorcall.RRef], tuple[int, int] | None]:
        pickler = internal._internal_rpc_pickler
        payload, tensors, rrefs, message = _messages.pack(context, caller, pickler, obj)
        if message is None:
            return payload, tensors, rrefs, None
        context.sends_to(caller)
        return payload, tensors, rrefs, (context._context_id(), message)

    def autograd_plan(self, context_id: int, pass_id: PassId, roots: Sequence[torch.Tensor] | None) -> Plan:
        """Begin a backward pass on this worker."""
        try:
            return local_engine.plan(context_id, pass_id, roots)
        except BaseException as error:
            raise self._error_of_pass(error) from error

    def autograd_vjp(
        self,
        context_id: int,
        pass_id: PassId,
        arrived: Sequence[tuple[int | None, PackedGradients | None]],
        wanted: Sequence[int],
        last: bool,
        retain_graph: bool,
    ) -> list[tuple[int, PackedGradients | None]]:
        """Go on with a backward pass: what these sources bring to messages from other workers."""
        try:
            sources = [(m, _messages.unpack_gradients(packed)) for m, packed in arrived if packed is not None]
            found = local_engine.vjp(
                context_id, pass_id, sources, wanted, last=last, retain_graph=retain_graph
            )
            return [(message, self._pack_gradients(context_id, message, each)) for message, each in found]
        except BaseException as error:
            raise self._error_of_pass(error) from error

    def _pack_gradients(self, context_id: int, message: int, gradients: Gradients) -> PackedGradients | None:
        plain = _agent.current()._native.is_plain(_context.rank_of(message))
        return _messages.pack_gradients(gradients, self._way_back(context_id, message), plain)

    def _way_back(self, context_id: int, message: int) -> Placement:
        """Where gradients of a message go: on the devices that its tensors came from."""
        sender = _context.rank_of(message)
        context = _context.container.find(context_id)
        if context is not None and context.is_answer(message):
            return self.devices.requests_of(sender)
        return self.devices.responses(sender)

    def autograd_end(self, context_id: int, pass_id: PassId, error: object) -> None:
        """A backward pass has ended, with `error` if it failed anywhere."""
        local_engine.end(context_id, pass_id)

    def _error_of_pass(self, error: BaseException) -> OperatorError:
        if not isinstance(error, Exception):
            _backward.interrupted(error)
        text = str(error) or type(error).__name__
        return OperatorError(f"Error on Node {self._info.id}: {text}")

    def dump_exception(self, exc: BaseException) -> Reply:
        """Show an exception on this worker's ``sys.stderr`` and pack it for the caller."""
        try:
            return self._raised(exc)
        except BaseException as error:
            # For example a __repr__ that raises.
            text = f"{type(exc).__name__} on {self._info}, which could not be described: {error!r}"
            return self._raised(RuntimeError(text))

    def describe_exception(self, exc: BaseException) -> tuple[str, str, str]:
        """Show an exception on this worker's ``sys.stderr`` and tell it in plain data."""
        try:
            classes, message, origin, shown = self._errors.describe(exc)
        except BaseException as error:
            text = f"{type(exc).__name__} on {self._info}, which could not be described: {error!r}"
            classes, message, origin, shown = "builtins:RuntimeError", text, "", text
        self._show(shown)
        return classes, message, origin

    def _raised(self, error: BaseException) -> Reply:
        payload, tensors, rrefs, text = self._errors.dump(error)
        self._show(text)
        return RAISED, payload, tensors, rrefs, None

    def _show(self, text: str) -> None:
        if text and sys.stderr is not None and not _agent.is_exiting():
            # A stream that is closed or cannot write the text must not cost the caller the exception.
            with contextlib.suppress(Exception):
                print(text, file=sys.stderr)  # noqa: T201 (programs redirect sys.stderr and read this)


def _answer(later: _tensorcall.Later, future: Any) -> None:
    try:
        result = future.value()
    except BaseException as error:
        later.raised(error)
    else:
        later.returned(result)


def _not_here(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {error}. The RPC pickler does not serialize code: the function, its "
        "module and the classes of its arguments must exist on both workers."
    )
