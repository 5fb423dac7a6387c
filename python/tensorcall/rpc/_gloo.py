"""A group of workers over gloo, private to RPC.

What gloo does and does not do decides how it is used here (docs/adr/0019):

- A receive names its source, and is posted by one thread per source: it is one hop faster than a receive
  from any, and it fails as soon as that source dies, which a receive from any does not.
- A wait that runs out closes all connections of its group. So waits never run out, except the one in
  `abort`, which wants that.
- A pair of ranks shares one stream, where what is small would queue behind what is large. So there are
  gloo groups for each: one for what is small, and two for what is large, since one stream is often slower
  than what lies below it.
- A message longer than the memory for it ends the process. The transport above only asks for sizes that
  were announced and checked.
"""

from __future__ import annotations

import os
import re
import threading
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroupGloo, Store

from .. import _tensorcall
from . import _membership
from ._groups import ABORTED, CONTROL_TAG

_FOREVER = timedelta(days=3650)
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 2**31 - 1


class GlooGroup:
    """All ranks that meet in `store`, which nobody else uses.

    Args:
        store: where the ranks find each other's addresses. All of them are there already.
        rank: of this worker.
        size: how many ranks there are.
        limit: how long finding each other may take.
        device: what the connections are made on.
    """

    any_source = False

    def __init__(self, store: Store, rank: int, size: int, limit: timedelta, device: Any) -> None:
        self.rank = rank
        self.size = size
        self._aborted = threading.Event()
        lanes = ("small", "large", "large too") if size > 1 else ()  # alone, nothing is ever sent
        self._lanes = [_make(PrefixStore(lane, store), rank, size, limit, device) for lane in lanes]

    def send(self, memory: Any, to: int, tag: int) -> None:
        """Return when `to` has taken the message, or raise because it is lost."""
        self._run(lambda lane, tensor: lane.send([tensor], to, tag), memory, tag)

    def receive(self, memory: Any, source: int, tag: int) -> int:
        """Return when a message of `source` is in `memory`, or raise because it is lost."""
        self._run(lambda lane, tensor: lane.recv([tensor], source, tag), memory, tag)
        return source

    def _run(self, start: Any, memory: Any, tag: int) -> None:
        if self._aborted.is_set():
            raise ConnectionError(ABORTED)
        small, *large = self._lanes
        lane = small if tag == CONTROL_TAG else large[tag % len(large)]
        try:
            start(lane, torch.frombuffer(memory, dtype=torch.uint8)).wait(_FOREVER)
        except RuntimeError as error:
            raise ConnectionError(ABORTED if self._aborted.is_set() else _said(error)) from None

    def all_gather(self, data: bytes, limit: timedelta) -> list[bytes]:
        """What each rank gives, by rank.

        Raises:
            RuntimeError: a rank is lost, or not all came within `limit`. The group is of no use then.
        """
        lengths = self._gather_equal(len(data).to_bytes(8, "little"), limit)
        longest = max(int.from_bytes(length, "little") for length in lengths)
        found = self._gather_equal(data.ljust(longest, b"\0"), limit)
        return [item[: int.from_bytes(length, "little")] for item, length in zip(found, lengths, strict=True)]

    def _gather_equal(self, data: bytes, limit: timedelta) -> list[bytes]:
        if not self._lanes or not data:
            return [data] * self.size
        found = [bytearray(len(data)) for _ in range(self.size)]
        mine, *tensors = (torch.frombuffer(each, dtype=torch.uint8) for each in (bytearray(data), *found))
        options = AllgatherOptions()
        options.timeout = limit
        try:
            self._lanes[0].allgather([tensors], [mine], options).wait(limit)
        except RuntimeError as error:
            raise RuntimeError(_said(error)) from None
        return [bytes(each) for each in found]

    def abort(self) -> None:
        """Close all connections: whoever is blocked in a method of this group raises soon."""
        self._aborted.set()
        for lane in self._lanes:
            any(_runs_out(lane, other) for other in range(self.size) if other != self.rank)

    def close(self, is_quiet: bool) -> None:
        """The group is no longer needed."""
        self.abort()


def _runs_out(lane: Any, other: int) -> bool:
    """Let a wait for a rank run out, which closes all connections. One that is closed fails before that."""
    try:
        lane.recv([torch.empty(1, dtype=torch.uint8)], other, _UNUSED_TAG).wait(_AT_ONCE)
    except RuntimeError as error:
        return "Timed out" in str(error)
    return False


def device_of(init_method: str | None) -> Any:
    """What gloo's connections are made on: the address that the other transports would listen on.

    Args:
        init_method: where the workers meet; ``None`` leaves the choice to torch, as for its own groups.
    """
    if init_method is None or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_default_device()
    address, _ = _tensorcall.listening(_membership.meeting_host(init_method))
    return ProcessGroupGloo.create_device(hostname=address)


def _make(store: Store, rank: int, size: int, limit: timedelta, device: Any) -> Any:
    backend: Any = ProcessGroupGloo
    options = backend._Options()
    options._devices = [device]
    options._threads = 1
    options._timeout = limit
    try:
        return backend(store, rank, size, options)
    except RuntimeError as error:
        raise RuntimeError(f"gloo could not connect the {size} workers: {_said(error)}") from None


def _said(error: Exception) -> str:
    """What gloo says, without where in its source it says it and whom to ask."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition("\n")[0]
    return text.partition(". This is typically")[0]
