"""What a forked child of a worker does with what it inherits: nothing (FORK-1).

The extension closes its descriptors in the child, and its objects know that they are in the wrong
process. The rest is here: modules say what they have that a thread of the parent may hold, and what
belongs to the parent for good.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from .. import _tensorcall

_callbacks: list[Callable[[], Any]] = []
_hooked = False
_generation = 0


def in_child(callback: Callable[[], Any]) -> Callable[[], Any]:
    """Have `callback` run in forked children; what it returns is kept there for ever, unused."""
    _callbacks.append(callback)
    return callback


def hook() -> None:
    """From now on forks are noticed. Not done at import, which has no side effects."""
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_after_fork)


def generation() -> int:
    """How many forks this process is away from the first: what has another number is inherited."""
    return _generation


def end_child(error: BaseException | None) -> NoReturn:
    """A function forked, and came back in the child too: its caller is the parent's, and the child ends."""
    status = 0
    try:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            status = error.code or 0
        elif error is not None:
            status = 1
            if isinstance(error, SystemExit):
                print(error.code, file=sys.stderr)  # noqa: T201 (as Python does)
            else:
                traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _after_fork() -> None:
    global _generation
    _generation += 1
    _tensorcall.after_fork_in_child([callback() for callback in _callbacks])
