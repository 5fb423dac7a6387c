"""What a profiler sees of calls.

With torch's legacy profiler (``torch.autograd.profiler_legacy.profile``) on in the calling thread, a
call is one event that lasts until its outcome is there. The callee records the function with the
same configuration and keeps its events under the call's ticket; when the call is done, the caller
fetches them, and only then is the future of the call done. They are added to the profile when it
ends, under the call's name, which nests where the function itself made calls.

Under the other profilers the part of a call that runs on the calling thread is a range of its own.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent

from . import _agent, _target
from ._futures import Future
from ._recording import Config, Event, Session, config_of, event_list, recorded, session_of_thread
from .internal import RPCExecMode, _build_rpc_profiling_key

if TYPE_CHECKING:
    from ._rref import RRef

_REMOTE = "#remote_op: "
_KEPT = 1024
"""Records that wait to be fetched; the oldest give way, since their callers may be gone."""


class Ticket(NamedTuple):
    """Names the record of one call."""

    caller: str
    number: int


_kept: collections.OrderedDict[Ticket, Session] = collections.OrderedDict()
_kept_lock = threading.Lock()


def current() -> RecordedCalls | LocalRange | None:
    """Who makes a call of this thread, if a profiler is on."""
    session = session_of_thread()
    if session is not None:
        return RecordedCalls(session)
    return _LOCAL_RANGE if torch._C._autograd._profiler_enabled() else None


class RecordedCalls:
    """Makes calls that a legacy profiler is told of.

    Of those by name, whose callee may be no Python program, it is told the part of this worker alone.

    Args:
        session: that of the profiler.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def rpc_sync(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        """As the function of that name."""
        if isinstance(func, str):
            return _LOCAL_RANGE.rpc_sync(to, func, args, kwargs, timeout)
        return self._start(RPCExecMode.SYNC, to, func, args, kwargs, timeout).wait()

    def rpc_async(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Future[Any]:
        """As the function of that name; the future is done when the call's events are there."""
        if isinstance(func, str):
            return _LOCAL_RANGE.rpc_async(to, func, args, kwargs, timeout)
        return self._start(RPCExecMode.ASYNC, to, func, args, kwargs, timeout)

    def remote(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
        """As the function of that name; the reference has a profiling future."""
        from . import api

        if isinstance(func, str):
            return _LOCAL_RANGE.remote(to, func, args, kwargs, timeout)
        span = self._span(RPCExecMode.REMOTE, to, func, args, kwargs)
        with self._session.suspended():
            rref = api.remote(to, span.function, args, kwargs, timeout)
            done = span.follow(rref._get_future(), to)
        rref._set_profiling_future(done)
        return rref

    def _start(
        self, mode: RPCExecMode, to: Any, func: Any, args: Any, kwargs: Any, timeout: float
    ) -> Future[Any]:
        from . import api

        span = self._span(mode, to, func, args, kwargs)
        with self._session.suspended():
            future = api.rpc_async(to, span.function, args, kwargs, timeout)
            done = span.follow(future, to)
        waited_for = getattr(api._thread_local_var, "future_list", None)
        if waited_for is not None:
            waited_for[-1] = done
        return done

    def _span(self, mode: RPCExecMode, to: Any, func: Any, args: Any, kwargs: Any) -> _Span:
        agent = _agent.current()
        if not callable(func):
            raise TypeError("function should be callable.")
        name = _target.name_of(func, args or (), kwargs or {})
        if name is not None and _target.is_torchs(name):
            shown = name.removeprefix("@")
            func = _target.TorchTarget(name, func)
        else:
            shown = str(getattr(func, "__qualname__", None) or type(func).__qualname__)
        callee = agent.get_worker_info(to if isinstance(to, str) else agent._rank_of(to))
        me = agent.get_worker_info()
        key = _build_rpc_profiling_key(mode, shown, me.name, callee.name)
        ticket = Ticket(me.name, agent._native.next_local_id())
        return _Span(self._session, key, me.id, callee.id, Profiled(func, ticket, self._session.config))


class LocalRange:
    """For profilers that record nothing of other workers: the part of a call on this thread."""

    def rpc_sync(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        """As the function of that name."""
        return self._run("rpc_sync", to, func, args, kwargs, timeout)

    def rpc_async(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Future[Any]:
        """As the function of that name."""
        future: Future[Any] = self._run("rpc_async", to, func, args, kwargs, timeout)
        return future

    def remote(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
        """As the function of that name."""
        rref: RRef[Any] = self._run("remote", to, func, args, kwargs, timeout)
        return rref

    def _run(self, verb: str, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        from . import api

        named = func if isinstance(func, str) else getattr(func, "__qualname__", None)
        name = str(named or type(func).__qualname__)
        with record_function(f"rpc#{name}({_agent.current().get_worker_info().name} -> {to})"):
            return getattr(api, f"_{verb}")(to, func, args, kwargs, timeout)


_LOCAL_RANGE = LocalRange()


class Profiled:
    """A function to be called elsewhere and recorded there.

    Args:
        function: the function.
        ticket: what its record is fetched by.
        config: what is recorded.
    """

    def __init__(self, function: Any, ticket: Ticket, config: Config) -> None:
        self._function = function
        self._ticket = ticket
        self._config = config
        self.__qualname__ = str(getattr(function, "__qualname__", None) or repr(function))

    @property
    def _wrapped_async_rpc_function(self) -> Any:
        return self._function._wrapped_async_rpc_function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = session_of_thread()
        if session is not None:
            # A profile of the whole process is at it: its events are these.
            self._leave(session)
            return self._function(*args, **kwargs)
        with recorded(self._config) as session:
            self._leave(session)
            return self._function(*args, **kwargs)

    def _leave(self, session: Session) -> None:
        with _kept_lock:
            _kept[self._ticket] = session
            while len(_kept) > _KEPT:
                _kept.popitem(last=False)


class _Span:
    """One call, from its beginning until its events are there."""

    def __init__(self, session: Session, key: str, me: int, callee: int, function: Profiled) -> None:
        self.function = function
        self._session = session
        self._key = key
        self._me = me
        self._callee = callee
        self._begin = time.perf_counter_ns()

    def follow(self, future: Future[Any], to: Any) -> Future[Any]:
        """A future with the outcome of `future`, done when the session has all events of the call."""
        done: Future[Any] = Future()
        future.add_done_callback(partial(self._returned, done, to))
        return done

    def _returned(self, done: Future[Any], to: Any, future: Future[Any]) -> None:
        from . import api

        end = time.perf_counter_ns()
        self._session.add(Event(self._key, self._begin, end, self._me))
        try:
            events = api.rpc_async(to, _give_events, args=(self.function._ticket,))
        except RuntimeError:
            return _settle(done, future)
        return events.add_done_callback(partial(self._fetched, done, future, end))

    def _fetched(self, done: Future[Any], future: Future[Any], end: int, fetched: Future[Any]) -> None:
        # Without events of the callee, which may be gone, there is still the call's own.
        with contextlib.suppress(Exception):
            self._take(fetched.value(), end)
        _settle(done, future)

    def _take(self, events: list[FunctionEvent], end: int) -> None:
        if not events:
            return
        first = min(event.time_range.start for event in events)
        lasts = 1000 * (max(event.time_range.end for event in events) - first)
        # Half of what the call took longer is taken for the way there.
        base = self._begin + max(0, (end - self._begin - lasts) // 2)
        for event in events:
            self._session.add(
                Event(f"{self._key}{_REMOTE}{event.name}", base - 1000 * first, 0, self._callee, event)
            )


def _give_events(ticket: Ticket) -> list[FunctionEvent]:
    """Runs on a callee: what was recorded of a call."""
    with _kept_lock:
        session = _kept.pop(ticket, None)
    return [] if session is None else session.all_events()


def _settle(done: Future[Any], future: Future[Any]) -> None:
    try:
        result = future.value()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)


_Enter = Callable[[Any], Any]
_torch_enter: _Enter = profiler_legacy.profile.__enter__
_torch_exit: Callable[..., Any] = profiler_legacy.profile.__exit__


def _enter(profile: Any) -> Any:
    entered = _torch_enter(profile)
    if profile.enabled:
        profile._tensorcall = session = Session(config_of(profile))
        session.begin()
    return entered


def _exit(profile: Any, *error: Any) -> Any:
    session = profile.__dict__.pop("_tensorcall", None)
    if session is None:
        return _torch_exit(profile, *error)
    session.end()
    result = _torch_exit(profile, *error)
    profile.function_events = event_list(session.all_events(list(profile.function_events)), profile)
    return result


def patch() -> None:
    """Have torch's legacy profile tell of itself."""
    kind: Any = profiler_legacy.profile
    kind.__enter__, kind.__exit__ = _enter, _exit


def unpatch() -> None:
    """Undo :func:`patch`."""
    kind: Any = profiler_legacy.profile
    kind.__enter__, kind.__exit__ = _torch_enter, _torch_exit
