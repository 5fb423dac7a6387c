"""What the user can choose when a worker joins."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from .constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_SEND_RECV_THREADS,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)

__all__ = ["ProcessGroupRpcBackendOptions", "TensorPipeRpcBackendOptions"]

DeviceType = int | str | torch.device

# TensorPipe's names. Programs pass them to torch; here they are checked and have no effect.
_TRANSPORTS = frozenset({"ibv", "shm", "uv"})
_CHANNELS = frozenset({"basic", "cma", "cuda_basic", "cuda_gdr", "cuda_ipc", "cuda_xth", "mpt_uv", "xth"})


class RpcBackendOptions:
    """Options that every backend has.

    Args:
        rpc_timeout: seconds a call may take by default; 0 means no limit.
        init_method: URL of the rendezvous, as for ``init_process_group``.

    Raises:
        RuntimeError: the timeout is negative.
        TypeError: the timeout is not a number.
    """

    _rpc_timeout: float
    _init_method: str

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method

    @property
    def rpc_timeout(self) -> float:
        """Seconds a call may take by default; 0 means no limit."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self._rpc_timeout = _seconds(self, seconds)

    @property
    def init_method(self) -> str:
        """URL of the rendezvous."""
        return self._init_method

    @init_method.setter
    def init_method(self, url: str) -> None:
        if not isinstance(url, str):
            raise _incompatible(self, f"init_method must be a str, not {url!r}")
        self._init_method = url


class AgentOptions(RpcBackendOptions):
    """Options that every backend of ours has, whatever carries its messages."""

    _threads: int
    _pieces: int = DEFAULT_NUM_SEND_RECV_THREADS
    _device_maps: dict[str, dict[torch.device, torch.device]]
    _devices: list[torch.device]

    @property
    def num_worker_threads(self) -> int:
        """User functions that may be at work at once; a function waiting for an RPC is not."""
        return self._threads

    @num_worker_threads.setter
    def num_worker_threads(self, count: Any) -> None:
        self._threads = _count(self, "num_worker_threads", count)

    @property
    def device_maps(self) -> dict[str, dict[torch.device, torch.device]]:
        """For each callee, where a tensor on one of our devices goes there."""
        return self._device_maps

    @property
    def devices(self) -> list[torch.device]:
        """The local devices that calls may use."""
        return self._devices

    @devices.setter
    def devices(self, devices: Sequence[DeviceType]) -> None:
        self._devices = [_cuda_device(device) for device in devices]

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Add entries to the device map for callee `to`.

        Raises:
            ValueError: the map sends two devices to one, or gives a known device a new target.
        """
        added = _one_to_one(device_map)
        known = self._device_maps.get(to, {})
        for source, target in added.items():
            if source in known and known[source] != target:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying to map "
                    f"{source} to {target} and {known[source]}"
                )
        self._device_maps[to] = known | added

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Choose the local devices that calls may use."""
        self._devices = [_cuda_device(device) for device in devices]

    def _faults(self) -> Any:
        """What is to go wrong with messages, in tests."""
        return None


class TensorPipeRpcBackendOptions(AgentOptions):
    """Options of the default backend. All arguments are keyword only.

    Args:
        num_worker_threads: user functions that may be at work at once on this worker.
        rpc_timeout: seconds a call may take by default; 0 means no limit.
        init_method: URL of the rendezvous, as for ``init_process_group``.
        device_maps: for each callee, where a tensor on one of our devices goes there.
        devices: the local devices that calls may use; by default those in the device maps.

    Raises:
        RuntimeError: no worker threads, a negative timeout, or an unknown transport or channel.
        TypeError: an argument of the wrong type.
        ValueError: a device map that is not one to one.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self._device_maps = {to: _one_to_one(map_) for to, map_ in (device_maps or {}).items()}
        self._devices = [_cuda_device(device) for device in devices or ()]
        self._transports = _known("transport", _transports, _TRANSPORTS)
        self._channels = _known("channel", _channels, _CHANNELS)


class ProcessGroupRpcBackendOptions(AgentOptions):
    """Options of the backend that sends its messages through a process group.

    Args:
        num_send_recv_threads: pieces of large tensors that may be under way at once to one worker, and
            from one. As many user functions may be at work at once, if that is more than 16.
        rpc_timeout: seconds a call may take by default; 0 means no limit. A ``timedelta`` will do, as in
            torch 1.5.
        init_method: URL of the rendezvous, where no group is given and ``torch.distributed`` has none.
        process_group: over whose ranks to work: one of ``torch.distributed``, or a communicator of
            ``mpi4py``. A private one is made from it; nothing is sent on this one.

    Raises:
        RuntimeError: no threads, or a negative timeout.
        TypeError: an argument of the wrong type.
    """

    def __init__(
        self,
        num_send_recv_threads: int = DEFAULT_NUM_SEND_RECV_THREADS,
        rpc_timeout: float | timedelta = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        process_group: Any = None,
    ) -> None:
        if isinstance(rpc_timeout, timedelta):
            rpc_timeout = rpc_timeout.total_seconds()
        super().__init__(rpc_timeout, init_method)
        self.num_send_recv_threads = num_send_recv_threads
        self.process_group = process_group
        self._device_maps, self._devices = {}, []

    @property
    def num_send_recv_threads(self) -> int:
        """Pieces of large tensors that may be under way at once to one worker, and from one."""
        return self._pieces

    @num_send_recv_threads.setter
    def num_send_recv_threads(self, count: Any) -> None:
        self._pieces = _count(self, "num_send_recv_threads", count)
        self._threads = max(self._pieces, DEFAULT_NUM_WORKER_THREADS)


def _count(options: object, what: str, count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, numbers.Integral):
        raise _incompatible(options, f"{what} must be an int, not {count!r}")
    if count < 1:
        raise RuntimeError(f"{what} must be positive, got {count}")
    return int(count)


def _seconds(options: object, seconds: object) -> float:
    if not isinstance(seconds, numbers.Real):
        raise _incompatible(options, f"rpc_timeout must be a number of seconds, not {seconds!r}")
    if seconds < 0:
        raise RuntimeError(f"RPC Timeout must be non-negative, got {seconds}")
    return float(seconds)


def _incompatible(options: object, why: str) -> TypeError:
    return TypeError(f"{type(options).__name__}(): incompatible constructor arguments: {why}")


def _known(what: str, given: Sequence[str] | None, names: frozenset[str]) -> list[str] | None:
    for name in given or ():
        if name not in names:
            raise RuntimeError(f"Unknown {what}: {name}")
    return None if given is None else list(given)


def _cuda_device(given: DeviceType) -> torch.device:
    device = torch.device(given)
    if device.type != "cuda":
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {device.type}.")
    return device


def _one_to_one(device_map: Mapping[DeviceType, DeviceType]) -> dict[torch.device, torch.device]:
    full: dict[torch.device, torch.device] = {}
    sources: dict[torch.device, torch.device] = {}
    for key, value in device_map.items():
        source, target = torch.device(key), torch.device(value)
        if target in sources:
            raise ValueError(
                "`device_map` only supports 1-to-1 mapping, trying to map "
                f"{source} and {sources[target]} to {target}"
            )
        full[source] = target
        sources[target] = source
    return full
