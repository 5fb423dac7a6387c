"""What a legacy profiler of torch, on in one thread, records, and the calls that it is told of.

The clocks of a profiler and of Python are joined by a marker, an event whose time both know: the one of
several that was made fastest.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import EventList, FunctionEvent

_MARKER = "tensorcall: marker"
_MARKS = 10
_GOOD_MARK = 50_000
"""Nanoseconds: a mark that took longer was perhaps interrupted, and another one is tried."""

Config = tuple[bool, bool, bool, bool, bool]
"""Whether shapes, memory, stacks, flops and modules are recorded."""


class _Thread(threading.local):
    session: Session | None = None


_thread = _Thread()


def session_of_thread() -> Session | None:
    """That of the profiler that is on in this thread."""
    return _thread.session


class Event(NamedTuple):
    """A call, by Python's clock in nanoseconds, or an event of a callee, which `begin` is added to."""

    name: str
    begin: float
    end: float
    node: int
    remote: FunctionEvent | None = None

    def shown(self, offset: float) -> FunctionEvent:
        """As the profiler shows it; `offset` leads from Python's clock to the profiler's."""
        begin = self.begin / 1000 + offset
        if self.remote is None:
            return _event(self.name, begin, self.end / 1000 + offset, self.node, is_async=True)
        event = self.remote
        return _event(
            self.name,
            begin + event.time_range.start,
            begin + event.time_range.end,
            self.node if event.node_id == -1 else event.node_id,
            id=event.id,
            thread=event.thread,
            input_shapes=event.input_shapes,
            stack=event.stack,
            scope=event.scope,
            cpu_memory_usage=event.cpu_memory_usage,
            device_memory_usage=event.device_memory_usage,
            is_async=event.is_async,
            is_remote=True,
            sequence_nr=event.sequence_nr,
            flops=event.flops,
        )


def _event(name: str, begin: float, end: float, node: int, **more: Any) -> FunctionEvent:
    more = {"id": 0, "thread": 0} | more
    event: Any = FunctionEvent
    return event(  # type: ignore[no-any-return]
        name=name, trace_name=name, start_us=begin, end_us=end, node_id=node, is_legacy=True, **more
    )


class Session:
    """What a legacy profiler, on in one thread, gets to know of calls.

    Args:
        config: what it records; the functions that are called are recorded alike.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._functions: list[FunctionEvent] = []
        self._marked = 0
        self._mark = 0
        self._before: Session | None = None

    def begin(self) -> None:
        """The profiler is on: mark the time, and hear of the calls of this thread."""
        narrowest = math.inf
        for number in range(_MARKS):
            marker = record_function(_MARKER)
            before = time.perf_counter_ns()
            marker.__enter__()  # type: ignore[no-untyped-call]
            after = time.perf_counter_ns()
            marker.__exit__(None, None, None)
            if after - before < narrowest:
                narrowest = after - before
                self._marked, self._mark = (before + after) // 2, number
            if narrowest < _GOOD_MARK:
                break
        self._before, _thread.session = _thread.session, self

    def end(self) -> None:
        """The profiler is about to end."""
        _thread.session = self._before

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """In the block, calls of this thread are nobody's business."""
        before, _thread.session = _thread.session, None
        try:
            yield
        finally:
            _thread.session = before

    def add(self, event: Event) -> None:
        """Note what another clock than the profiler's has timed."""
        with self._lock:
            self._events.append(event)

    def keep(self, records: Any) -> None:
        """Take what the profiler recorded."""
        self._functions = profiler_legacy._parse_legacy_records(records)  # type: ignore[no-untyped-call]

    def all_events(self, functions: list[FunctionEvent] | None = None) -> list[FunctionEvent]:
        """The profiler's events and those of calls, on the profiler's clock, by their beginnings."""
        functions = self._functions if functions is None else functions
        markers = sorted(event.time_range.start for event in functions if event.name == _MARKER)
        if len(markers) <= self._mark:
            return list(functions)
        # Microseconds of the profiler's clock when Python's was at 0.
        offset = markers[self._mark] - self._marked / 1000
        with self._lock:
            ours = [event.shown(offset) for event in self._events]
        events = [event for event in functions if event.name != _MARKER] + ours
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        return events


@contextlib.contextmanager
def recorded(config: Config) -> Iterator[Session]:
    """Record what this thread does in the block."""
    session = Session(config)
    autograd: Any = torch.autograd
    autograd._enable_profiler_legacy(_torchs(config))
    try:
        session.begin()
        try:
            yield session
        finally:
            session.end()
    finally:
        session.keep(autograd._disable_profiler_legacy())


def _torchs(config: Config) -> Any:
    shapes, memory, stack, flops, modules = config
    profiler: Any = torch.autograd
    experimental = torch._C._profiler._ExperimentalConfig()
    return profiler.ProfilerConfig(
        profiler.ProfilerState.CPU, shapes, memory, stack, flops, modules, experimental
    )


def config_of(profile: Any) -> Config:
    """What a legacy profile records."""
    return (
        profile.record_shapes,
        profile.profile_memory,
        profile.with_stack,
        profile.with_flops,
        profile.with_modules,
    )


def event_list(events: list[FunctionEvent], profile: Any) -> EventList:
    """The events of a profile, with their nesting found."""
    for event in events:
        event.cpu_children, event.cpu_parent = [], None
    found: Any = EventList(  # type: ignore[no-untyped-call]
        events,
        use_device="cuda" if profile.use_cuda else None,
        profile_memory=profile.profile_memory,
        with_flops=profile.with_flops,
    )
    found._build_tree()
    return found  # type: ignore[no-any-return]
