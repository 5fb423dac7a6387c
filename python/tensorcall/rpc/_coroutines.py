"""Coroutine functions that other workers call.

They run on an event loop of this worker, on a thread that starts with the first of them and ends
with the agent. The pool thread that took the request is free as soon as the coroutine is handed
over; the caller is answered when the coroutine ends. A coroutine should ``await`` what it waits
for: one that blocks holds up the others. It is cancelled, as tasks are, when its caller cancels the
call or is lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from functools import partial
from typing import Any

from .. import _tensorcall
from ..autograd import _context
from ..autograd._context import DistAutogradContext
from . import _loops

_START_LIMIT = 10.0
"""Seconds that the loop's thread may take to start."""


class Coroutines:
    """Runs coroutines for the callers of this worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = _tensorcall.Call()
        self._ended = _tensorcall.Call()
        self._bell: _loops.LoopBell | None = None
        self._stop = asyncio.Event()
        self._started = False
        self._stopped = False
        self._thread: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, Any], later: _tensorcall.Later) -> None:
        """Run `coroutine` and give its outcome to `later`.

        Raises:
            RuntimeError: the agent is shutting down, or there is no thread for the loop.
        """
        try:
            bell = self._bell or self._begin()
        except RuntimeError:
            coroutine.close()
            raise
        bell.run_soon(partial(self._launch, coroutine, later, _context.open_context()))

    def stop(self) -> None:
        """Cancel all coroutines and end the loop; does not wait for that."""
        with self._lock:
            self._stopped = True
            bell = self._bell
        if bell is not None:
            bell.run_soon(self._stop.set)

    def wait_until_ended(self, limit: float) -> None:
        """Wait for the loop's thread after :meth:`stop`, at most `limit` seconds."""
        if self._started and threading.get_ident() != self._thread:
            self._ended.wait(limit)

    def _begin(self) -> _loops.LoopBell:
        with self._lock:
            if self._stopped:
                raise RuntimeError("the worker is shutting down")
            if not self._started:
                _tensorcall.run_apart(self._run)
                self._started = True
        self._ready.wait(_START_LIMIT)
        if self._bell is None:
            raise RuntimeError("the event loop for coroutine functions could not be started")
        return self._bell

    def _run(self) -> None:
        self._thread = threading.get_ident()
        try:
            asyncio.run(self._serve())
        finally:
            self._ready.complete()
            self._ended.complete()

    async def _serve(self) -> None:
        bell = _loops.bell_of(asyncio.get_running_loop())
        with self._lock:
            self._bell = bell
            if self._stopped:
                return
        self._ready.complete()
        await self._stop.wait()

    def _launch(
        self,
        coroutine: Coroutine[Any, Any, Any],
        later: _tensorcall.Later,
        autograd: DistAutogradContext | None,
    ) -> None:
        # A context of its own: what one call sets, the next one must not see.
        context = contextvars.Context()
        context.run(_context.current.set, autograd)
        task = asyncio.get_running_loop().create_task(self._answer(coroutine, later), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        bell = _loops.bell_of(task.get_loop())
        number = bell.run_when_cancelled(later, task.cancel)
        task.add_done_callback(lambda _: bell.forget(number))

    async def _answer(self, coroutine: Coroutine[Any, Any, Any], later: _tensorcall.Later) -> None:
        try:
            result = await coroutine
        except BaseException as error:
            # SystemExit, too, is the answer of this call and not the end of the loop. Once the loop
            # stops, coroutines end because of that, and nobody can be answered any more.
            if isinstance(error, asyncio.CancelledError) and later.is_cancelled():
                later.returned(None)  # for the books: nobody reads it
            elif not self._stopped:
                later.raised(error)
        else:
            later.returned(result)
