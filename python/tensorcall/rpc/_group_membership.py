"""How the workers of a process group meet: names and devices are gathered over the group itself.

Where there is no group yet, the workers first meet in the store as any static group does (`_membership`),
which tells who did not come and who has whose rank. Then they connect by gloo. From there on the store is
not needed, and what is said here about gloo is true of MPI.

Everybody gets every entry and judges them alike, so a mistake of one worker is told to each in the same
words. Whoever is in the group is in the job.
"""

from __future__ import annotations

import json
import logging
import secrets
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from .. import _tensorcall
from . import _agent, _devices, _gloo, _groups, _log, _membership, api
from ._handler import Handler
from ._waiting import interruptible
from ._worker import WorkerInfo
from .options import AgentOptions

_logger = logging.getLogger("tensorcall")


def join(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    options: AgentOptions,
    kind: type[_agent.TensorPipeAgent] | None = None,
) -> _agent.TensorPipeAgent:
    """Meet the other workers and start this one's agent, of class `kind`, which is then the current one.

    Returns when every worker of the group serves.

    Raises:
        RuntimeError: a name is not unique or not a name, somebody did not come in time, or no world size
            is known. No agent is set then.
        ValueError: device maps do not fit the group.
    """
    _log.configure()
    deadline = _membership.Deadline.of_rendezvous(options.rpc_timeout)
    chosen = _groups.choose(options, rank, world_size)
    if chosen is not None:
        rank, world_size = _groups.place_of(chosen)
    if not world_size:
        raise RuntimeError(
            "the workers of a process group are known from the start: give init_rpc their number, world_size"
        )
    _agent.prepare()
    group = _group_of(chosen, store, name, rank, world_size, options, deadline)
    native: list[_tensorcall.Agent] = []
    try:
        return _Joining(group, name, options, deadline).run(store, kind or _agent.ProcessGroupAgent, native)
    except BaseException:
        for agent in native:
            agent.close(False)
        group.close(False)
        raise


def _group_of(
    chosen: Any,
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    options: AgentOptions,
    deadline: _membership.Deadline,
) -> _groups.Group:
    if isinstance(chosen, _groups.Group):
        return chosen
    if chosen is not None and _groups.is_mpi(chosen):
        from ._mpi import MpiGroup

        return interruptible(lambda: MpiGroup(chosen, deadline.left()))
    where = None if chosen is not None else options.init_method
    return _connect(store, name, rank, world_size, where, deadline)


def _connect(
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    init_method: str | None,
    deadline: _membership.Deadline,
) -> _gloo.GlooGroup:
    """Meet in the store, then connect by gloo."""
    keys = _membership.keys_of(store)
    meeting = _membership._Meeting(keys, rank, world_size, deadline, init_method or "")
    try:
        try:
            device = _gloo.device_of(init_method) if world_size > 1 else None
        except Exception as error:
            meeting.spoil(f"worker {name!r} (rank {rank}) cannot join: {error}")
            raise
        mark = secrets.token_hex(8)
        meeting.enter(_entry(name, world_size) | {"contact": mark})
        meeting.check(meeting.roster(), name, mark)
        place = PrefixStore("gloo", keys)
        group = interruptible(lambda: _gloo.GlooGroup(place, rank, world_size, deadline.left(), device))
        meeting.part("connected", world_size)
    except DistError as error:
        text = f"worker {name!r} (rank {rank}) lost the store in which the workers meet: {error}"
        raise RuntimeError(text) from error
    return group


def _entry(name: str, world_size: int) -> dict[str, Any]:
    nothing = {"count": 0, "maps": {}, "devices": []}
    return {"name": name, "world_size": world_size, "secret": None, "devices": nothing}


class _Joining:
    """One worker's part in a join over a group that is connected."""

    def __init__(
        self, group: _groups.Group, name: str, options: AgentOptions, deadline: _membership.Deadline
    ) -> None:
        self._group = group
        self._name = name
        self._options = options
        self._deadline = deadline

    def run(
        self, store: Store, kind: type[_agent.TensorPipeAgent], made: list[_tensorcall.Agent]
    ) -> _agent.TensorPipeAgent:
        """Join; what native agent was made until then is in `made`."""
        devices = _devices.Directory(self._name, self._options)
        mine = _entry(self._name, self._group.size) | {"devices": _devices.entry_of(self._options)}
        entries = self._gather(mine | {"job": secrets.token_hex(16)})
        self._judge(entries)
        rank = self._group.rank
        try:
            handler = Handler(WorkerInfo(self._name, rank), devices)
            made.append(self._start(entries[0]["job"], handler))
        except Exception as error:
            self._gather({"error": f"worker {self._name!r} (rank {rank}) cannot join: {error}"})
            self._part()
            raise
        answers = self._gather({"contact": made[0].contact()})
        for answer in answers:
            if "error" in answer:
                self._part()
                raise RuntimeError(answer["error"])
        roster = [
            (entry["name"], other, answer["contact"])
            for other, (entry, answer) in enumerate(zip(entries, answers, strict=True))
        ]
        for entry, (member, other, _) in zip(entries, roster, strict=True):
            devices.learn(other, member, entry["devices"]["maps"])
        infos = [WorkerInfo(member, other) for member, other, _ in roster]
        agent = kind(made[0], infos, roster, store, self._options, handler, group=self._group)
        api._init_rpc_states(agent)
        try:
            self._gather({})  # so everybody serves
        except BaseException:
            _agent.reset()
            raise
        return agent

    def _start(self, job: str, handler: Handler) -> _tensorcall.Agent:
        return _tensorcall.Agent(
            self._name,
            self._group.rank,
            job=job,
            secret=b"",
            num_worker_threads=self._options.num_worker_threads,
            host=None,
            handler=handler,
            faults=self._options._faults(),
            group=self._group,
            group_threads=self._options._pieces,
        )

    def _judge(self, entries: list[dict[str, Any]]) -> None:
        error = _membership._fault(entries, self._group.size)
        is_value = error is None
        if error is None:
            error = _devices.fault({entry["name"]: entry["devices"] for entry in entries})
        if error is None:
            return
        self._part()
        raise (ValueError if is_value else RuntimeError)(error)

    def _part(self) -> None:
        """Stay until all have heard why there will be no group, so that nobody just loses it instead.

        Who has entered this gathering has the answers of the one before. One that does not come is gone,
        which ends the wait, or is stuck, and the others wait for it no longer either.
        """
        try:
            self._gather({})
        except RuntimeError as error:
            _logger.debug("parting from the group: %s", error)

    def _gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        data = json.dumps(mine).encode()
        try:
            found = interruptible(lambda: self._group.all_gather(data, self._deadline.left()))
        except RuntimeError as error:
            text = (
                f"worker {self._name!r} (rank {self._group.rank}) lost the group in which the workers meet: "
            )
            raise RuntimeError(f"{text}{error}") from error
        return [json.loads(item) for item in found]
