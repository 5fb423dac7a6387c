"""References to values on other workers: the names, for annotations and imports.

tensorcall does not make RRefs yet; whoever tries is told so.
"""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar

from . import _agent

T = TypeVar("T")

MISSING = "tensorcall does not implement {} yet"


class PyRRef:
    """What torch's C++ RRef is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _agent.current()
        raise RuntimeError(MISSING.format("RRef"))

    @staticmethod
    def _deserialize(fork: tuple[Any, ...]) -> NoReturn:
        raise RuntimeError(MISSING.format("RRef"))


class RRef(PyRRef, Generic[T]):
    """A reference to a value of type ``T`` on some worker."""


def debug_info() -> dict[str, str]:
    """How many references this worker has: none."""
    return {
        "num_owner_rrefs": "0",
        "num_pending_futures": "0",
        "num_pending_users": "0",
        "num_forks": "0",
    }
