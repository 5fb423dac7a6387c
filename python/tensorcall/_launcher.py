"""What mpirun says of the process that it has started, by the environment."""

from __future__ import annotations

import os
from typing import NamedTuple

MARK = "TENSORCALL_MPI"
"""Holds the process id of the one process that may use MPI on behalf of mpirun's rank."""

# Open MPI; MPICH and those made from it, such as Intel's.
_NAMES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


class Launched(NamedTuple):
    """A rank of mpirun."""

    rank: int
    size: int
    local_rank: str
    local_size: str

    @property
    def is_ours(self) -> bool:
        """Whether this process is the rank, marked by `claim`, and not one that it started."""
        return os.environ.get(MARK) == str(os.getpid())


def read() -> Launched | None:
    """Which rank mpirun made this process, or one that started it; ``None`` without mpirun."""
    for rank, size, local_rank, local_size in _NAMES:
        if rank in os.environ and size in os.environ:
            local = os.environ.get(local_rank, "0"), os.environ.get(local_size, "1")
            return Launched(int(os.environ[rank]), int(os.environ[size]), *local)
    return None


def claim() -> None:
    """Let this process use MPI, if mpirun has started it, and tell its program what torchrun would."""
    launched = read()
    if launched is None or MARK in os.environ:
        return
    os.environ[MARK] = str(os.getpid())
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(launched.rank), str(launched.size)
        os.environ.setdefault("LOCAL_RANK", launched.local_rank)
        os.environ.setdefault("LOCAL_WORLD_SIZE", launched.local_size)
