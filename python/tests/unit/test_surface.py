"""What importing gives and costs, and what is said before there is an agent.

The names, public and private, that others use are compared with torch's in `test_compatibility.py`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import tensorcall.rpc as rpc


@pytest.mark.parametrize("name", ["api", "backend_registry", "constants", "functions", "internal", "options"])
def test_submodules_are_there_without_being_imported(name):
    assert getattr(rpc, name).__name__ == f"tensorcall.rpc.{name}"


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
