"""Registers the backend FAULTY_TENSORPIPE."""

from __future__ import annotations

from typing import Any

from .. import backend_registry
from ..constants import DEFAULT_NUM_WORKER_THREADS
from . import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions


def _construct_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: Any = (),
    messages_to_delay: Any = None,
    num_fail_sends: int = 0,
    **_unknown: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads=num_worker_threads,
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        messages_to_fail=messages_to_fail,
        messages_to_delay=messages_to_delay,
        num_fail_sends=num_fail_sends,
    )


def _init_backend(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> FaultyTensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    agent: FaultyTensorPipeAgent = backend_registry._join(
        store, name, rank, world_size, rpc_backend_options, FaultyTensorPipeAgent
    )
    return agent


backend_registry.register_backend("FAULTY_TENSORPIPE", _construct_options, _init_backend)
