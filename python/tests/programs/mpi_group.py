"""What the transport over a process group relies on, shown for MPI: a program for mpirun with three ranks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from mpi4py import MPI
from tensorcall.rpc._groups import ABORTED, CONTROL_TAG, Group
from tensorcall.rpc._mpi import MpiGroup

LIMIT = timedelta(seconds=10)
SOON = 5.0


def made() -> MpiGroup:
    group = MpiGroup(MPI.COMM_WORLD, LIMIT)
    assert isinstance(group, Group)
    assert (group.rank, group.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    return group


def gathers(group: MpiGroup) -> None:
    given = [b"", b"one", b"\0" * 1000]

    assert group.all_gather(given[group.rank], LIMIT) == given


def receives_from_any(group: MpiGroup) -> None:
    if group.rank == 0:
        memory = [bytearray(64), bytearray(64)]
        sources = [group.receive(each, None, CONTROL_TAG) for each in memory]
        assert sorted(sources) == [1, 2]
        for each, source in zip(memory, sources, strict=True):
            assert each.startswith(b"from %d\0" % source)
    else:
        group.send(bytearray(b"from %d" % group.rank), 0, CONTROL_TAG)


def keeps_order(group: MpiGroup) -> None:
    def exchange(tag: int) -> None:
        for number in range(50):
            if group.rank == 0:
                group.send(bytearray([number]), 1, tag)
            elif group.rank == 1:
                memory = bytearray(8)
                assert group.receive(memory, 0, tag) == 0
                assert memory[0] == number

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(exchange, (2, 3, 16385)))


def moves_much(group: MpiGroup) -> None:
    size = 8 << 20
    if group.rank == 2:
        group.send(bytearray(b"x" * size), 0, 2)
    elif group.rank == 0:
        memory = bytearray(size)
        assert group.receive(memory, 2, 2) == 2
        assert memory[-1:] == b"x"


def aborts(group: MpiGroup) -> None:
    def blocked(action: Any) -> str:
        try:
            return str(action())
        except ConnectionError as error:
            return str(error)

    other = (group.rank + 1) % group.size
    begun = time.monotonic()
    threading.Timer(0.1, group.abort).start()
    with ThreadPoolExecutor(3) as pool:
        said = pool.map(
            blocked,
            (
                lambda: group.receive(bytearray(8), None, CONTROL_TAG),
                lambda: group.receive(bytearray(8), other, 7),
                lambda: group.send(bytearray(8 << 20), other, 9),
            ),
        )
        assert list(said) == [ABORTED] * 3
    assert time.monotonic() - begun < SOON
    assert blocked(lambda: group.send(bytearray(8), other, 1)) == ABORTED


def main() -> None:
    for _ in range(2):  # the second life is on a copy of its own
        group = made()
        for check in (gathers, receives_from_any, keeps_order, moves_much):
            check(group)
        group.all_gather(b"", LIMIT)
        group.close(True)
    group = made()
    aborts(group)
    group.close(False)
    print(f"rank {group.rank} is content", flush=True)


main()
