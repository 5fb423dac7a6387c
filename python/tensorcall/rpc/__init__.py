"""The interface of ``torch.distributed.rpc``: call functions on other workers.

rpc.init_rpc("worker1", rank=1, world_size=2)
result = rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 3))
rpc.shutdown()
"""

from __future__ import annotations

import collections
import logging
import numbers
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import ParseResult, urlparse

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import _rendezvous_helper, rendezvous

from ..autograd import _reducers
from . import _fork, _futures, _groups, _membership, _profiling, _scripts
from . import api as api
from . import backend_registry as backend_registry
from . import constants as constants
from . import functions as functions
from . import internal as internal
from . import options as options
from . import rref_proxy as rref_proxy
from ._agent import ProcessGroupAgent, RpcAgent, TensorPipeAgent
from ._autograd import autograd as _autograd
from ._named import function
from ._rref import PyRRef
from ._waiting import interruptible, until_listening
from ._worker import WorkerInfo
from .api import (
    RRef,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _require_initialized,
    _rref_context_get_debug_info,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from .api import _set_rpc_timeout as _set_rpc_timeout
from .backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from .options import ProcessGroupRpcBackendOptions, RpcBackendOptions, TensorPipeRpcBackendOptions
from .server_process_global_profiler import (
    _server_process_global_profile as _server_process_global_profile,
)

__all__ = [
    "BackendType",
    "BackendValue",
    "ProcessGroupAgent",
    "ProcessGroupRpcBackendOptions",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registered",
    "construct_rpc_backend_options",
    "enable_gil_profiling",
    "function",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_logger = logging.getLogger("tensorcall")

BackendType: Any
"""The backends there are: always the registry's current enum."""

_init_counts: collections.Counter[str] = collections.Counter()
"""How often this process, or one that it was forked from, has joined a group at each place."""
_init_counts_lock = threading.Lock()
_GRACE = 1.0
"""Seconds that a store may take to notice its own limit."""
_EARLY = 10.0
"""Seconds that a worker may come before the host of the store and still be there right after it."""
_rendezvous: list[Iterator[Any]] = []
"""Kept for ever: a store goes away with the iterator that made it, and others may still need it."""


def is_available() -> bool:
    """Whether RPC can be used: it can, but not in TorchScript."""
    return not (_scripts.refusing and _scripts.is_compiling(1))


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join the group as worker `name`; afterwards every worker can be called.

    Args:
        name: unique in the group; letters, digits, ``-``, ``_`` and ``:``.
        backend: a member of `BackendType`, by default the one that fits the options.
        rank: from 0 to ``world_size - 1``, unique in the group.
        world_size: how many workers there are. Without it the group is dynamic: workers join and leave at
            any time, and `rank` has to be given. A process group knows its size and ranks.
        rpc_backend_options: by default those of the backend, ``TensorPipeRpcBackendOptions()``.

    Raises:
        TypeError: a backend or options of the wrong type.
        ValueError: a rank outside of the group, or a rendezvous that lacks something.
        RuntimeError: RPC is initialized already, a name is not unique, or somebody did not come
            within the RPC timeout. No agent is set then.
    """
    backend, chosen = _choose_backend(backend, rpc_backend_options)
    _check_rank(rank, world_size)
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    _futures.patch()
    _profiling.patch()
    _reducers.patch()
    store, rank, world_size = _meet(backend, chosen, rank, world_size)
    _autograd()._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, chosen)


def _choose_backend(backend: Any, given: Any) -> tuple[Any, Any]:
    if backend is not None and not backend_registry.is_backend(backend):
        raise TypeError("Argument backend must be a member of BackendType")
    if given is not None and not isinstance(given, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    default = backend_registry.BackendType.TENSORPIPE
    if backend is None and given is not None:
        backend = _infer_backend(given)
        if backend.name != default.name:
            _logger.warning(
                "init_rpc takes the backend %r from the options; pass backend= to be explicit", backend
            )
    if backend is None:
        backend = default
    if given is None:
        given = backend_registry.construct_rpc_backend_options(backend)
    return backend, given


def _infer_backend(given: RpcBackendOptions) -> Any:
    kinds = {
        candidate: type(backend_registry.construct_rpc_backend_options(candidate))
        for candidate in backend_registry.BackendType
    }
    for candidate, kind in kinds.items():
        if type(given) is kind:
            return candidate
    for candidate, kind in kinds.items():
        if isinstance(given, kind):
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _check_rank(rank: Any, world_size: Any) -> None:
    """Find what cannot work before waiting for anybody. -1 stands for a rank given elsewhere."""
    if not isinstance(rank, numbers.Integral):
        raise _wrong_type(rank, numbers.Integral)
    if world_size is not None and not isinstance(world_size, numbers.Integral):
        raise _wrong_type(world_size, (numbers.Integral, type(None)))
    if world_size is None:
        return
    number, size = int(rank), int(world_size)
    if size < 0:
        raise ValueError(f"world_size must not be negative, got {size}")
    if size and number != -1 and not 0 <= number < size:
        raise ValueError(f"rank must be from 0 to world_size - 1: got rank {rank} with world_size {size}")


def _meet(backend: Any, chosen: Any, rank: int, world_size: int | None) -> tuple[Store, int, int | None]:
    """Let c10d find the store; also what rank and size its URL or environment, or a process group, give."""
    if _groups.takes_group(backend.name):
        group = _groups.choose(chosen, rank, world_size)
        if group is not None:
            return _groups.store_of(group), *_groups.place_of(group)
        world_size = world_size or _groups.size_of_environment(chosen.init_method)
    deadline = _membership.Deadline.of_rendezvous(chosen.rpc_timeout)
    store, rank, size = _find_store(chosen.init_method, rank, world_size, deadline)
    store.set_timeout(deadline.left())
    if world_size:
        world_size = size
        _check_rank(rank, world_size)
    place = _place(chosen.init_method)
    with _init_counts_lock:
        counted = PrefixStore(f"rpc_prefix_{_init_counts[place]}", store)
        _init_counts[place] += 1
    if world_size:
        return counted, rank, world_size
    # Members of a dynamic group come and go, each as often as it likes: they meet in one place.
    _membership.mark_dynamic(counted)
    return PrefixStore("rpc_dynamic", store), rank, world_size


def _find_store(
    init_method: str, rank: int, world_size: int | None, deadline: _membership.Deadline
) -> tuple[Store, int, int]:
    url = urlparse(init_method)
    host = _host(url) if rank > 0 else None

    def find() -> Any:
        if host:
            until_listening(*host, min(_EARLY, deadline.seconds / 2 or _EARLY))
        meeting = _begin_meeting(init_method, rank, world_size, deadline.left())
        _rendezvous.append(meeting)
        return next(meeting)

    late = deadline.seconds + _GRACE if deadline.seconds else None
    try:
        store, rank, size = interruptible(find, late)
    except TimeoutError:
        text = (
            f"what listens at {_place(init_method)} takes connections, but did not answer for {late:g} s as "
            "the store does where the workers meet"
        )
        raise RuntimeError(text) from None
    return store, rank, world_size if world_size and size == -1 else size


def _begin_meeting(init_method: str, rank: int, world_size: int | None, timeout: timedelta) -> Any:
    url = urlparse(init_method)
    if not world_size:
        return _rendezvous_helper(init_method, rank, None, timeout=timeout)
    if url.scheme in ("env", "tcp") and rank >= 0 and "rank=" not in url.query:
        # A store that is told of no size waits for nobody. We do, and say who did not come.
        query = "&".join(filter(None, (url.query, f"rank={rank}", "world_size=-1")))
        return rendezvous(url._replace(query=query).geturl(), timeout=timeout)
    return rendezvous(init_method, rank=rank, world_size=world_size, timeout=timeout)


def _host(url: ParseResult) -> tuple[str, int] | None:
    """Where somebody listens who hosts the store; ``None`` if that is not said, or not here."""
    with suppress(ValueError):
        if url.scheme == "env":
            address, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", ""))
        elif url.scheme == "tcp":
            address, port = url.hostname, url.port or 0
        else:
            return None
        return (address, port) if address and port else None
    return None


def _place(init_method: str) -> str:
    """Names the store that an URL leads to, whichever rank's URL it is."""
    url = urlparse(init_method)
    if url.scheme == "env":
        return ":".join(os.environ.get(f"MASTER_{key}", "") for key in ("ADDR", "PORT"))
    return url.netloc or url.path


@_fork.in_child
def _leave_stores_alone() -> Any:
    # Letting go of a store would end its server, by a descriptor that the child shares with its parent.
    global _init_counts_lock, _rendezvous
    _init_counts_lock = threading.Lock()
    inherited, _rendezvous = _rendezvous, []
    return inherited


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: Any = -1,
    world_size: Any = None,
    rpc_backend_options: Any = None,
) -> None:
    if backend is None:
        backend = backend_registry.BackendType.TENSORPIPE
    if not backend_registry.is_backend(backend):
        raise _wrong_type(backend, backend_registry.BackendType)
    expected: list[tuple[Any, Any]] = [
        (store, Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ]
    for argument, types in expected:
        if not isinstance(argument, types):
            raise _wrong_type(argument, types)
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


def _wrong_type(argument: object, expected: object) -> RuntimeError:
    return RuntimeError(f"Argument {argument} must be of type {expected} but got type {type(argument)}")


@_require_initialized
def _get_debug_info() -> dict[str, str]:
    """Figures about references, the agent and autograd."""
    info = dict(_rref_context_get_debug_info())
    info.update(_get_current_rpc_agent().get_debug_info())
    info.update(_autograd()._get_debug_info())
    return info


def _enable_jit_rref_pickle() -> None:
    """Nothing: RRefs of ours cannot be passed to scripts, which so have none to pickle."""


def _disable_jit_rref_pickle() -> None:
    """Nothing, as `_enable_jit_rref_pickle`."""


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "BackendType":
            return backend_registry.BackendType
        if name in ("_all_gather", "_barrier", "_wait_all", "_wait_all_workers"):
            return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
