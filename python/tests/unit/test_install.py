"""Taking the place of torch.distributed.rpc, and giving it back."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import types
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


def test_installing_twice_changes_nothing_more(installed):
    before = state()

    tensorcall.install()

    assert state() == before


def state():
    """Everything that installing touches, by the identities of objects."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != "tensorcall"}
    theirs = [module for module in (*modules.values(), *HELD) if isinstance(module, types.ModuleType)]
    names = {
        (id(module), key): id(value)
        for module in theirs
        for key, value in types.ModuleType.__getattribute__(module, "__dict__").items()
        if module is not sys
    }
    functions = [value for module in HELD for value in vars(module).values() if inspect.isfunction(value)]
    codes = {id(function): id(function.__code__) for function in functions}
    makers = {id(kind): id(vars(kind).get("__init__")) for kind in CLASSES}
    return (
        {name: id(module) for name, module in modules.items()},
        names,
        codes,
        makers,
        [type(module) for module in HELD],
        [id(finder) for finder in sys.meta_path],
    )


HELD = [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed.rpc")]
CLASSES = (
    torch._C._distributed_rpc.PyRRef,
    torch._C._distributed_rpc.WorkerInfo,
    torchs.RRef,
    torchs.TensorPipeRpcBackendOptions,
)


def test_uninstalling_puts_everything_back():
    tensorcall.uninstall()
    before = state()

    tensorcall.install()
    import torch.distributed.rpc._testing

    assert "tensorcall" in repr(sys.modules["torch.distributed.rpc._testing"])
    assert state() != before
    tensorcall.uninstall()

    assert state() == before
    assert sys.modules["torch.distributed.rpc"] is torchs is torch.distributed.rpc
    assert importlib.import_module("torch.distributed.rpc.api").__name__ == "torch.distributed.rpc.api"
    assert torch._C._collect_all.__module__ != "tensorcall.rpc._futures"
    tensorcall.uninstall()


def test_what_others_replaced_meanwhile_stays(monkeypatch):
    other = types.ModuleType("user_module")
    other.rpc_sync, other.remote = torchs.rpc_sync, torchs.remote
    remote = other.remote
    monkeypatch.setitem(sys.modules, "user_module", other)

    tensorcall.install()
    other.rpc_sync = mine = object()
    tensorcall.uninstall()

    assert other.rpc_sync is mine
    assert other.remote is remote


def test_names_that_modules_took_are_ours(monkeypatch, caplog):
    other = types.ModuleType("user_module")
    other.rpc, other.api, other.call, other.Info = torchs, torchs.api, torchs.rpc_sync, torchs.WorkerInfo
    other.number = torchs.constants.DEFAULT_RPC_TIMEOUT_SEC
    monkeypatch.setitem(sys.modules, "user_module", other)

    with caplog.at_level("DEBUG", logger="tensorcall"):
        tensorcall.install()
    try:
        ours = tensorcall.rpc
        assert (other.rpc, other.api, other.call) == (ours, ours.api, ours.rpc_sync)
        assert other.Info is ours.WorkerInfo
        assert torch.nn.parallel.distributed.RRef is ours.RRef
        assert torch._jit_internal.PyRRef is torch._C._distributed_rpc.PyRRef is ours.PyRRef
        assert "user_module.call is now tensorcall's" in caplog.messages
        assert not torch._C._distributed_rpc._is_current_rpc_agent_set()
    finally:
        tensorcall.uninstall()

    assert other.call is torchs.rpc_sync


class Kept:
    """What no scan of modules finds."""

    def __init__(self):
        self.module, self.api = torchs, torchs.api
        self.sync, self.wait_all = torchs.rpc_sync, torchs.api._wait_all
        self.invoke, self.native = torchs.api._invoke_rpc, torch._C._distributed_rpc._invoke_rpc_builtin
        self.options, self.info = torchs.TensorPipeRpcBackendOptions, torchs.WorkerInfo
        self.derived = type("Derived", (torchs.TensorPipeRpcBackendOptions,), {"__module__": "user_module"})


@pytest.fixture
def kept():
    tensorcall.uninstall()
    kept = Kept()
    tensorcall.install()
    yield kept
    tensorcall.uninstall()


def test_functions_and_modules_that_somebody_kept_lead_to_ours(kept, alone):
    assert kept.module.rpc_sync is alone.rpc_sync
    assert kept.module.api is alone.api
    assert kept.sync("me", max, args=(1, 2)) == 2
    assert kept.module.get_worker_info().name == kept.api.get_worker_info("me").name == "me"
    with kept.wait_all():
        future = alone.rpc_async("me", max, args=(3, 4))
    assert future.done()
    kept.api._ignore_rref_leak = False
    assert alone.api._ignore_rref_leak is False
    kept.api._ignore_rref_leak = True


def test_what_has_no_counterpart_raises_and_names_the_module(kept):
    with pytest.raises(RuntimeError, match=r"rpc\.api\._invoke_rpc, called from the module .*test_install"):
        kept.invoke("me", max, None)
    invoke = torch._C._distributed_rpc._invoke_rpc_builtin
    with pytest.raises(RuntimeError, match=r"_invoke_rpc_builtin, called from the module .*test_install"):
        invoke("me")
    with pytest.raises(
        RuntimeError, match=r"the module .*test_install uses torch\..*TensorPipeRpcBackendOptions"
    ):
        kept.options()
    with pytest.raises(RuntimeError, match=r"the module .*test_install uses torch\..*WorkerInfo"):
        kept.info("me", 0)
    with pytest.raises(RuntimeError, match=r"the class user_module\.Derived uses torch\."):
        kept.derived()


def test_submodules_are_the_same_under_both_names_whichever_is_imported_first(installed):
    first = importlib.import_module("torch.distributed.rpc._futures")

    assert first is importlib.import_module("tensorcall.rpc._futures")
    assert first.__spec__.name == "tensorcall.rpc._futures"
    with pytest.raises(ModuleNotFoundError, match=r"torch\.distributed\.rpc\.nothing"):
        importlib.import_module("torch.distributed.rpc.nothing")


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


def test_it_refuses_while_ours_runs_without_having_been_installed(alone):
    before = state()

    with pytest.raises(RuntimeError, match=r"tensorcall\.rpc is initialized in this process"):
        tensorcall.install()

    assert state() == before


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


def test_run_runs_a_folder_and_says_if_it_has_no_program(tmp_path):
    assert "can't find '__main__' module" in run(str(tmp_path)).stderr

    (tmp_path / "beside.py").write_text("word = 'found'")
    (tmp_path / "__main__.py").write_text("import beside, sys; print(__name__, beside.word, sys.argv[1:])")

    assert run(str(tmp_path), "x").stdout == "__main__ found ['x']\n"


def test_run_says_what_it_cannot_find():
    assert "can't open 'nothing.py'" in run("nothing.py").stderr
    assert "no module 'nothing'" in run("-m", "nothing").stderr
