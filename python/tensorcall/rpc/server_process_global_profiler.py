"""A profile of all that other workers let this one do."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

from . import _recording

_lock = threading.Lock()
_running: list[_server_process_global_profile] = []


class _server_process_global_profile(profiler_legacy.profile):
    """Records, on all threads that serve requests of other workers, from entering to leaving.

    Takes the arguments of ``torch.autograd.profiler_legacy.profile``. Such profiles nest: a request is
    recorded for each that was on when it began and is on when it ends.

    Attributes:
        function_events: all events, when it has ended.
        process_global_function_events: a list of events for each request.
    """

    process_global_function_events: list[list[FunctionEvent]]

    def __enter__(self) -> Any:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("a profile can be entered only once")
        self.entered = True
        self.process_global_function_events = []
        with _lock:
            _running.append(self)
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> bool | None:
        if not self.enabled:
            return None
        with _lock:
            if self in _running:
                _running.remove(self)
        flat = list(itertools.chain.from_iterable(self.process_global_function_events))
        self.function_events = _recording.event_list(flat, self)
        return False


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Record the request that is served in the block for the profiles that are on."""
    with _lock:
        profiles = list(_running)
    config = tuple(map(any, zip(*map(_recording.config_of, profiles), strict=True)))
    with _recording.recorded(config) as session:  # type: ignore[arg-type]
        yield
    events = session.all_events()
    with _lock:
        for profile in profiles:
            if profile in _running:
                profile.process_global_function_events.append(events)


def is_on() -> bool:
    """Whether a profile is on."""
    return bool(_running)
