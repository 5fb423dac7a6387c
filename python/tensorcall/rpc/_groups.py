"""Process groups that carry the messages of workers: what they are, and which one a worker takes.

In this order: the group that the options give, the default group of ``torch.distributed`` if there is one
with this worker's rank and world size, MPI if ``tensorcall run`` was started by mpirun, and else a gloo group
of those who meet at the init method. What is taken is only the ranks: messages travel on a private group.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch.distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from .. import _launcher
from .._startup import BACKEND
from .options import AgentOptions, ProcessGroupRpcBackendOptions

CONTROL_TAG = 1
"""The tag of messages that are small; those of other tags are pieces of large ones."""

ABORTED = "the group was aborted"

_BACKENDS = ("", "tensorpipe", "process_group")


@runtime_checkable
class Group(Protocol):
    """What carries messages between ranks. Methods are called from many threads at once.

    `send` and `receive` are never called twice at once with the same peer and tag. They block, without the
    interpreter lock. A message may be shorter than the memory it is received into, never longer. What
    they raise is the end of that peer; `receive` from any, the end of all.
    """

    rank: int
    size: int
    any_source: bool
    """Whether `receive` is to be called without a source for messages with `CONTROL_TAG`."""

    def send(self, memory: Any, to: int, tag: int) -> None:
        """Return when `memory` may be written again."""

    def receive(self, memory: Any, source: Any, tag: int) -> int | None:
        """Return who has sent what is now in `memory`."""

    def all_gather(self, data: bytes, limit: timedelta) -> list[bytes]:
        """What each rank gives. Raises ``RuntimeError`` after `limit`."""

    def abort(self) -> None:
        """Let whoever is blocked, and whoever comes later, raise."""

    def close(self, is_quiet: bool) -> None:
        """The group is no longer needed; `is_quiet` says that nothing is under way on any rank."""


def is_wanted() -> bool:
    """Whether programs that name no such backend are to run on a process group.

    Raises:
        RuntimeError: the environment names a backend that does not exist.
    """
    asked = os.environ.get(BACKEND, "").lower()
    if asked not in _BACKENDS:
        raise RuntimeError(f"{BACKEND} is {asked!r}, but must be tensorpipe or process_group")
    return asked == "process_group"


def takes_group(backend_name: str) -> bool:
    """Whether workers of a backend use a process group."""
    return backend_name == "PROCESS_GROUP" or (backend_name.endswith("TENSORPIPE") and is_wanted())


def choose(options: AgentOptions, rank: int, world_size: int | None) -> Any:
    """The ranks that there are already: a group of ``torch.distributed``, of MPI, or a `Group`.

    ``None`` if workers are to meet at the init method.

    Args:
        options: may give a group.
        rank: -1 stands for the rank in the group.
        world_size: ``None`` stands for the size of the group.

    Raises:
        TypeError: what the options give is no group.
        ValueError: the group that the options give has another rank or size.
    """
    given = options.process_group if isinstance(options, ProcessGroupRpcBackendOptions) else None
    if given is not None:
        found = place_of(given)
        if not _fits(*found, rank, world_size):
            raise ValueError(
                f"the process group has this worker as rank {found[0]} of {found[1]}, but init_rpc was given "
                f"rank {rank} and world_size {world_size}"
            )
        return given
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        default: Any = torch.distributed.group.WORLD
        if _fits(*place_of(default), rank, world_size):
            return default
    launched = _launcher.read()
    if launched is not None and launched.is_ours and _fits(launched.rank, launched.size, rank, world_size):
        from ._mpi import world

        return world()
    return None


def size_of_environment(init_method: str) -> int | None:
    """How many workers a launcher has started, where its environment says where they meet."""
    return int(os.environ.get("WORLD_SIZE", 0)) or None if init_method.startswith("env:") else None


def _fits(rank: int, size: int, wanted_rank: int, wanted_size: int | None) -> bool:
    return wanted_rank in (-1, rank) and wanted_size in (None, size)


def place_of(group: Any) -> tuple[int, int]:
    """This worker's rank in a group that `choose` may return, and the size."""
    if isinstance(group, torch.distributed.ProcessGroup):
        return group.rank(), group.size()
    if is_mpi(group):
        return group.Get_rank(), group.Get_size()
    if isinstance(group, Group):
        return group.rank, group.size
    raise TypeError(
        "process_group must be a torch.distributed.ProcessGroup or an intracommunicator of mpi4py, not "
        f"{group!r}"
    )


def is_mpi(group: Any) -> bool:
    """Whether `group` is a communicator of mpi4py."""
    return type(group).__module__.partition(".")[0] == "mpi4py"


def store_of(group: Any) -> Store:
    """A part of the store in which `group` met that no other join has had.

    What needs no store gets one of its own.
    """
    if not isinstance(group, torch.distributed.ProcessGroup):
        return HashStore()
    store: Any = group.get_group_store() if hasattr(group, "get_group_store") else None
    if store is None:
        store = distributed_c10d._world.pg_map.get(group, (None, None))[1]
    if store is None:
        raise TypeError(f"process_group {group!r} has no store in which its ranks can meet again")
    joins = (store.add("tensorcall/joins", 1) - 1) // group.size()
    return PrefixStore(f"tensorcall/join {joins}", store)
