"""Large memory inside pickled objects: it travels beside the pickle, not in it.

Two kinds of it become tensors of bytes at the end of the message's table, sent from where they lie:

* *buffers*: what offers pickle its memory (:class:`pickle.PickleBuffer`; numpy arrays do). The object
  that arrives uses the received memory.
* *pieces* of the pickle: the contents of ``bytes`` and ``bytearray``, which pickle hands over as they
  are. They are read out of the received memory into the object that arrives.

A note after the pickle says how many there are and where the pieces belong. Unpicklers ignore what
follows a pickle. A pickle without any such memory has no note.
"""

from __future__ import annotations

import array
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import _tensorcall

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

BUFFER_BYTES = 64 << 10
"""Buffers up to this size are copied into the pickle."""
PIECE_BYTES = 128 << 10
"""So are pieces up to this size; it is more than any frame of a pickle, which is written alike."""

_PICKLE_END = b"."
_NOTE_END = b"+"
_COUNTS = struct.Struct("<II")
_POSITION = struct.Struct("<Q")


class Writer:
    """What a pickler writes to: the pickle, and the memory that goes beside it.

    Args:
        lend: name the memory of buffers where it lies; the program must leave it as it is until the
            message is sent. Otherwise it is copied.
    """

    __slots__ = ("_buffers", "_lend", "_length", "_parts", "_pieces", "_positions")

    def __init__(self, *, lend: bool) -> None:
        self._lend = lend
        self._parts: list[bytes] = []
        self._length = 0
        self._buffers: list[torch.Tensor] = []
        self._pieces: list[torch.Tensor] = []
        self._positions: list[int] = []

    def write(self, data: bytes | bytearray | memoryview | pickle.PickleBuffer) -> None:
        """Take in the next part of the pickle."""
        # A copy unless it is bytes: others are lent for now, or could change (and a bytearray could not
        # grow if its memory were named).
        part = bytes(data)
        if len(part) > PIECE_BYTES and isinstance(data, (bytes, bytearray)):
            self._pieces.append(_tensorcall.tensor_on(part))
            self._positions.append(self._length)
        else:
            self._parts.append(part)
            self._length += len(part)

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take in memory that pickle offers; true leaves it to pickle."""
        try:
            memory = buffer.raw()
        except BufferError:
            # It has gaps. Pickle has its own words for that.
            return True
        if memory.nbytes <= BUFFER_BYTES:
            return True
        constant = self._lend or type(memory.obj) is bytes
        self._buffers.append(_tensorcall.tensor_on(memory if constant else memory.tobytes()))
        return False

    def finish(self, table: list[torch.Tensor]) -> bytes:
        """Append the memory to `table` and return the pickle, with its note if it needs one."""
        if self._buffers or self._pieces:
            table += self._buffers
            table += self._pieces
            self._parts += map(_POSITION.pack, self._positions)
            self._parts += _COUNTS.pack(len(self._buffers), len(self._pieces)), _NOTE_END
        return b"".join(self._parts)


def reduce_array(numbers: array.array[Any]) -> Any:
    """Reduce an array; one that lent its memory could not grow meanwhile."""
    if len(numbers) * numbers.itemsize <= BUFFER_BYTES:
        return numbers.__reduce_ex__(5)
    return _rebuild_array, (numbers.typecode, pickle.PickleBuffer(numbers.tobytes()))


def _rebuild_array(typecode: str, memory: Buffer) -> array.array[Any]:
    rebuilt: array.array[Any] = array.array(typecode)
    rebuilt.frombytes(memory)
    return rebuilt


def load(data: bytes, table: Sequence[torch.Tensor]) -> Any:
    """Unpickle what a :class:`Writer` took in.

    Raises:
        UnpicklingError: there is a note, and it does not fit.
    """
    if data[-1:] != _NOTE_END:
        return pickle.loads(data)
    note = len(data) - len(_NOTE_END) - _COUNTS.size
    buffers, pieces = _COUNTS.unpack_from(data, note) if note >= 0 else (0, 0)
    end = note - pieces * _POSITION.size
    if end <= 0 or buffers + pieces > len(table):
        raise pickle.UnpicklingError("a pickle was cut off, or the memory beside it is missing")
    memory = [_tensorcall.memory_of(tensor) for tensor in table[len(table) - buffers - pieces :]]
    if not pieces:
        return pickle.loads(data, buffers=memory)
    positions = [position for (position,) in _POSITION.iter_unpack(data[end:note])]
    file = _Reader(_merged(memoryview(data)[:end], positions, memory[buffers:]))
    return pickle.Unpickler(file, buffers=memory[:buffers]).load()


def _merged(data: memoryview, positions: list[int], pieces: list[Buffer]) -> Iterator[memoryview]:
    start = 0
    for position, piece in zip(positions, pieces, strict=True):
        yield data[start:position]
        yield memoryview(piece)
        start = position
    yield data[start:]


class _Reader:
    """The parts of a pickle as the file that an unpickler reads."""

    def __init__(self, parts: Iterator[memoryview]) -> None:
        self._parts = parts
        self._part = memoryview(b"")

    def readinto(self, target: Buffer) -> int:
        """Fill `target`; less only at the end."""
        view = memoryview(target)
        filled = 0
        while filled < view.nbytes and self._more():
            count = min(view.nbytes - filled, self._part.nbytes)
            view[filled : filled + count] = self._part[:count]
            self._part = self._part[count:]
            filled += count
        return filled

    def read(self, count: int) -> bytes:
        """The next `count` bytes; less only at the end."""
        if count <= self._part.nbytes:
            data, self._part = self._part[:count], self._part[count:]
            return bytes(data)
        target = bytearray(count)
        return bytes(memoryview(target)[: self.readinto(target)])

    def readline(self) -> bytes:
        """The next line; pickles of our protocol have none."""
        line = bytearray()
        while not line.endswith(b"\n") and (byte := self.read(1)):
            line += byte
        return bytes(line)

    def _more(self) -> bool:
        while not self._part.nbytes:
            part = next(self._parts, None)
            if part is None:
                return False
            self._part = part
        return True
