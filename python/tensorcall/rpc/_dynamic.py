"""How workers join and leave a dynamic group, one after the other.

Whoever joins or leaves holds the turn meanwhile: a value in the store that its holder renews, a
lease. A holder that has not renewed it for `LEASE` seconds is passed over. Under the turn, the
store's list of members is read and written.

A joiner tells every member twice: first where it can be reached, so that all of them know it
before anybody names it (references to it may travel between any two of them), then its name.
Members that do not answer because they died are struck off the list. Members need the store only
to join and to leave; if it is gone, they go on, and leaving is told to the others all the same.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import Store

from .. import _tensorcall
from . import _agent, _call, _devices, _membership, api, internal
from ._handler import Handler
from ._membership import Deadline
from ._worker import WorkerInfo
from .options import TensorPipeRpcBackendOptions

_logger = logging.getLogger("tensorcall")

LEASE = 10.0
"""Seconds after which a turn that was not renewed is over."""

_RENEW_EVERY = 2.0
_POLL_EVERY = 0.02
_PROBE_LIMIT = 5.0
"""Seconds in which a worker answers that is said to be there."""

_FREE = "free"

Members = dict[int, tuple[str, str, Any]]
"""Name, contact and devices by rank."""


def join(
    store: Store,
    name: str,
    rank: int,
    options: TensorPipeRpcBackendOptions,
    kind: type[_agent.TensorPipeAgent],
) -> _agent.TensorPipeAgent:
    """Become a member and start this worker's agent, which is then the current one.

    Returns when every member can call this worker, and this worker every member.

    Raises:
        RuntimeError: another live worker has the name or the rank, the secret is not that of the
            group, the store is gone, or the turn did not come in time. No agent is set then.
    """
    deadline = Deadline.of_rendezvous(options.rpc_timeout)
    keys = _membership.keys_of(store)
    _agent.prepare()
    job, secret = _membership.agree_on_job(keys)
    _check_secret(keys, job, secret)
    assert secret is not None
    native: _tensorcall.Agent | None = None
    with _Turn(keys, name).held(deadline) as turn:
        try:
            members = _read(keys)
            for other in [r for r, (theirs, *_) in members.items() if theirs == name or r == rank]:
                _make_way(members, other, name, rank, job, secret)
            devices = _devices.Directory(name, options)
            mine = _devices.entry_of(options)
            entries = {theirs: entry for theirs, _, entry in members.values()} | {name: mine}
            fault = _devices.fault(entries, static=False)
            if fault is not None:
                raise ValueError(fault)
            for other, (theirs, _, entry) in members.items():
                devices.learn(other, theirs, entry["maps"])
            devices.learn(rank, name, mine["maps"])
            handler = Handler(WorkerInfo(name, rank), devices)
            native = _membership.make_native(name, rank, job, secret, options, handler)
            present = members | {rank: (name, native.contact(), mine)}
            roster = [(theirs, r, contact) for r, (theirs, contact, _) in sorted(present.items())]
            infos = [WorkerInfo(theirs, r) for theirs, r, _ in roster]
            agent = kind(native, infos, roster, store, options, handler, dynamic=True)
            api._init_rpc_states(agent)
            lost = _tell(agent, members, _admit, (name, rank, native.contact()), turn)
            turn.renew()
            _write(keys, {r: member for r, member in present.items() if r not in lost})
            _tell(agent, members.keys() - lost, _welcome, (name, rank, mine["maps"]), turn)
            for gone in lost:
                agent._remove(gone)
        except BaseException:
            _agent.reset()
            if native is not None:
                native.close(False)
            raise
    return agent


def leave(agent: _agent.TensorPipeAgent, timeout: float) -> None:
    """Tell the others that this worker leaves, and strike it off the list.

    Args:
        agent: whose worker leaves.
        timeout: seconds; 0 means the agent's limit for calls.
    """
    me = agent.get_worker_info()
    keys = _membership.keys_of(agent.store)
    deadline = Deadline(timeout or max(agent.rpc_timeout, _membership.MIN_PATIENCE))
    turn = _Turn(keys, me.name)
    try:
        with turn.held(deadline):
            members = _read(keys)
            if members.get(me.id, ("",))[0] == me.name:
                del members[me.id]
                _write(keys, members)
            others = [info.id for info in agent.get_worker_infos() if info.id != me.id]
            _tell(agent, others, _farewell, (me.name, me.id), turn)
    except RuntimeError as error:
        _logger.warning("worker '%s' leaves without the store's list of members: %s", me.name, error)
        others = [info.id for info in agent.get_worker_infos() if info.id != me.id]
        _tell(agent, others, _farewell, (me.name, me.id), None)


def update(agent: _agent.TensorPipeAgent, info: WorkerInfo, is_join: bool) -> None:
    """Do for `agent` what a worker that joins or leaves asks of every member."""
    if is_join:
        found = _read(_membership.keys_of(agent.store)).get(info.id)
        if found is None or found[0] != info.name:
            raise RuntimeError(f"{info} is not in the store's list of members")
        agent._native.admit(info.name, info.id, found[1])
        agent._add(info)
    else:
        agent._remove(info.id)


class _Turn:
    """The right to change who is a member."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._holder = f"{name} {secrets.token_hex(8)}"
        self._count = 0
        self._renewed = 0.0

    @contextmanager
    def held(self, deadline: Deadline) -> Iterator[_Turn]:
        """Wait for the turn; it is over at the end of the block.

        Raises:
            RuntimeError: it did not come in time.
        """
        self._acquire(deadline)
        try:
            yield self
        finally:
            try:
                self._store.compare_set("turn", self._value(), _FREE)
            except RuntimeError as error:
                _logger.debug("giving the turn back: %s", error)

    def renew(self) -> None:
        """Say that this worker is still at it.

        Raises:
            RuntimeError: it took too long and was passed over.
        """
        before = self._value()
        self._count += 1
        if self._store.compare_set("turn", before, self._value()).decode() != self._value():
            raise RuntimeError(
                f"worker '{self._name()}' did not finish joining or leaving within {LEASE:g} s and was "
                "passed over"
            )
        self._renewed = time.monotonic()

    def renew_if_due(self) -> None:
        """Renew unless that was done a moment ago."""
        if time.monotonic() - self._renewed > _RENEW_EVERY:
            self.renew()

    def _acquire(self, deadline: Deadline) -> None:
        expected, seen, since = "", "", time.monotonic()
        while True:
            found = self._store.compare_set("turn", expected, self._value()).decode()
            if found == self._value():
                self._renewed = time.monotonic()
                return
            now = time.monotonic()
            if found != seen:
                seen, since = found, now
            if found == _FREE:
                expected = found
                continue
            if now - since > LEASE:
                _logger.warning(
                    "worker '%s' is passed over: it stopped while joining or leaving", seen.split()[0]
                )
                expected = found
                continue
            if deadline.is_over():
                raise RuntimeError(
                    f"worker '{self._name()}' did not get its turn in {deadline.seconds:g} s: worker "
                    f"'{seen.split()[0]}' is joining or leaving"
                )
            expected = _FREE
            time.sleep(_POLL_EVERY)

    def _value(self) -> str:
        return f"{self._holder} {self._count}"

    def _name(self) -> str:
        return self._holder.split()[0]


def _check_secret(keys: Store, job: str, secret: bytes | None) -> None:
    """Find out here, not by refused connections, that this worker has another secret than the first one."""
    if secret is None:
        raise RuntimeError(_membership._NO_SECRET)
    mine = _membership._fingerprint(secret, job) or ""
    if keys.compare_set("secret", "", mine).decode() != mine:
        raise RuntimeError(
            "this worker has another secret than the group: set TENSORCALL_SECRET or TENSORCALL_SECRET_FILE "
            "alike on all workers, or on none"
        )


def _read(keys: Store) -> Members:
    if not keys.check(["members"]):
        return {}
    return {
        int(rank): (name, contact, devices)
        for rank, (name, contact, devices) in json.loads(keys.get("members")).items()
    }


def _write(keys: Store, members: Members) -> None:
    keys.set("members", json.dumps(members))


def _make_way(members: Members, other: int, name: str, rank: int, job: str, secret: bytes) -> None:
    """Strike a member off that died, whose name or rank is wanted; one that lives keeps them."""
    theirs, contact, _ = members[other]
    if _lives(theirs, other, contact, job, secret):
        if theirs == name:
            raise RuntimeError(
                f"RPC worker name {name} is not unique. Workers {rank} and {other} share the same name."
            )
        raise RuntimeError(f"two workers claim rank {rank}: {theirs} and {name}")
    del members[other]


def _lives(name: str, rank: int, contact: str, job: str, secret: bytes) -> bool:
    """Whether a worker answers. Asks by an agent made for that, which bears neither its name nor its rank."""
    mine = (rank + 1) % 32768
    handler = Handler(WorkerInfo("probe", mine))
    options = TensorPipeRpcBackendOptions(num_worker_threads=1)
    probe = _membership.make_native(f"probe-{secrets.token_hex(8)}", mine, job, secret, options, handler)
    try:
        probe.open([(probe.name, mine, probe.contact()), (name, rank, contact)], True)
        udf = internal.PythonUDF(api._sign_of_life, (), {})
        message = internal.pack(internal._internal_rpc_pickler, udf)
        call = probe.call_pickled(rank, "sign of life", *message, _PROBE_LIMIT)
        call.disregard()
        call.wait(None)
        return rank not in probe.lost_workers()
    except RuntimeError:
        return False
    finally:
        probe.close(False)


def _tell(
    agent: _agent.TensorPipeAgent,
    ranks: Iterable[int],
    what: Callable[..., None],
    args: tuple[Any, ...],
    turn: _Turn | None,
) -> set[int]:
    """Have every member do something; return those that are gone.

    Raises:
        RuntimeError: a member that is there did not do it.
    """
    calls = {
        rank: _call.start(agent, rank, what, args, None, -1, internal._internal_rpc_pickler) for rank in ranks
    }
    gone = set()
    for rank, call in calls.items():
        while not call.wait(_RENEW_EVERY):
            if turn is not None:
                turn.renew_if_due()
        try:
            _call.take(call)
        except RuntimeError:
            if rank not in agent.lost_workers():
                raise
            gone.add(rank)
    return gone


def _admit(name: str, rank: int, contact: str) -> None:
    """Runs on a member: know where a joiner is."""
    _agent.current()._native.admit(name, rank, contact)


def _welcome(name: str, rank: int, maps: _devices.Plain) -> None:
    """Runs on a member: a joiner may be called."""
    agent = _agent.current()
    agent._devices.learn(rank, name, maps)
    agent._add(WorkerInfo(name, rank))


def _farewell(name: str, rank: int) -> None:
    """Runs on a member: a worker leaves and takes no new calls."""
    agent = _agent.current()
    if agent._by_name.get(name) == rank:
        agent._remove(rank)
