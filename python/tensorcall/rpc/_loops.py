"""How an event loop of asyncio learns that a call is done.

Every loop that waits has one bell: an eventfd that the loop watches, and a list of numbers. A call
that is done adds its number, on whatever thread that is, and writes the eventfd only if the list
was empty; the loop empties the list in one go. So many completions cost one wake-up.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

from .. import _tensorcall
from . import _fork


class LoopBell:
    """Runs functions in one loop: soon, or when a call is done. To be made in that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._bell = _tensorcall.Bell()
        self._numbers = itertools.count()
        self._expected: dict[int, Callable[[], object]] = {}
        # This object must not refer to the loop: it lives as long as the loop does, and no longer.
        loop.add_reader(self._bell.fileno(), self._answer)

    def run_soon(self, run: Callable[[], object]) -> None:
        """Run `run` in the loop. May be called on any thread."""
        number = next(self._numbers)
        self._expected[number] = run
        self._bell.ring(number)

    def run_when_done(self, call: _tensorcall.Call, run: Callable[[], object]) -> int:
        """Run `run` in the loop when `call` is done; the number is for :meth:`forget`."""
        number = next(self._numbers)
        self._expected[number] = run
        call.ring(self._bell, number)
        return number

    def run_when_cancelled(self, later: _tensorcall.Later, run: Callable[[], object]) -> int:
        """Run `run` in the loop when nobody waits for `later` any more; the number is for :meth:`forget`."""
        number = next(self._numbers)
        self._expected[number] = run
        later.ring_when_cancelled(self._bell, number)
        return number

    def forget(self, number: int) -> None:
        """Do not run it any more."""
        self._expected.pop(number, None)

    def _answer(self) -> None:
        for number in self._bell.take():
            run = self._expected.pop(number, None)
            if run is not None:
                run()


_bells: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBell] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def bell_of(loop: asyncio.AbstractEventLoop) -> LoopBell:
    """The bell of the running loop."""
    bell = _bells.get(loop)
    if bell is None:
        bell = LoopBell(loop)
        with _lock:
            _fork.hook()
            # What a closed loop still waited for would keep it alive.
            for other in [other for other in _bells if other.is_closed()]:
                del _bells[other]
            _bells[loop] = bell
    return bell


def wait(call: Any) -> Generator[Any, None, None]:
    """Wait for a call in a coroutine. If the waiting task is cancelled, the call goes on."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    bell = bell_of(loop)
    number = bell.run_when_done(call, wake)
    try:
        yield from waiter
    finally:
        bell.forget(number)


@_fork.in_child
def _forget_all() -> Any:
    # The loops of the parent do not run in a forked child.
    global _lock, _bells
    _lock = threading.Lock()
    inherited, _bells = _bells, weakref.WeakKeyDictionary()
    return inherited
