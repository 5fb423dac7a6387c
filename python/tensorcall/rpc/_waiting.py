"""Waiting for what knows nothing of Python's signals, and for who is not there yet."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.2


def interruptible(run: Callable[[], T], limit: float | None = None) -> T:
    """Return what `run` returns, but let signal handlers run meanwhile, and Ctrl-C end the wait.

    For c10d, whose waits are deaf to signals. Python runs signal handlers on the main thread only, so
    there `run` goes to a thread of its own; after an interruption that thread is left to the limit
    that `run` has.

    Raises:
        TimeoutError: `run`, which may know no limit, was not done after `limit` seconds; its thread is left.
    """
    if limit is None and threading.current_thread() is not threading.main_thread():
        return run()
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=work, name="tensorcall-rendezvous", daemon=True).start()
    if not done.wait(limit):
        raise TimeoutError
    try:
        if errors:
            raise errors[0]
        return results[0]
    finally:
        # The error refers to this frame, and this frame to the error.
        errors.clear()


def until_listening(host: str, port: int, limit: float) -> None:
    """Return when somebody takes connections there or it is clear that nobody will, or after `limit` seconds.

    For c10d's client of a store, which tries once and then pauses for half a second or more: of workers that
    start together, most are a moment earlier than the store.
    """
    end, pause = time.monotonic() + limit, _FIRST_PAUSE
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), left).close()
        except ConnectionRefusedError:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        except OSError:
            return
        else:
            return
