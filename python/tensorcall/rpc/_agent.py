"""The agent object that Python sees, and which one is current in this process."""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING, Any

import torch

from .. import _tensorcall
from . import _fork
from ._worker import WorkerInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ._groups import Group
    from ._handler import Handler
    from .options import AgentOptions

NOT_SET = (
    "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
)


NOT_INITIALIZED = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."

_EXIT_PATIENCE = 0.5
"""Seconds that functions of other workers get to end when the interpreter does (EXIT-1)."""

_LOOP_PATIENCE = 0.5
"""Seconds that cancelled coroutines get to end at shutdown."""


class RpcAgent:
    """What every kind of agent offers."""

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """This worker, or the one of that name or rank."""
        raise NotImplementedError

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the group."""
        raise NotImplementedError

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until nothing is in flight in the whole group."""
        raise NotImplementedError

    def sync(self) -> None:
        """Wait until nothing is in flight in the whole group; the agent goes on."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Stop at once."""
        raise NotImplementedError

    def get_debug_info(self) -> dict[str, str]:
        """Figures about this agent."""
        raise NotImplementedError

    def get_metrics(self) -> dict[str, str]:
        """Figures about this agent."""
        raise NotImplementedError


class TensorPipeAgent(RpcAgent):
    """The default agent. `init_rpc` makes it; its class keeps torch's name, programs test for it.

    Args:
        native: the extension's agent, not yet open.
        infos: all workers of the group.
        roster: name, rank and contact of each, for the extension.
        dynamic: whether others join and leave at run time.
        group: what carries the messages, if that is a process group.
    """

    def __init__(
        self,
        native: _tensorcall.Agent,
        infos: list[WorkerInfo],
        roster: list[tuple[str, int, str]],
        store: Store,
        options: AgentOptions,
        handler: Handler,
        dynamic: bool = False,
        group: Group | None = None,
    ) -> None:
        self.rpc_timeout = options.rpc_timeout
        self._native = native
        self._infos = {info.id: info for info in infos}
        self._roster = roster
        self._by_name = {info.name: info.id for info in infos}
        self._me = self._infos[native.rank]
        self._dynamic = dynamic
        self._group = group
        self._changing = threading.Lock()
        self._store = store
        self._options = options
        self._handler = handler
        self._devices = handler.devices
        self._left = False

    @property
    def is_static_group(self) -> bool:
        """Whether the group was given its size at the start."""
        return not self._dynamic

    @property
    def store(self) -> Store:
        """The store in which the group met."""
        return self._store

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        return self._me if worker is None else self._infos[self._rank_of(worker)]

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [self._infos[rank] for rank in sorted(self._infos)]

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until nothing is in flight in the whole group.

        Args:
            shutdown: this worker makes no further calls of its own.
            timeout: seconds; 0 means no limit.

        Raises:
            RuntimeError: the limit passed.
        """
        self._native.join(timeout, shutdown)
        self._left |= shutdown

    def sync(self) -> None:
        self.join(shutdown=False)

    def shutdown(self) -> None:
        self._handler.stop()
        self._native.close(self._left)
        if self._group is not None:
            self._group.close(self._left)
        if not _exiting:
            self._handler.wait_until_stopped(_LOOP_PATIENCE)

    def lost_workers(self) -> set[int]:
        """Ranks of the workers that died or left."""
        return set(self._native.lost_workers())

    def calls_sent(self) -> int:
        """How many calls this agent has made."""
        return self._native.calls_sent()

    def get_debug_info(self) -> dict[str, str]:
        return self.get_metrics()

    def get_metrics(self) -> dict[str, str]:
        metrics = {}
        for key, value in self._native.metrics().items():
            metrics[key if key.startswith("agent.") else f"agent.{key}"] = str(value)
        if not _gil_profiling:
            metrics.pop("agent.gil_average_wait_time_us", None)
        return metrics

    def _open(self) -> None:
        self._native.open(self._roster, self._dynamic)

    def _rank_of(self, to: Any) -> int:
        rank: int | None
        if isinstance(to, str):
            rank = self._by_name.get(to)
            wanted = f"name {to}"
        elif isinstance(to, WorkerInfo):
            rank = to.id if self._by_name.get(to.name) == to.id else None
            wanted = str(to)
        elif isinstance(to, int):
            rank = int(to) if to in self._infos else None
            wanted = f"id {to}"
        else:
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        if rank is None:
            raise RuntimeError(f"name:{self._me.name},rank:{self._me.id} could not find destination {wanted}")
        return rank

    def _name_of(self, rank: int) -> str:
        info = self._infos.get(rank)
        return f"of rank {rank}" if info is None else info.name

    def _add(self, info: WorkerInfo) -> None:
        """Let a worker that has joined be called; the extension knows it already."""
        with self._changing:
            before = self._infos.get(info.id)
            names = {
                name: rank for name, rank in self._by_name.items() if before is None or name != before.name
            }
            self._by_name = names | {info.name: info.id}
            self._infos = self._infos | {info.id: info}

    def _remove(self, rank: int) -> None:
        """Let a worker that leaves no longer be called."""
        with self._changing:
            self._infos = {other: info for other, info in self._infos.items() if other != rank}
            self._by_name = {name: other for name, other in self._by_name.items() if other != rank}

    def _update_group_membership(
        self, worker_info: WorkerInfo, my_devices: Any, reverse_device_map: Any, is_join: bool
    ) -> None:
        from . import _dynamic

        _dynamic.update(self, worker_info, is_join)

    def _info_of(self, rank: int, name: str | None = None) -> WorkerInfo:
        """The worker of that rank, which may be gone; then it had this name, if that is known."""
        info = self._infos.get(rank)
        if info is None or (name is not None and name != info.name):
            return WorkerInfo(name or f"rank_{rank}", rank)
        return info

    def _get_backend_options(self) -> AgentOptions:
        return self._options

    def _get_device_map(self, worker: WorkerInfo) -> dict[torch.device, torch.device]:
        return self._options.device_maps.get(worker.name, {})


class ProcessGroupAgent(TensorPipeAgent):
    """The agent of a worker that is called through a process group, and listens nowhere."""


_current: Any = None
_parent: str | None = None
"""Name of the worker that this process was forked from, if it was."""
_lock = threading.Lock()
_hooked = False
_exiting = False
_gil_profiling = False


def current() -> Any:
    """The current agent.

    Raises:
        RuntimeError: there is none.
    """
    if _current is None:
        raise not_set(NOT_SET)
    return _current


def not_set(text: str) -> RuntimeError:
    """The error that says `text` because there is no agent, and why, if that is not plain."""
    if _parent is not None:
        text += (
            f" This process was forked from worker '{_parent}', whose agent does not work here: to make "
            "calls, call init_rpc with a name of its own."
        )
    return RuntimeError(text)


def is_set() -> bool:
    """Whether there is a current agent."""
    return _current is not None


def set_current(agent: Any) -> None:
    """Make `agent` the current one; one of ours starts serving, so functions that it runs find it."""
    global _current
    with _lock:
        if _current is not None:
            raise RuntimeError("RPC is already initialized")
        prepare()
        _current = agent
    if isinstance(agent, TensorPipeAgent):
        try:
            agent._open()
        except BaseException:
            reset()
            raise


def reset() -> None:
    """Forget the current agent, if any."""
    global _current
    _current = None


def is_exiting() -> bool:
    """Whether the interpreter is about to end; functions that still run are then interrupted."""
    return _exiting


def enable_gil_profiling(flag: bool) -> None:
    """Whether the metrics tell how long requests wait for the GIL."""
    global _gil_profiling
    _gil_profiling = bool(flag)
    _tensorcall.measure_gil_waits(_gil_profiling)


def prepare() -> None:
    """From now on the end of the interpreter and forks are noticed."""
    global _hooked
    _fork.hook()
    if not _hooked:
        _hooked = True
        atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    # First the door: functions that wait for other workers then wait for ever, instead of failing when
    # the agent closes and saying so on stderr.
    global _exiting
    _exiting = True
    agent = _current
    if isinstance(agent, TensorPipeAgent):
        agent._handler.stop()
        # Its threads wait in Python, and must be out before the door is closed.
        agent._native.leave_group()
    _tensorcall.stop_entering(_EXIT_PATIENCE)
    if agent is not None:
        reset()
        if isinstance(agent, TensorPipeAgent):
            agent.shutdown()


@_fork.in_child
def _disown() -> Any:
    global _current, _lock, _parent
    _lock = threading.Lock()
    inherited, _current = _current, None
    if isinstance(inherited, TensorPipeAgent):
        _parent = inherited._me.name
    return inherited
