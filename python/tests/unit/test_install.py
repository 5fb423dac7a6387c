"""Taking the place of torch.distributed.rpc, and giving it back."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorcall
import torch
import torch.distributed.rpc as torchs

HERE = Path(__file__).parent
PACKAGE = Path(tensorcall.__file__).parents[1]


@pytest.fixture
def installed():
    tensorcall.install()
    yield
    tensorcall.uninstall()


def test_imports_of_torchs_module_give_ours(installed):
    import tensorcall.rpc as ours
    import torch.distributed.rpc as rpc
    from torch.distributed.rpc import RRef, rpc_sync
    from torch.distributed.rpc.internal import _internal_rpc_pickler

    assert rpc is ours is torch.distributed.rpc
    assert rpc_sync is ours.rpc_sync
    assert RRef is ours.RRef
    assert _internal_rpc_pickler is ours.internal._internal_rpc_pickler
    for name in ("api", "internal", "constants", "functions", "backend_registry", "options", "_testing"):
        module = importlib.import_module(f"torch.distributed.rpc.{name}")
        assert module is importlib.import_module(f"tensorcall.rpc.{name}")


def test_installing_twice_and_giving_back(installed):
    tensorcall.install()
    tensorcall.uninstall()

    assert sys.modules["torch.distributed.rpc"] is torchs
    assert torch.distributed.rpc is torchs
    assert importlib.import_module("torch.distributed.rpc.api").__name__ == "torch.distributed.rpc.api"
    assert torch._C._collect_all.__module__ != "tensorcall.rpc._futures"
    tensorcall.uninstall()


def test_functions_pickle_under_one_name_with_and_without(installed):
    from tensorcall.rpc import _target
    from torch.distributed.rpc import api

    assert (
        _target.name_of(api._broadcast_to_followers, (), {}) == "tensorcall.rpc.api:_broadcast_to_followers"
    )


@pytest.mark.filterwarnings("ignore")
def test_torchscript_knows_our_rref_in_annotations(installed):
    import torch.distributed.rpc as rpc

    assert torch._jit_internal.is_rref(rpc.RRef[torch.Tensor])


def test_it_refuses_while_torchs_own_rpc_runs(monkeypatch):
    monkeypatch.setattr(torch._C._distributed_rpc, "_is_current_rpc_agent_set", lambda: True)

    with pytest.raises(RuntimeError, match="torch's own RPC is initialized"):
        tensorcall.install()

    assert torch.distributed.rpc is torchs


def test_it_cannot_be_taken_away_from_a_running_agent(installed, alone):
    with pytest.raises(RuntimeError, match="agent runs"):
        tensorcall.uninstall()


def run(*args):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "tensorcall", "run", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=50, cwd=HERE, env=environment, check=False
    )


PROGRAM = """
import os, pickle, sys
import torch.distributed.rpc as rpc

class Here:
    pass

def main():
    assert rpc.__name__ == "tensorcall.rpc", rpc
    assert isinstance(pickle.loads(pickle.dumps(Here())), Here)
    assert os.path.samefile(sys.path[0], os.path.dirname(__file__)) or __spec__ is not None
    print(__name__, os.path.basename(__file__), sys.argv[1:])

if __name__ == "__main__":
    main()
"""


def test_run_runs_a_program_that_asks_for_torchs_module(tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)

    done = run(str(tmp_path / "prog.py"), "--flag", "-m", "x")

    assert done.stdout == "__main__ prog.py ['--flag', '-m', 'x']\n", done.stderr


def test_run_runs_a_module():
    done = run("-m", "prog_module", "y")

    assert done.stdout == "__main__ prog_module.py ['y']\n", done.stderr


def test_run_says_what_it_cannot_find():
    assert "can't open 'nothing.py'" in run("nothing.py").stderr
    assert "no module 'nothing'" in run("-m", "nothing").stderr
