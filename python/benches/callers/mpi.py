"""mpi4py: bytes back and forth by `Send` and `Recv`. `mpirun -n 2 python mpi.py`.

Not calls: rank 1 knows what comes. Both ranks wait by spinning. Received tensors are new ones each time.
"""

from __future__ import annotations

import os
from typing import Any

import both  # noqa: F401 (finds the modules beside this folder)
import numpy as np
import settings as bench
import workloads
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
CODES = {"end": 0, "trivial": 1, "add": 2, "swallow": 3, "echo": 4}
OTHER = 1


class MpiClient(workloads.Client):
    """Rank 0."""

    def __init__(self) -> None:
        self._order = np.zeros(2, "i8")
        self._pair = np.ones((2, 2, 2), "f4")
        self._sum = np.empty((2, 2), "f4")
        self._byte = np.zeros(1, "u1")

    def _tell(self, function: str, size: int = 0) -> None:
        self._order[:] = CODES[function], size
        WORLD.Send([self._order, MPI.BYTE], OTHER)

    def trivial(self) -> Any:
        self._tell("trivial")
        WORLD.Recv([self._byte, MPI.BYTE], OTHER)

    def add(self) -> Any:
        self._tell("add")
        WORLD.Send([self._pair, MPI.BYTE], OTHER)
        WORLD.Recv([self._sum, MPI.BYTE], OTHER)

    def start(self, function: str, tensor: Any = None) -> Any:
        if tensor is None or function == "trivial":
            raise NotImplementedError(function)
        back = np.empty_like(tensor) if function == "echo" else np.empty(1, "u1")
        self._order = np.array([CODES[function], tensor.nbytes])
        sends = [WORLD.Isend([part, MPI.BYTE], OTHER) for part in (self._order, tensor)]
        return [*sends, WORLD.Irecv([back, MPI.BYTE], OTHER)], self._order, back

    def wait(self, handle: Any) -> Any:
        MPI.Request.Waitall(handle[0])

    def tensor(self, size: int) -> Any:
        return np.ones(size // 4, "f4")

    def end(self) -> None:
        self._tell("end")


def answer() -> None:
    """Rank 1."""
    order, pair, byte = np.zeros(2, "i8"), np.empty((2, 2, 2), "f4"), np.zeros(1, "u1")
    sent: list[Any] = []
    while True:
        WORLD.Recv([order, MPI.BYTE], 0)
        if order[0] == CODES["end"]:
            return
        if order[0] == CODES["trivial"]:
            WORLD.Send([byte, MPI.BYTE], 0)
        elif order[0] == CODES["add"]:
            WORLD.Recv([pair, MPI.BYTE], 0)
            WORLD.Send([pair[0] + pair[1], MPI.BYTE], 0)
        else:
            tensor = np.empty(int(order[1]), "u1")
            WORLD.Recv([tensor, MPI.BYTE], 0)
            back = tensor if order[0] == CODES["echo"] else byte
            sent = [(request, kept) for request, kept in sent if not request.Test()]
            sent.append((WORLD.Isend([back, MPI.BYTE], 0), back))


def main() -> None:
    """Calls, or answers."""
    options = bench.parser().parse_args()
    rank = WORLD.Get_rank()
    bench.place(options.placement, "caller" if rank == 0 else "callee")
    if rank != 0:
        return answer()
    client = MpiClient()
    names = ("L1", "L2", "B1", "B2")
    known = {name: workloads.COMMON[name] for name in names}
    workloads.run(client, bench.settings_of(options), known, os.getppid())
    client.end()
    return None


if __name__ == "__main__":
    main()
