"""The hook that installs when torch is imported; whole processes are in integration/test_installing.py."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from tensorcall import _startup


@pytest.fixture
def torchless(monkeypatch, tmp_path):
    """A process that has not loaded torch and finds modules in a folder only; and what it installed."""
    installed = []
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(
        "tensorcall.compat.install", lambda: installed.append(hasattr(sys.modules["torch"], "last"))
    )
    return tmp_path, installed


def test_it_installs_once_after_the_last_statement_of_torch(torchless):
    folder, installed = torchless
    (folder / "torch.py").write_text("first = 1\nlast = 2")
    before = list(sys.meta_path)

    _startup.arm()
    _startup.arm()
    assert len(sys.meta_path) == len(before) + 1
    assert importlib.util.find_spec("torch") is not None
    assert installed == []
    import torch

    assert installed == [True]
    assert sys.meta_path == before
    assert "exec_module" not in vars(torch.__spec__.loader)
    importlib.reload(torch)
    assert installed == [True]


def test_an_import_that_fails_can_be_tried_again(torchless):
    folder, installed = torchless
    (folder / "torch.py").write_text("import nothing_like_it")
    _startup.arm()
    with pytest.raises(ModuleNotFoundError):
        import torch
    assert installed == []

    (folder / "torch.py").write_text("last = 1 # now it works")
    importlib.invalidate_caches()
    import torch

    assert torch.last == 1
    assert installed == [True]


def test_a_folder_that_is_merely_called_torch_is_left_alone(torchless):
    folder, installed = torchless
    (folder / "torch").mkdir()
    _startup.arm()
    import torch

    assert torch.__file__ is None
    assert installed == []


def test_a_process_that_has_torch_installs_at_once(torchless, monkeypatch):
    _, installed = torchless
    monkeypatch.setitem(sys.modules, "torch", sys)

    _startup.arm()

    assert installed == [False]


def test_uninstalling_before_torch_came_disarms(torchless):
    import tensorcall

    before = list(sys.meta_path)
    _startup.arm()
    tensorcall.uninstall()

    assert sys.meta_path == before


def test_the_start_up_file_is_one_line_that_does_nothing_without_the_mark(monkeypatch, torchless):
    from pathlib import Path

    line = (Path(__file__).parents[2] / "startup/purelib" / _startup.FILE).read_text()
    assert line.startswith("import ")
    assert line.count("\n") == 1
    before = list(sys.meta_path)
    for value in ("", "0"):
        monkeypatch.setenv(_startup.MARK, value)
        exec(line, {})
        assert sys.meta_path == before
    monkeypatch.setenv(_startup.MARK, "1")
    exec(line, {})
    assert len(sys.meta_path) == len(before) + 1
