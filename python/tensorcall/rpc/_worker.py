"""Who a worker is: its name and its rank."""

from __future__ import annotations

import operator
import re

_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")
_ID_MIN, _ID_MAX = -(2**15), 2**15 - 1


class WorkerInfo:
    """Name and rank of one worker.

    Accepted wherever a call names its destination; cheaper than the name alone would be to
    get wrong. Instances are immutable, hashable and can be pickled.

    Args:
        name: 1 to 127 letters, digits, ``-``, ``_`` and ``:``.
        id: the worker's rank, a signed 16 bit number.

    Raises:
        RuntimeError: the name is not a worker name.
        TypeError: the id is not an integer of 16 bits.
    """

    __slots__ = ("_id", "_name")

    _id: int
    _name: str

    def __init__(self, name: str, id: int) -> None:
        try:
            number = operator.index(id)
        except TypeError:
            number = _ID_MAX + 1
        if type(name) is not str or not _ID_MIN <= number <= _ID_MAX:
            raise TypeError(
                "WorkerInfo(): incompatible constructor arguments. It takes a name (str) and an id "
                f"(a signed 16 bit int), not {name!r} and {id!r}"
            )
        check_name(name)
        self._name = name
        self._id = number

    @property
    def name(self) -> str:
        """The worker's name, unique in its group."""
        return self._name

    @property
    def id(self) -> int:
        """The worker's rank."""
        return self._id

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self._id}, name={self._name})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerInfo):
            return NotImplemented
        return self._id == other._id and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._id)

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self._name, self._id)


def check_name(name: str) -> None:
    """Raise ``RuntimeError`` if `name` cannot be a worker's name."""
    if not _NAME.fullmatch(name):
        raise RuntimeError(
            "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128 "
            f"chars, but got {name}"
        )
