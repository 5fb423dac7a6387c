"""Names that programs and torch's own tests import, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tensorcall.autograd
import tensorcall.rpc as rpc

RPC_NAMES = [
    "is_available",
    "init_rpc",
    "shutdown",
    "get_worker_info",
    "rpc_sync",
    "rpc_async",
    "remote",
    "RRef",
    "PyRRef",
    "WorkerInfo",
    "BackendType",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "TensorPipeAgent",
    "RpcAgent",
    "get_rpc_timeout",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "_init_rpc_backend",
    "_get_debug_info",
    "_rref_context_get_debug_info",
    "_is_current_rpc_agent_set",
    "_get_current_rpc_agent",
    "_enable_jit_rref_pickle",
    "_disable_jit_rref_pickle",
    "_server_process_global_profile",
    "api",
    "internal",
    "functions",
    "constants",
    "backend_registry",
    "options",
]

API_NAMES = [
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_set_and_start_rpc_agent",
    "_all_gather",
    "_barrier",
    "_wait_all",
    "_wait_all_workers",
    "_thread_local_var",
    "_use_rpc_pickler",
    "_default_pickler",
    "_ignore_rref_leak",
    "_broadcast_to_followers",
    "_delete_all_user_and_unforked_owner_rrefs",
    "get_worker_info",
    "_init_rpc_states",
    "init_rpc",
][:-1]

INTERNAL_NAMES = [
    "RPCExecMode",
    "PythonUDF",
    "_internal_rpc_pickler",
    "serialize",
    "deserialize",
    "RemoteException",
    "_build_rpc_profiling_key",
]

AUTOGRAD_NAMES = [
    "is_available",
    "context",
    "backward",
    "get_gradients",
    "_init",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "_current_context",
    "_is_valid_context",
    "_get_max_id",
    "_get_debug_info",
    "DistAutogradContext",
]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (rpc, RPC_NAMES),
        (rpc.api, API_NAMES),
        (rpc.internal, INTERNAL_NAMES),
        (tensorcall.autograd, AUTOGRAD_NAMES),
    ],
)
def test_every_name_of_torch_exists(module, names):
    assert [name for name in names if not hasattr(module, name)] == []


def test_importing_the_package_does_nothing_but_define_names():
    program = """
import os, sys, threading
before = dict(os.environ), threading.active_count(), os.listdir("/proc/self/fd")
import tensorcall
assert "torch" not in sys.modules
assert "tensorcall.rpc" not in sys.modules
assert (dict(os.environ), threading.active_count(), os.listdir("/proc/self/fd")) == before
assert callable(tensorcall.install) and tensorcall.__version__
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=30)


def test_importing_rpc_after_torch_starts_nothing():
    program = """
import os, sys, threading
import torch, torch.distributed
before = dict(os.environ), threading.active_count(), len(os.listdir("/proc/self/task"))
import tensorcall.rpc
assert (dict(os.environ), threading.active_count(), len(os.listdir("/proc/self/task"))) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


def test_rref_can_annotate_and_be_tested_for():
    assert rpc.RRef[int] is not None
    assert not isinstance(3, rpc.RRef)
    assert issubclass(rpc.RRef, rpc.PyRRef)


def test_rref_without_an_agent_says_so():
    with pytest.raises(RuntimeError, match="Current RPC agent is not set! Did you initialize the RPC"):
        rpc.RRef(3)


def test_calls_without_an_agent_say_so():
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.rpc_sync("other", min, args=(1, 2))
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.shutdown()
    with pytest.raises(RuntimeError, match="Current RPC agent is not set!"):
        rpc.get_rpc_timeout()


def test_opening_an_autograd_context_says_what_is_missing():
    with pytest.raises(RuntimeError, match="does not implement distributed autograd"):
        tensorcall.autograd.context().__enter__()
