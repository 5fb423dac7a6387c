"""From a name to the function that a caller means."""

from __future__ import annotations

import importlib
import sys
import threading

import pytest
from tensorcall.rpc import _target

SLOW = """
import threading
begun, go = threading.Event(), threading.Event()
begun.set()
assert go.wait(20)


def function():
    return "found"
"""


def test_a_module_that_another_thread_is_importing_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    importing = threading.Thread(target=importlib.import_module, args=("slow_to_import",))
    importing.start()
    while not hasattr(sys.modules.get("slow_to_import"), "begun"):
        assert importing.is_alive()
    module = sys.modules["slow_to_import"]
    assert module.begun.wait(20)
    found = []
    finding = threading.Thread(target=lambda: found.append(_target.find("slow_to_import:function")))
    finding.start()

    module.go.set()

    for thread in (importing, finding):
        thread.join(20)
    assert found[0]() == "found"
    del sys.modules["slow_to_import"]


def test_what_is_not_there_is_an_error():
    with pytest.raises(AttributeError):
        _target.find("math:no_such_function")
    with pytest.raises(ImportError):
        _target.find("no_such_module:function")
