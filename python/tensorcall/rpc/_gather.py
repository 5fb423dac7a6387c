"""Gathering one object from each worker of a set, and giving all to each.

The worker with the smallest name leads: the others report to it, and it tells them all. The
functions that workers call on each other for that are in `api`, where they are looked up at the
moment of use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from .. import _tensorcall
from . import _agent, _call, api
from .constants import UNSET_RPC_TIMEOUT

_SLICE = 0.25
"""Seconds between two looks at who was lost, while waiting for a signal."""

_PROBE_AFTER, _PROBE_AT_MOST_EVERY = 1.0, 30.0
"""Seconds: when to ask a silent worker for a sign of life, and how rarely in a long wait."""


_VERDICT_AFTER = 1.0
"""Seconds that the agent may take to find out that a worker is lost."""


class _Signal:
    """An event whose wait lends the pool place, like every wait for other workers."""

    def __init__(self) -> None:
        self._call = _tensorcall.Call()

    def set(self) -> None:
        self._call.complete()

    def is_set(self) -> bool:
        return self._call.done()

    def wait(self, timeout: float | None = None) -> bool:
        return self._call.wait(timeout)


class AllGatherStates:
    """What one worker knows about one round of `_all_gather`."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = _Signal()


class Round:
    """One worker's part in one gathering.

    Args:
        forgiving: go on without workers that are lost, instead of raising.
    """

    def __init__(self, names: set[str], timeout: float, *, forgiving: bool) -> None:
        self.names = names
        self.leader = min(names)
        self._agent = _agent.current()
        self.me = self._agent.get_worker_info().name
        self._forgiving = forgiving
        with api._all_gather_dict_lock:
            members = " ".join(sorted(names))
            number = api._all_gather_sequence_id.get(members, 0)
            api._all_gather_sequence_id[members] = number + 1
            self.id = f"{members} {number}"
            self._states = api._all_gather_sequence_id_to_states[self.id]
        # Unset: calls get the default limit and the signal none. 0: none at all.
        self.call_timeout = api.get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
        limited = timeout not in (UNSET_RPC_TIMEOUT, 0)
        self._end = time.monotonic() + timeout if limited else None

    def run(self, obj: Any) -> dict[str, Any]:
        try:
            if self.me == self.leader:
                self._lead(obj)
            else:
                self._follow(obj)
            return self._states.gathered_objects
        finally:
            with api._all_gather_dict_lock:
                api._all_gather_sequence_id_to_states.pop(self.id, None)

    def _lead(self, obj: Any) -> None:
        api._gather_to_leader(self.id, self.me, obj, self.names)
        silent = self._wait_for(lambda: self.names - self._reported().keys())
        if silent is not None:
            raise self._timed_out(silent, "they did not report")
        failed = self._tell_all(self._reported())
        if failed:
            raise self._timed_out(failed, f"The first exception is {next(iter(failed.values()))}")

    def _reported(self) -> dict[str, Any]:
        with api._all_gather_dict_lock:
            return dict(self._states.gathered_objects)

    def _tell_all(self, objects: dict[str, Any]) -> dict[str, RuntimeError]:
        message = (self.id, objects)
        others = sorted(objects.keys() - {self.me})
        calls = {name: self._start(name, api._broadcast_to_followers, message) for name in others}
        failed: dict[str, RuntimeError] = {}
        unanswered: dict[str, RuntimeError] = {}
        for name, call in calls.items():
            call.wait(None)
            try:
                answer = call.result()
            except RuntimeError as error:
                unanswered[name] = error
                continue
            try:
                _call.decode(*answer)
            except RuntimeError as error:
                failed[name] = error
        lost = self._forgiven(set(unanswered))
        return failed | {name: error for name, error in unanswered.items() if name not in lost}

    def _follow(self, obj: Any) -> None:
        report = (self.id, self.me, obj, sorted(self.names))
        call = self._start(self.leader, api._gather_to_leader, report)
        call.wait(None)
        try:
            answer = call.result()
        except RuntimeError:
            if self._forgiven({self.leader}):
                return
            raise
        _call.decode(*answer)
        silent = self._wait_for(lambda: {self.leader})
        if silent is not None:
            raise RuntimeError(
                f"{self.me} timed out in _all_gather: no word from the leader {self.leader}, who waits for "
                f"all of {sorted(self.names)}"
            )

    def _wait_for(self, missing: Callable[[], set[str]]) -> set[str] | None:
        """Wait for the signal. Returns who is missing when time is up, else ``None``.

        Whoever stays silent for long is asked for a sign of life, since the death of a worker
        is only seen by those who have a connection to it.
        """
        begin = last = time.monotonic()
        pause = _PROBE_AFTER
        while not self._states.proceed_signal.wait(self._slice()):
            now = time.monotonic()
            silent = missing()
            lost = {name for name in silent if self._is_lost(name)}
            if lost and not self._forgiving:
                raise RuntimeError(f"{self.me} cannot finish _all_gather: lost worker(s) {sorted(lost)}")
            if silent and lost == silent:
                return None
            if self._end is not None and now >= self._end:
                return silent
            if now - last >= pause:
                last, pause = now, min(max(now - begin, pause), _PROBE_AT_MOST_EVERY)
                self._probe(silent - lost - {self.me})
        return None

    def _probe(self, names: set[str]) -> None:
        for name in names:
            call = _call.start(self._agent, name, api._sign_of_life, (), {}, 0, api._default_pickler)
            call.disregard()

    def _slice(self) -> float:
        if self._end is None:
            return _SLICE
        return min(max(self._end - time.monotonic(), 0.0), _SLICE)

    def _is_lost(self, name: str) -> bool:
        """Whether a worker died or left."""
        return self._agent.get_worker_info(name).id in self._agent.lost_workers()

    def _forgiven(self, names: set[str]) -> set[str]:
        """Those of `names`, who did not answer, that are lost and may be passed over.

        A call fails with its connection; the verdict comes after another try to connect.
        """
        end = time.monotonic() + _VERDICT_AFTER
        while self._forgiving:
            lost = {name for name in names if self._is_lost(name)}
            if lost == names or time.monotonic() >= end:
                return lost
            _Signal().wait(0.01)
        return set()

    def _start(self, to: str, function: Callable[..., None], args: tuple[Any, ...]) -> Any:
        return _call.start(self._agent, to, function, args, {}, self.call_timeout, api._default_pickler)

    def _timed_out(self, names: Iterable[str], why: str) -> RuntimeError:
        return RuntimeError(
            f"Followers {sorted(names)} timed out in _all_gather after {self.call_timeout:.2f} seconds. {why}"
        )
