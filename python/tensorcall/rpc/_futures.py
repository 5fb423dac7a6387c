"""Futures whose wait is ours.

A :class:`Future` is a ``torch.futures.Future`` over a `Call` of the extension, which is either
an RPC under way or a local completion. Waiting goes through the `Call`: without the GIL, with a
limit if asked for, interruptible, and lending the place of a pool thread to another request.

The outcome is decoded once, by whoever needs it first (CALL-1). Callbacks run at once if the
future is done, else on the thread that completes it: the one that calls ``set_result``, or for
an RPC one that does not count against the worker's threads.

In a coroutine a future can be awaited, in the loops of any threads; cancelling the task that waits
leaves the call alone. An error that nobody has looked at when its future is let go is logged; for
calls the extension sees to that, for local futures :class:`_Unseen`.

torch's own future inside is completed too, when the outcome is decoded, for consumers that only
know C++ futures. Those who combine futures are kept from waiting there: :func:`patch` puts
:func:`collect_all` in the place of torch's, on which ``torch.futures.wait_all`` rests as well.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.futures

from .. import _tensorcall
from . import _agent, _call, _fork, _loops

T = TypeVar("T")
S = TypeVar("S")

_logger = logging.getLogger("tensorcall")

_INLINE_DEPTH = 32
"""Callbacks that complete futures whose callbacks complete futures: how deep on one stack."""


class _Stack(threading.local):
    depth = 0


_stack = _Stack()

_CFuture: Any = torch._C.Future


class _Unseen:
    """Goes with a future that failed; has the error logged if nobody looked at it in time."""

    __slots__ = ("error", "generation")

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.generation = _fork.generation()

    def __del__(self) -> None:
        if self.error is None or sys.is_finalizing() or _agent.is_exiting():
            return
        if self.generation == _fork.generation():
            _logger.warning("a future failed, and nobody looked at it: %s", _described(self.error))


class Future(torch.futures.Future[T]):
    """The outcome of a call, or of whatever calls :meth:`set_result`.

    Args:
        devices: as for ``torch.futures.Future``.
        call: the RPC under way; without it the future is completed by hand.
    """

    _settled = False
    _value: Any = None
    _error: BaseException | None = None
    _watched = False
    _looked_at = False
    _unseen: _Unseen | None = None

    def __init__(
        self,
        *,
        devices: list[int | str | torch.device] | None = None,
        call: _tensorcall.Call | _call.Unsent | None = None,
    ) -> None:
        # torch's own methods only wrap these; for small calls the wrapping counts.
        _CFuture.__init__(self, [torch.device(device) for device in devices] if devices else [])
        self._local = call is None
        self._call = _tensorcall.Call() if call is None else call
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        if isinstance(call, _call.Unsent):
            self._unseen = _Unseen(call.error)

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._settled or self._call.done()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the outcome and return the value or raise the error.

        Args:
            timeout: seconds to wait; ``None`` waits as long as the call may take.

        Raises:
            TimeoutError: the limit passed; the future is still pending.
        """
        if not self._settled:
            if not self._call.wait(timeout):
                raise TimeoutError(f"the future was not done after {timeout} s")
            self._settle()
        try:
            return self._outcome()
        finally:
            # An error refers to the frames that it passes, and this one to the error through `self`.
            del self

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the outcome in a coroutine. If its task is cancelled, the call goes on."""
        if not self.done():
            yield from _loops.wait(self._call)
        self._settle()
        try:
            return self._outcome()
        finally:
            del self

    def value(self) -> T:
        """The value (or error) of a future that is done.

        Raises:
            RuntimeError: it is not done.
        """
        if not self.done():
            raise RuntimeError("the future has no value yet: it is not done")
        self._settle()
        try:
            return self._outcome()
        finally:
            del self

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Return a future for ``callback(self)``, which is called when this one is done or failed."""
        _check_callable("then", callback)
        child: Future[S] = Future()
        self._when_done(lambda: child._complete_with(callback, self))
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Call ``callback(self)`` when this future is done or failed; its exceptions are logged."""
        _check_callable("add_done_callback", callback)

        def run() -> None:
            try:
                callback(self)
            except Exception:
                _logger.exception("a callback of a future raised an exception")

        self._when_done(run)

    def set_result(self, result: T) -> None:
        """Complete the future with a value.

        Raises:
            RuntimeError: it is done already.
        """
        self._complete_once(result, None)

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Complete the future with an error, which :meth:`wait` raises.

        Raises:
            RuntimeError: it is done already.
        """
        assert isinstance(result, BaseException), f"{result} is of type {type(result)}, not an Exception."
        self._complete_once(None, result)

    def cancel(self) -> bool:
        """Give the call up: the future fails, and the callee is told. False if it was done."""
        if self.done():
            return False
        if self._local:
            return self._complete(None, CancelledError())
        self._call.cancel()
        return True

    def has_failed(self) -> bool:
        """Whether there is an error, and not a result or nothing yet."""
        if not self.done():
            return False
        self._settle()
        return self._error is not None

    def _outcome(self) -> T:
        if self._error is None:
            return cast(T, self._value)
        self._look()
        try:
            # The traceback starts anew for each waiter.
            raise self._error.with_traceback(None)
        finally:
            del self

    def _look(self) -> None:
        """Somebody looks after this future, or has seen its error."""
        self._looked_at = True
        if self._unseen is not None:
            self._unseen.error = None
            self._unseen = None

    def _settle(self) -> None:
        """Decode the outcome of a call that is done, once."""
        if not self._settled:
            self._decode()

    def _decode(self) -> None:
        with self._lock:
            if self._settled:
                return
            try:
                self._value = _call.take(self._call)
            except BaseException as error:
                self._error = error.with_traceback(None)
            self._settled = True
        self._complete_base()

    def _complete(self, value: Any, error: BaseException | None) -> bool:
        with self._lock:
            if self._settled or not self._local or not self._call.complete():
                return False
            self._value, self._error = value, error
            self._settled = True
            if not (error is None or self._looked_at or isinstance(error, CancelledError)):
                self._unseen = _Unseen(error)
        self._complete_base()
        self._run_callbacks()
        return True

    def _complete_once(self, value: Any, error: BaseException | None) -> None:
        if not self._complete(value, error):
            done = "is done" if self.done() else "is completed by the reply to its call"
            raise RuntimeError(f"This future {done}. A Future can only be marked completed once.")

    def _complete_with(self, callback: Callable[[Any], Any], parent: Future[Any]) -> None:
        try:
            value = callback(parent)
        except BaseException as error:
            # A KeyboardInterrupt on the user's own thread is that thread's business too.
            wrapped = RuntimeError(
                f"Got the following error when running the callback: {type(error).__name__}: {error}"
            )
            # Without this very frame, which refers to what will hold the error.
            frames = error.__traceback__
            wrapped.__cause__ = error.with_traceback(frames and frames.tb_next)
            self._complete(None, wrapped)
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            self._complete(value, None)

    def _complete_for_torch(self) -> None:
        """Have torch's own future completed as soon as there is an outcome, though nobody asks for it."""
        self._when_done(_nothing)

    def _complete_base(self) -> None:
        base = cast(Any, super())
        try:
            if self._error is None:
                _CFuture.set_result(self, self._value)
            else:
                # Not the error itself: it may come to refer to this future through frames, and a cycle
                # through C++ is for ever.
                base._set_unwrap_func(partial(_raise_error_of, weakref.ref(self)))
                base.set_result(None)
        except RuntimeError:
            _logger.debug("torch's future was completed by somebody else", exc_info=True)

    def _when_done(self, callback: Callable[[], None]) -> None:
        self._look()
        with self._lock:
            pending = bool(self._callbacks) or not self.done()
            watch = pending and not self._watched and not self._local
            if pending:
                self._callbacks.append(callback)
                self._watched |= watch
        if not pending:
            self._settle()
            _run(callback)
        elif watch:
            self._call.on_done(self._run_callbacks)

    def _run_callbacks(self) -> None:
        self._settle()
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _run(callback)


def collect_all(futures: Sequence[torch.futures.Future[Any]]) -> Future[list[torch.futures.Future[Any]]]:
    """A future for the list `futures`, done when all are done or as soon as one failed.

    Takes our futures and torch's, mixed.
    """
    collected: Future[list[torch.futures.Future[Any]]] = Future()
    result = list(futures)
    _Collector(collected, result).watch()
    return collected


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """The values of `futures`; raises the first error without waiting for the others."""
    return [future.wait() for future in collect_all(futures).wait()]


class _Collector:
    """Counts down as futures finish and completes the collected one, once."""

    def __init__(self, collected: Future[Any], futures: list[torch.futures.Future[Any]]) -> None:
        self._collected = collected
        self._futures = futures
        self._lock = threading.Lock()
        self._missing = len(futures)
        self._over = False

    def watch(self) -> None:
        if not self._futures:
            self._collected.set_result([])
        for future in self._futures:
            if self._over:
                break
            if isinstance(future, Future):
                future._when_done(partial(self._arrived_ours, future))
            else:
                future.add_done_callback(self._arrived_torch)

    def _arrived_ours(self, future: Future[Any]) -> None:
        self._arrived(future._error)

    def _arrived_torch(self, future: torch.futures.Future[Any]) -> None:
        self._arrived(_error_of(future))

    def _arrived(self, error: BaseException | None) -> None:
        with self._lock:
            self._missing -= 1
            if self._over or (error is None and self._missing):
                return
            self._over = True
        self._collected._complete(self._futures, error)


def _error_of(future: torch.futures.Future[Any]) -> BaseException | None:
    try:
        future.value()
    except BaseException as error:
        return error
    return None


def _nothing() -> None:
    """What follows a future that only C++ waits for."""


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _check_callable(method: str, callback: object) -> None:
    if not callable(callback):
        raise TypeError(
            f"{method}(): incompatible function arguments. It takes a callable of one argument, "
            f"not {callback!r}"
        )


def _run(callback: Callable[[], None]) -> None:
    if _stack.depth >= _INLINE_DEPTH:
        # Go on with a fresh stack: a call that is done runs its callback on such a thread.
        call = _tensorcall.Call()
        call.complete()
        call.on_done(callback)
        return
    _stack.depth += 1
    try:
        callback()
    finally:
        _stack.depth -= 1


def _raise_error_of(reference: weakref.ref[Future[Any]], _: None) -> None:
    future = reference()
    if future is None:
        raise RuntimeError("the future failed, and is gone with its error")
    future._outcome()


_torch_collect_all = torch._C._collect_all


def _collect_all(futures: Any) -> Any:
    """Stands for ``torch._C._collect_all``: torch's own unless one of the futures is ours."""
    if any(isinstance(future, Future) for future in futures):
        return collect_all(futures)
    return _torch_collect_all(futures)


class _Following(torch._ops.OpOverloadPacket):
    """The operator with which a profiler waits for a future in C++: one of ours is then seen to.

    Args:
        packet: torch's; for TorchScript, which knows it by its ``op``, this is the same.
    """

    def __init__(self, packet: torch._ops.OpOverloadPacket[Any, Any]) -> None:
        self.__dict__.update(packet.__dict__)
        self._torchs = packet
        self._RecordFunction = partial(self._follow, packet._RecordFunction)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._follow(self._torchs, *args, **kwargs)

    def _follow(self, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for argument in args:
            if isinstance(argument, Future):
                argument._complete_for_torch()
        return operator(*args, **kwargs)


def patch() -> None:
    """Make ``torch.futures.collect_all``, ``wait_all`` and the profiler's operator know our futures.

    The former two look ``torch._C._collect_all`` up when they are called, also where a program imported
    them by name long before.
    """
    torch._C._collect_all = _collect_all
    profiler: Any = torch.ops.profiler
    if not isinstance(profiler._call_end_callbacks_on_jit_fut, _Following):
        profiler._call_end_callbacks_on_jit_fut = _Following(profiler._call_end_callbacks_on_jit_fut)


def unpatch() -> None:
    """Undo :func:`patch`."""
    torch._C._collect_all = _torch_collect_all
    profiler: Any = torch.ops.profiler
    if isinstance(profiler._call_end_callbacks_on_jit_fut, _Following):
        profiler._call_end_callbacks_on_jit_fut = profiler._call_end_callbacks_on_jit_fut._torchs
