"""Tensors on other devices than the CPU: device maps, and the copies by which tensors travel.

A tensor on a device travels through main memory, and the message says on which device of the receiver
it is to be: that which the caller's device map names, and for results that which the map leads from.
The copies are made on streams of our own: they wait for what the current stream was given before, and
what it is given after their arrival waits for them; the streams of the program are never waited for
by the host as a whole.

Every worker tells the others its maps when it joins, and the group checks all of them together.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _tensorcall
from .options import AgentOptions

Map = dict[torch.device, torch.device]
Maps = Mapping[str, Mapping[torch.device, torch.device]]
Plain = dict[str, dict[str, str]]
"""The maps of a worker by callee, as text."""

_CPU = torch.device("cpu")

Entry = dict[str, Any]
"""What a worker tells the others, ready for JSON: how many devices it has, its maps, and the devices that
it lists."""


def entry_of(options: AgentOptions) -> Entry:
    """What a worker with these options tells the others."""
    return {
        "count": torch.cuda.device_count(),
        "maps": to_plain(options.device_maps),
        "devices": [str(device) for device in options.devices],
    }


def to_plain(maps: Maps) -> Plain:
    """Maps as text."""
    return {to: {str(s): str(t) for s, t in map_.items()} for to, map_ in maps.items()}


def fault(entries: Mapping[str, Entry], static: bool = True) -> str | None:
    """What is wrong with the maps of a group, by the names of its workers; the first thing found."""
    devices = {name: [torch.device(d) for d in entry["devices"]] for name, entry in entries.items()}
    counts = {name: entry["count"] for name, entry in entries.items()}
    for name in entries:
        if len(set(devices[name])) != len(devices[name]):
            return f"Node {name} has duplicated devices\ndevices = {devices[name]}"
        if not _exist(devices[name], counts[name]):
            return (
                f"Node {name} has devices with invalid indices\n"
                f"devices = {devices[name]}\ndevice count = {counts[name]}"
            )
    for name, entry in entries.items():
        maps = _of_plain(entry["maps"])
        if static and not maps.keys() <= entries.keys():
            return (
                f"Node {name} has invalid target node names in its device maps\n"
                f"device maps = {maps}\nnode names = {list(entries)}"
            )
        for to, map_ in maps.items():
            found = _fault_of_map(name, to, map_, devices, counts)
            if found is not None:
                return found
    return None


def _fault_of_map(
    name: str, to: str, map_: Map, devices: dict[str, list[torch.device]], counts: dict[str, int]
) -> str | None:
    where = f"in its device map for {to}\ndevice map = {map_}"
    if len(set(map_.values())) != len(map_):
        return f"Node {name} has duplicated target devices {where}"
    for side, worker, used in (("source", name, map_.keys()), ("target", to, map_.values())):
        if worker not in counts:
            continue
        listed = devices[worker]
        if listed and not set(used) <= {*listed, _CPU}:
            return f"Node {name} has unexpected {side} devices {where}\ndevices = {listed}"
        if not _exist(used, counts[worker]):
            return (
                f"Node {name} has {side} devices with invalid indices {where}\n"
                f"device count = {counts[worker]}"
            )
    return None


def _exist(devices: Iterable[torch.device], count: int) -> bool:
    return all(device.type == "cpu" or (device.index or 0) < count for device in devices)


def _of_plain(maps: Plain) -> dict[str, Map]:
    return {to: {torch.device(s): torch.device(t) for s, t in map_.items()} for to, map_ in maps.items()}


class Directory:
    """The device maps of a group, as one worker needs them.

    Args:
        me: the name of this worker.
        options: its options, which are looked at anew each time.
    """

    def __init__(self, me: str, options: AgentOptions) -> None:
        self._me = me
        self._options = options
        self._names: dict[int, str] = {}
        self._back: dict[int, Map] = {}
        self.cuda: list[torch.device] = []
        """The devices on which requests run."""

    def learn(self, rank: int, name: str, maps: Plain) -> None:
        """A worker of the group, perhaps this one, has these maps."""
        to_me = _of_plain(maps).get(self._me, {})
        self._names[rank] = name
        self._back[rank] = {target: source for source, target in to_me.items()}
        self.cuda = [device for device in self.own() if device.type == "cuda"]
        if self._back[rank].get(_CPU, _CPU) != _CPU:
            _tensorcall.place_tensors(True)

    def moves_arguments(self, to: str) -> bool:
        """Whether arguments in main memory go to another device there."""
        return self._options.device_maps.get(to, {}).get(_CPU, _CPU) != _CPU

    def requests(self, to: str) -> Placement:
        """Where arguments for a worker go."""
        return Placement(self._options.device_maps.get(to, {}), "Request", to)

    def requests_of(self, rank: int) -> Placement:
        """As :meth:`requests`, for the worker of this rank."""
        return self.requests(self._names.get(rank, f"of rank {rank}"))

    def responses(self, caller: int) -> Placement:
        """Where results for the worker of this rank go."""
        name = self._names.get(caller, f"of rank {caller}")
        return Placement(self._back.get(caller, {}), "Response", name)

    def own(self) -> list[torch.device]:
        """The devices that calls may use here: those listed, or else those in any map."""
        used = {device for back in self._back.values() for device in back}
        used |= {device for map_ in self._options.device_maps.values() for device in map_}
        listed = self._options.devices or sorted((d for d in used if d != _CPU), key=str)
        return list(listed)


class Placement:
    """Where the tensors of a message go.

    Args:
        map_: where a tensor on one of our devices goes there.
        what: what kind of message it is, for errors.
        destination: the name of the receiver.
    """

    def __init__(self, map_: Map, what: str, destination: str) -> None:
        self._map = map_
        self._what = what
        self._destination = destination

    def stage(self, tensors: list[torch.Tensor]) -> list[Any]:
        """The tensors in main memory, those that go to other devices in pairs with the names of these.

        Raises:
            RuntimeError: a tensor is on a device for which there is no place.
        """
        if all(tensor.is_cpu for tensor in tensors) and self._map.get(_CPU, _CPU) == _CPU:
            return tensors
        places = [self._place(tensor) for tensor in tensors]
        copies = _Copies()
        staged = [tensor if tensor.is_cpu else copies.to_host(tensor) for tensor in tensors]
        copies.wait()
        return list(zip(staged, places, strict=True))

    def _place(self, tensor: torch.Tensor) -> str:
        place = self._map.get(tensor.device, _CPU if tensor.is_cpu else None)
        if place is None:
            raise RuntimeError(
                "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to "
                "CPU before sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` "
                f"to explicitly configure device mapping. {self._what} device mapping is not available for "
                f"destination {self._destination}, but found tensor on device: {tensor.device}"
            )
        return str(place)


class _Copies:
    """Copies to main memory under way."""

    def __init__(self) -> None:
        self._done: list[Any] = []

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory, there after :meth:`wait`."""
        if tensor.device.type != "cuda":
            return tensor.detach().to("cpu").requires_grad_(tensor.requires_grad)
        stream = _stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        _served.hold(tensor.device, stream)
        with torch.cuda.stream(stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
            host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(stream)
            self._done.append(stream.record_event())
        return host.requires_grad_(tensor.requires_grad)

    def wait(self) -> None:
        """Return when all copies are there."""
        for event in self._done:
            event.synchronize()


def arrive(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """A received tensor on the device that its message names; called by the extension."""
    device = torch.device(place)
    if device.type != "cuda":
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)
    stream = _stream(device)
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        there = tensor.detach().to(device, non_blocking=True)
    current.wait_stream(stream)
    there.record_stream(current)
    return there.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def serving(devices: Sequence[torch.device]) -> Iterator[None]:
    """In the block, a request of another worker runs on streams of its own."""
    streams = [_new_stream(device) for device in devices]
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
    for device, stream in zip(devices, streams, strict=True):
        _served.put(device, stream.record_event())


class _Served:
    """Requests whose work on a device may still be under way: copies of their results wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[torch.device, list[Any]] = {}

    def put(self, device: torch.device, event: Any) -> None:
        """A request has given all its work to the device."""
        with self._lock:
            under_way = [event for event in self._events.get(device, []) if not event.query()]
            self._events[device] = [*under_way, event]

    def hold(self, device: torch.device, stream: Any) -> None:
        """Let `stream` go on only after what is under way."""
        with self._lock:
            for event in self._events.get(device, []):
                stream.wait_event(event)


_served = _Served()
_streams: dict[torch.device, Any] = {}
_streams_lock = threading.Lock()


def _stream(device: torch.device) -> Any:
    """The stream on which tensors of a device are copied."""
    with _streams_lock:
        if device not in _streams:
            _streams[device] = _new_stream(device)
        return _streams[device]


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
