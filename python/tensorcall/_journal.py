"""Changes to things that are not ours, each with the way back."""

from __future__ import annotations

import logging
from typing import Any

_logger = logging.getLogger("tensorcall")

ABSENT: Any = object()
"""Stands for no value: put it to remove one."""


class Journal:
    """Replaces values in dictionaries and attributes of objects, and puts them back."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any, Any]] = []

    def put(self, holder: Any, key: str, value: Any) -> None:
        """Give `holder`, a dictionary or an object with attributes, the value `value` for `key`."""
        before = _get(holder, key)
        _set(holder, key, value)
        self._changes.append((holder, key, before, value))

    def undo(self) -> None:
        """Put everything back, the last change first, but for what somebody else has replaced since."""
        while self._changes:
            holder, key, before, value = self._changes.pop()
            if _get(holder, key) is value:
                _set(holder, key, before)
            else:
                _logger.debug("%r was replaced again and stays as it is", key)


def _get(holder: Any, key: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(key, ABSENT)
    if isinstance(holder, type):
        # What the class itself has, in the form in which it has it.
        return holder.__dict__.get(key, ABSENT)
    return getattr(holder, key, ABSENT)


def _set(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, dict):
        if value is ABSENT:
            holder.pop(key, None)
        else:
            holder[key] = value
    elif value is ABSENT:
        delattr(holder, key)
    else:
        setattr(holder, key, value)
