"""How a static group meets: who is there, where, and with which secret.

Every worker puts one entry into the store; rank 0 collects them, checks names and ranks and
publishes one record for all: the roster, or the error that every worker then raises. So a join
takes O(N) operations in all, and a mistake of one worker is told to each in the same words.
An entry has a fingerprint of the secret, so that workers with different ones are found out here
and not by connections that are refused. Every wait ends by the RPC timeout and names the ranks
that did not come.

Keys carry the run and the restart of torchrun where it set them, since its store outlives a
restart. The job's secret is TENSORCALL_SECRET, or the content of the file that
TENSORCALL_SECRET_FILE names, or else a random one that the first worker leaves in the store.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import os
import secrets
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from .. import _tensorcall
from . import _agent, _devices, _log, api
from ._handler import Handler
from ._waiting import interruptible
from ._worker import WorkerInfo
from .constants import DEFAULT_PROCESS_GROUP_TIMEOUT
from .options import TensorPipeRpcBackendOptions

_logger = logging.getLogger("tensorcall")

MIN_PATIENCE = 5.0
"""Seconds that workers wait for each other even if calls may take less."""

_PARTING = 5.0
"""Seconds that rank 0, which may host the store, waits until the others have read from it."""

_LATE_PARTING = 1.0
"""The same, for an error when the time for meeting is over."""


_NO_SECRET = (
    "this job has a secret that only its workers know, but this worker was given none: set "
    "TENSORCALL_SECRET or TENSORCALL_SECRET_FILE as on the other workers"
)


_MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."


class Deadline:
    """A point in time that several waits share.

    Args:
        seconds: from now; 0 means never.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds if seconds else None

    def left(self) -> timedelta:
        """What is left, for a store: at least a millisecond, at most what c10d can count."""
        if self._end is None:
            return DEFAULT_PROCESS_GROUP_TIMEOUT
        left = max(self._end - time.monotonic(), 0.001)
        return min(timedelta(seconds=left), DEFAULT_PROCESS_GROUP_TIMEOUT)

    def is_over(self) -> bool:
        """Whether it has passed."""
        return self._end is not None and time.monotonic() >= self._end

    @classmethod
    def of_rendezvous(cls, rpc_timeout: float) -> Deadline:
        """The limit for meeting, given the limit for calls."""
        return cls(max(rpc_timeout, MIN_PATIENCE) if rpc_timeout else 0)


def join(
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    options: TensorPipeRpcBackendOptions,
    kind: type[_agent.TensorPipeAgent] = _agent.TensorPipeAgent,
) -> _agent.TensorPipeAgent:
    """Meet the other workers and start this one's agent, of class `kind`, which is then the current one.

    Returns when every worker of the group serves.

    Raises:
        RuntimeError: a name is not unique or not a name, two workers claim one rank, the workers
            have different secrets, somebody did not come in time. No agent is set then.
        ValueError: device maps do not fit the group.
    """
    _log.configure()
    deadline = Deadline.of_rendezvous(options.rpc_timeout)
    keys = keys_of(store)
    meeting = _Meeting(keys, rank, world_size, deadline, options.init_method)
    native: _tensorcall.Agent | None = None
    _agent.prepare()
    try:
        job, secret = agree_on_job(keys)
        entry = {"name": name, "world_size": world_size, "secret": _fingerprint(secret, job)}
        if secret is None:
            meeting.enter(entry)
            meeting.roster()
            raise RuntimeError(_NO_SECRET)
        try:
            devices = _devices.Directory(name, options)
            handler = Handler(WorkerInfo(name, rank), devices)
            native = make_native(name, rank, job, secret, options, handler)
        except Exception as error:
            meeting.spoil(f"worker {name!r} (rank {rank}) cannot join: {error}")
            meeting.part("error", world_size)
            raise
        meeting.enter(entry | {"contact": native.contact(), "devices": _devices.entry_of(options)})
        roster = meeting.roster()
        meeting.check(roster, name, native.contact())
        for (member, other, _), maps in zip(roster, meeting.device_maps, strict=True):
            devices.learn(other, member, maps)
        infos = [WorkerInfo(member, other) for member, other, _ in roster]
        agent = kind(native, infos, roster, store, options, handler)
        api._init_rpc_states(agent)
        try:
            meeting.wait_until_all_serve()
        except BaseException:
            _agent.reset()
            raise
    except BaseException as error:
        if native is not None:
            native.close(False)
        if isinstance(error, DistError):
            text = f"worker {name!r} (rank {rank}) lost the store in which the workers meet: {error}"
            raise RuntimeError(text) from error
        raise
    return agent


def keys_of(store: Store) -> Store:
    """Where a group has its keys in `store`."""
    run, restart = (os.environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT"))
    return PrefixStore(f"tensorcall/{run}/{restart}", store)


def mark_dynamic(store: Store) -> None:
    """Say that the workers that meet in `store` do so in a dynamic group.

    Raises:
        RuntimeError: a static group meets there.
    """
    found = keys_of(store).compare_set("job", "", json.dumps({"dynamic": True}))
    if "dynamic" not in json.loads(found):
        raise RuntimeError(_MIXED)


def agree_on_job(keys: Store) -> tuple[str, bytes | None]:
    """The job's id and secret: those of whoever came first.

    No secret means that the others were given one and this worker was not.
    """
    given = _given_secret()
    proposal = {
        "job": secrets.token_hex(16),
        "secret": None if given is not None else secrets.token_hex(32),
    }
    agreed = json.loads(keys.compare_set("job", "", json.dumps(proposal)))
    if "dynamic" in agreed:
        raise RuntimeError(_MIXED)
    if given is not None:
        return agreed["job"], given
    secret = agreed["secret"]
    return agreed["job"], None if secret is None else bytes.fromhex(secret)


def make_native(
    name: str, rank: int, job: str, secret: bytes, options: TensorPipeRpcBackendOptions, handler: Handler
) -> _tensorcall.Agent:
    """The extension's agent of a worker. It listens and runs nothing yet."""
    native = _tensorcall.Agent(
        name,
        rank,
        job=job,
        secret=secret,
        num_worker_threads=options.num_worker_threads,
        host=meeting_host(options.init_method),
        handler=handler,
        faults=options._faults(),
    )
    if _given_secret() is None:
        _warn_if_reachable(native.contact())
    return native


class _Meeting:
    """One worker's part in a join."""

    def __init__(
        self, keys: Store, rank: int, world_size: int, deadline: Deadline, init_method: str = ""
    ) -> None:
        self._store = keys
        self._rank = rank
        self._size = world_size
        self._deadline = deadline
        self.device_maps: list[_devices.Plain] = []
        """Of every worker by rank, once there is a roster."""
        self._suspicion = ""
        file = urlparse(init_method)
        if file.scheme == "file":
            self._suspicion = (
                f". If that is not so, {file.path} is left from an earlier job: remove it, or meet at "
                "another file"
            )

    def enter(self, entry: dict[str, Any]) -> None:
        """Leave this worker's entry.

        Raises:
            RuntimeError: another worker has this rank; the others are told as well.
        """
        mine = json.dumps(entry | {"by": secrets.token_hex(8)})
        found = self._store.compare_set(_entry(self._rank), "", mine).decode()
        if found == mine:
            return
        other = json.loads(found)
        if "error" in other:
            self.part("error", self._size)
            raise RuntimeError(other["error"])
        self._mark_read("error", self._size)
        text = f"two workers claim rank {self._rank}: {other['name']} and {entry['name']}{self._suspicion}"
        self.spoil(text)
        raise RuntimeError(text)

    def spoil(self, error: str) -> None:
        """Tell all that the group cannot come together.

        All are rank 0, which waits for the entries of all, those who come later, and those who wait for
        rank 0, which may be among the latter.
        """
        for rank in range(self._size):
            self._store.compare_set(_entry(rank), "", json.dumps({"error": error}))
        self._publish({"error": error, "size": self._size})

    def roster(self) -> list[tuple[str, int, str]]:
        """Name, rank and contact of every worker.

        Raises:
            RuntimeError: the group did not come together; the text is the same on every rank.
        """
        if self._rank == 0:
            record = self._publish(self._collect())
        else:
            try:
                self._wait(["roster"])
            except RuntimeError as error:
                text = self._missing()
                self._mark_read("error", self._size)
                raise RuntimeError(text) from error
            record = json.loads(self._store.get("roster"))
        if "error" in record:
            self.part("error", record.get("present", record.get("size", self._size)))
            raise (ValueError if record.get("is_value") else RuntimeError)(record["error"])
        self.device_maps = record["device_maps"] or [{}] * len(record["workers"])
        return [(name, rank, contact) for rank, (name, contact) in enumerate(record["workers"])]

    def check(self, roster: list[tuple[str, int, str]], name: str, contact: str) -> None:
        """Make sure that the roster is of this group, and not of an earlier one that met in this store.

        Raises:
            RuntimeError: it is not.
        """
        if len(roster) != self._size or roster[self._rank] != (name, self._rank, contact):
            names = ", ".join(member for member, _, _ in roster)
            raise RuntimeError(
                f"the store has the roster of another group ({names}), without {name} of rank {self._rank}"
                f"{self._suspicion}"
            )

    def wait_until_all_serve(self) -> None:
        """Return when every worker has opened its agent."""
        if self._store.add("serving", 1) == self._size:
            self._store.set("all serve", "1")
        try:
            self._wait(["all serve"])
        except RuntimeError as error:
            text = f"not all of the {self._size} workers started serving in {self._deadline.seconds:g} s"
            raise RuntimeError(text) from error
        self.part("serve", self._size)

    def _collect(self) -> dict[str, Any]:
        keys = [_entry(rank) for rank in range(self._size)]
        try:
            self._wait(keys)
        except RuntimeError:
            return {"error": self._missing(), "present": sum(self._store.check([key]) for key in keys)}
        entries = [json.loads(entry) for entry in self._store.multi_get(keys)]
        error = _fault(entries, self._size)
        if error is not None:
            return {"error": error, "size": self._size}
        devices = {entry["name"]: entry["devices"] for entry in entries}
        error = _devices.fault(devices)
        if error is not None:
            return {"error": error, "is_value": True}
        maps = [entry["devices"]["maps"] for entry in entries]
        return {
            "workers": [(entry["name"], entry["contact"]) for entry in entries],
            "device_maps": maps if any(maps) else [],
        }

    def _publish(self, record: dict[str, Any]) -> Any:
        """Leave the record for all, unless somebody left one before; return what counts."""
        return json.loads(self._store.compare_set("roster", "", json.dumps(record)))

    def _missing(self) -> str:
        limit = f"after {self._deadline.seconds:g} s"
        try:
            missing = [rank for rank in range(self._size) if not self._store.check([_entry(rank)])]
        except RuntimeError as error:
            return f"the store was lost {limit} of waiting for the other workers: {error}"
        if not missing:
            return f"rank 0 did not say {limit} who is in the group of {self._size} workers"
        return f"workers did not come {limit}: missing rank(s) {missing} of world size {self._size}"

    def part(self, stage: str, present: int) -> None:
        """Let nobody lose the store who still needs it: rank 0, its likely host, goes last."""
        if self._rank != 0:
            self._mark_read(stage, present)
        elif present > 1:
            limit = min(self._deadline.left(), timedelta(seconds=_PARTING))
            if stage == "error":
                limit = max(limit, timedelta(seconds=_LATE_PARTING))
            try:
                if self._store.add(f"reading {stage}", 0) < present - 1:
                    interruptible(lambda: self._store.wait([f"read {stage}"], limit))
            except RuntimeError as error:
                _logger.debug("parting from the store: %s", error)

    def _mark_read(self, stage: str, present: int) -> None:
        try:
            if self._store.add(f"reading {stage}", 1) == present - 1:
                self._store.set(f"read {stage}", "1")
        except RuntimeError as error:
            _logger.debug("parting from the store: %s", error)

    def _wait(self, keys: list[str]) -> None:
        interruptible(lambda: self._store.wait(keys, self._deadline.left()))


def _fault(entries: list[dict[str, Any]], world_size: int) -> str | None:
    ranks: dict[str, int] = {}
    for rank, entry in enumerate(entries):
        if "error" in entry:
            return str(entry["error"])
        if entry["world_size"] != world_size:
            return f"rank 0 was given world size {world_size}, rank {rank} {entry['world_size']}"
        name = entry["name"]
        if name in ranks:
            return (
                f"RPC worker name {name} is not unique. Workers {rank} and {ranks[name]} share the same name."
            )
        ranks[name] = rank
    return _secret_fault(entries)


def _secret_fault(entries: list[dict[str, Any]]) -> str | None:
    holders: dict[str | None, list[int]] = {}
    for rank, entry in enumerate(entries):
        holders.setdefault(entry["secret"], []).append(rank)
    if len(holders) == 1:
        return None
    said: list[str] = []
    for secret, ranks in holders.items():
        which = "no secret" if secret is None else "another" if said else "one"
        said.append(f"rank(s) {ranks} have {which}")
    return (
        f"the workers have different secrets: {', '.join(said)}. Set TENSORCALL_SECRET or "
        "TENSORCALL_SECRET_FILE alike on all workers, or on none"
    )


def _entry(rank: int) -> str:
    return f"worker {rank}"


def _fingerprint(secret: bytes | None, job: str) -> str | None:
    """What tells secrets apart without telling them. Too short to be of use elsewhere."""
    if secret is None:
        return None
    return hmac.new(secret, f"tensorcall secret of job {job}".encode(), "sha256").hexdigest()[:16]


def _given_secret() -> bytes | None:
    secret = os.environ.get("TENSORCALL_SECRET")
    if secret:
        return secret.encode()
    path = os.environ.get("TENSORCALL_SECRET_FILE")
    if not path:
        return None
    with open(path, "rb") as file:
        content = file.read().strip()
    if not content:
        raise RuntimeError(f"the secret file {path} is empty")
    return content


def _warn_if_reachable(contact: str) -> None:
    """Say so if other hosts can reach this worker, whose secret is in the store."""
    for address in json.loads(contact)["addresses"]:
        kind, _, where = address.partition(":")
        host = where.rpartition(":")[0].strip("[]")
        if kind == "tcp" and not ipaddress.ip_address(host).is_loopback:
            _logger.warning(
                "listening on %s with a secret that is in the store: whoever can read the store can run code "
                "here; set TENSORCALL_SECRET or TENSORCALL_SECRET_FILE on all workers",
                where,
            )


def meeting_host(init_method: str) -> str | None:
    """Where the workers meet; ``None`` if that is this host, whatever it is called."""
    url = urlparse(init_method)
    return (os.environ.get("MASTER_ADDR") or None) if url.scheme == "env" else url.hostname
