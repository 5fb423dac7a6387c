"""Waiting for what knows nothing of Python's signals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
