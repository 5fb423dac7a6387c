"""A group of workers over MPI, by way of mpi4py.

One thread makes all calls, whatever level of thread safety MPI has: it starts what other threads ask for
and looks in turn whether something has finished, ever more rarely while nothing has. A call of MPI that
blocks would take a whole core while it waits.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ._groups import ABORTED

_EAGER = 50
"""How often in a row to look at once, before the first pause."""

_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
"""Seconds between two looks, the first and the longest."""

_ENDING = 0.2
"""Seconds that MPI gets to give up what is under way, and our thread to end."""

_UNFINISHED: list[Any] = []
"""Memory of sends that were given up: MPI may still read it, until the process ends."""


def world() -> Any:
    """The communicator of all processes that mpirun has started.

    Raises:
        RuntimeError: mpi4py cannot be used.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        text = f"mpirun has started this process, but mpi4py, which workers need for MPI, is missing: {error}"
        raise RuntimeError(text) from error
    return MPI.COMM_WORLD


class _Operation:
    """Something that the one thread does for another."""

    def __init__(self, start: Callable[[], Any], memory: Any = None, is_receive: bool = False) -> None:
        self.start = start
        self.memory = memory
        self.is_receive = is_receive
        self.request: Any = None
        self.source = -1
        self._error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._done.release()

    def wait(self, seconds: float = -1) -> None:
        if not self._done.acquire(timeout=seconds):
            raise TimeoutError
        if self._error is not None:
            raise self._error


class MpiGroup:
    """The ranks of a communicator, over a private copy of it.

    Args:
        communicator: an intracommunicator. All its ranks make a group at the same time.
        limit: how long they wait for each other.

    Raises:
        RuntimeError: not all of them came.
    """

    any_source = True

    def __init__(self, communicator: Any, limit: timedelta) -> None:
        from mpi4py import MPI

        if not isinstance(communicator, MPI.Intracomm):
            raise TypeError(f"process_group must be an intracommunicator of mpi4py, not {communicator!r}")
        level = MPI.Query_thread()
        if level < MPI.THREAD_SERIALIZED:
            raise RuntimeError(
                "MPI was initialized for one thread only: initialize it with MPI_THREAD_MULTIPLE, as mpi4py "
                "does, or with MPI_THREAD_SERIALIZED if nobody else calls MPI while RPC runs"
            )
        self._mpi = MPI
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self._asking = threading.Lock()
        self._asked: collections.deque[_Operation] = collections.deque()
        self._pending: list[_Operation] = []
        self._is_asked, self._is_closed = threading.Event(), threading.Event()
        self._aborted = self._is_quiet = False
        self._copy: Any = None
        self._thread = threading.Thread(target=self._work, name="tensorcall-mpi", daemon=True)
        self._thread.start()
        try:
            self._do(lambda: self._duplicate(communicator), None, time.monotonic() + limit.total_seconds())
        except TimeoutError:
            self.close(False)
            raise RuntimeError(
                f"not all of the {self.size} ranks of the communicator called init_rpc"
            ) from None

    def _duplicate(self, communicator: Any) -> Any:
        self._copy, request = communicator.Idup()
        self._copy.Set_errhandler(self._mpi.ERRORS_RETURN)
        return request

    def send(self, memory: Any, to: int, tag: int) -> None:
        """Return when `memory` may be written again."""
        self._do(lambda: self._copy.Isend([memory, self._mpi.BYTE], to, tag), memory)

    def receive(self, memory: Any, source: int | None, tag: int) -> int:
        """Return the rank whose message is in `memory` now."""
        rank = self._mpi.ANY_SOURCE if source is None else source
        message = [memory, self._mpi.BYTE]
        return self._do(lambda: self._copy.Irecv(message, rank, tag), memory, is_receive=True)

    def all_gather(self, data: bytes, limit: timedelta) -> list[bytes]:
        """What each rank gives, by rank.

        Raises:
            RuntimeError: MPI failed, or not all came within `limit`. The group is of no use then.
        """
        byte, end = self._mpi.BYTE, time.monotonic() + limit.total_seconds()
        mine, lengths = bytearray(len(data).to_bytes(8, "little")), bytearray(8 * self.size)
        sent = bytearray(data)
        try:
            self._do(lambda: self._copy.Iallgather([mine, byte], [lengths, 8, byte]), None, end)
            counts = [int.from_bytes(lengths[8 * r : 8 * r + 8], "little") for r in range(self.size)]
            starts = [sum(counts[:rank]) for rank in range(self.size)]
            found = bytearray(sum(counts))
            gathered = [found, counts, starts, byte]
            self._do(lambda: self._copy.Iallgatherv([sent, byte], gathered), None, end)
        except TimeoutError:
            raise RuntimeError(f"not all of the {self.size} ranks came") from None
        return [bytes(found[s : s + count]) for s, count in zip(starts, counts, strict=True)]

    def abort(self) -> None:
        """Let whoever is blocked in a method of this group, or comes later, raise."""
        with self._asking:
            self._aborted = True
        self._is_asked.set()

    def close(self, is_quiet: bool) -> None:
        """Abort, and give the copy of the communicator back if all ranks do so."""
        self._is_quiet = is_quiet
        self._is_closed.set()
        self.abort()
        self._thread.join(_ENDING)

    def _do(
        self, start: Callable[[], Any], memory: Any, end: float | None = None, *, is_receive: bool = False
    ) -> int:
        operation = _Operation(start, memory, is_receive)
        with self._asking:
            if self._aborted:
                raise ConnectionError(ABORTED)
            self._asked.append(operation)
        self._is_asked.set()
        operation.wait(-1 if end is None else max(end - time.monotonic(), 0))
        return operation.source

    def _work(self) -> None:
        idle = 0
        while not self._aborted:
            self._is_asked.clear()
            moved = self._start_asked()
            moved |= self._look_at_pending()
            idle = 0 if moved else idle + 1
            if idle > _EAGER:
                pause = min(_FIRST_PAUSE * 2 ** min(idle - _EAGER, 10), _LONGEST_PAUSE)
                self._is_asked.wait(pause if self._pending else None)
            elif idle:
                time.sleep(0)
        self._give_up()

    def _start_asked(self) -> bool:
        moved = False
        while self._asked:
            operation = self._asked.popleft()
            moved = True
            try:
                operation.request = operation.start()
            except Exception as error:  # of MPI, for the one who asked
                operation.finish(_in_words(error))
            else:
                self._pending.append(operation)
        return moved

    def _look_at_pending(self) -> bool:
        left = []
        status = self._mpi.Status()
        for operation in self._pending:
            try:
                if not operation.request.Test(status):
                    left.append(operation)
                    continue
            except Exception as error:  # of MPI, for the one who asked
                operation.finish(_in_words(error))
                continue
            operation.source = status.Get_source()
            operation.finish()
        moved = len(left) < len(self._pending)
        self._pending = left
        return moved

    def _give_up(self) -> None:
        """Let all that is under way raise; nothing more is asked for."""
        for operation in self._pending:
            if operation.is_receive:  # a send that is cancelled may end the process
                operation.request.Cancel()
        end = time.monotonic() + _ENDING
        left = self._pending
        while left and time.monotonic() < end:
            left = [operation for operation in left if not _is_over(operation.request)]
            time.sleep(_LONGEST_PAUSE)
        _UNFINISHED.extend((operation.request, operation.memory) for operation in left)
        for operation in (*self._pending, *self._asked):
            operation.finish(ConnectionError(ABORTED))
        self._is_closed.wait()
        if self._is_quiet and not left:
            self._copy.Free()


def _is_over(request: Any) -> bool:
    try:
        return bool(request.Test())
    except Exception:  # it failed, so it is over
        return True


def _in_words(error: Exception) -> Exception:
    return ConnectionError(f"MPI: {error}".partition("\n")[0])
