"""What the called worker runs."""

from __future__ import annotations

import resource
from typing import Any


def trivial(*_: Any) -> int:
    """As little as a call can do."""
    return 7


def add(a: Any, b: Any) -> Any:
    """A Python function of two tensors."""
    return a + b


def swallow(*_: Any) -> None:
    """Takes a tensor and returns nothing."""


def cpu_seconds() -> float:
    """CPU time that this process has used, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
