"""Which kinds of agent there are.

`BackendType` is an enum whose values are pairs of handlers: one makes options, one makes an
agent. Registering a backend makes a new enum with one more member. Members of earlier enums
stay valid: they are recognised by their name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from .constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_SEND_RECV_THREADS,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from .options import ProcessGroupRpcBackendOptions, RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The two handlers of a backend."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Backend(enum.Enum):
    """What every generation of `BackendType` derives from."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def _make_enum(members: list[tuple[str, BackendValue]]) -> Any:
    make: Any = _Backend
    return make("BackendType", members, module=__name__)


BackendType: Any = _make_enum([])


def is_backend(value: object) -> bool:
    """Whether `value` is a backend, of this or an earlier `BackendType`."""
    return isinstance(value, _Backend) and backend_registered(value.name)


def backend_registered(backend_name: str) -> bool:
    """Whether a backend of that name is registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend and return its member of the new `BackendType`.

    Args:
        backend_name: unique; becomes the member's name.
        construct_rpc_backend_options_handler: called with ``rpc_timeout``, ``init_method`` and
            whatever else the user gave, all by keyword; returns options.
        init_backend_handler: called with ``store``, ``name``, ``rank``, ``world_size`` and
            ``rpc_backend_options``, all by keyword; returns an agent.

    Raises:
        RuntimeError: the name is taken.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = [(member.name, member.value) for member in BackendType]
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_enum([*members, (backend_name, value)])
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Make options for `backend`; unknown keywords are the handler's business."""
    make = backend.value.construct_rpc_backend_options_handler
    return make(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Make an agent of `backend`."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    _transports: list[str] | None = None,
    _channels: list[str] | None = None,
    **_unknown: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> Any:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    return _join(store, name, rank, world_size, rpc_backend_options)


def _join(store: Any, name: str, rank: int, world_size: int | None, options: Any, kind: Any = None) -> Any:
    # Here, since a join needs the API, and the API this registry.
    from . import _agent, _dynamic, _groups, _membership

    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if _groups.is_wanted():
        return _join_group(store, name, rank, world_size, options, kind)
    kind = kind or _agent.TensorPipeAgent
    if not world_size:
        return _dynamic.join(store, name, rank, options, kind)
    return _membership.join(store, name, rank, world_size, options, kind)


def _join_group(
    store: Any, name: str, rank: int, world_size: int | None, options: Any, kind: Any = None
) -> Any:
    from . import _group_membership

    return _group_membership.join(store, name, rank, world_size, options, kind)


def _process_group_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_send_recv_threads: int = DEFAULT_NUM_SEND_RECV_THREADS,
    process_group: Any = None,
    **_unknown: Any,
) -> ProcessGroupRpcBackendOptions:
    return ProcessGroupRpcBackendOptions(num_send_recv_threads, rpc_timeout, init_method, process_group)


def _process_group_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> Any:
    if not isinstance(rpc_backend_options, ProcessGroupRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `ProcessGroupRpcBackendOptions`. {rpc_backend_options}"
        )
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    return _join_group(store, name, rank, world_size, rpc_backend_options)


register_backend(
    "PROCESS_GROUP",
    _process_group_construct_rpc_backend_options_handler,
    _process_group_init_backend_handler,
)
register_backend(
    "TENSORPIPE",
    _tensorpipe_construct_rpc_backend_options_handler,
    _tensorpipe_init_backend_handler,
)
