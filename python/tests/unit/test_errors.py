"""Exceptions arrive as they were, or as a stand-in that says what happened."""

from __future__ import annotations

import sys

import pytest
from tensorcall.rpc import _remote_error
from tensorcall.rpc._handler import Handler
from tensorcall.rpc._worker import WorkerInfo
from tensorcall.rpc.internal import PythonUDF, serialize


class TwoArgs(Exception):
    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail

    def __reduce__(self):
        return TwoArgs, (self.code, self.detail)


class CannotBeRebuilt(ValueError):
    def __init__(self, flag, text):
        super().__init__(text)
        self.flag = flag


class HoldsALock(ValueError):
    def __init__(self, text):
        super().__init__(text)
        self.module = sys


def throw(error):
    raise error


def make_and_throw(cls, *args):
    raise cls(*args)


@pytest.fixture
def handler():
    return Handler(WorkerInfo("worker1", 1))


def arrive(handler, func, *args):
    encoding, payload, tensors = handler.run_pickled(*serialize(PythonUDF(func, args, {})), 0)
    assert encoding == 2
    return _remote_error.load(payload, tensors)


def test_class_and_attributes_are_kept_and_the_text_names_the_worker(handler, capsys):
    error = arrive(handler, make_and_throw, TwoArgs, 42, "out of beans")

    assert type(error) is TwoArgs
    assert error.code == 42
    assert str(error).startswith("On WorkerInfo(id=1, name=worker1):\n")
    assert "out of beans" in str(error)
    assert "in make_and_throw" in str(error)
    assert "_handler.py" not in str(error)
    assert "On WorkerInfo(id=1, name=worker1):" in capsys.readouterr().err


def test_line_breaks_arrive_as_line_breaks(handler):
    text = str(arrive(handler, make_and_throw, ValueError, "\nfirst\nsecond"))

    assert text == text.encode().decode("unicode_escape")


def test_text_that_is_not_ascii_is_not_garbled(handler):
    assert "käse \\ ☃" in str(arrive(handler, make_and_throw, ValueError, "käse \\ ☃"))


def test_an_exception_with_other_arguments_keeps_them_and_has_the_text_as_its_cause(handler):
    error = arrive(handler, make_and_throw, OSError, 2, "no such thing", "path")

    assert type(error) is FileNotFoundError
    assert error.filename == "path"
    assert "On WorkerInfo(id=1, name=worker1)" in str(error.__cause__)


def test_notes_are_kept(handler):
    error = ValueError("x")
    error.add_note("look here")

    assert arrive(handler, throw, error).__notes__ == ["look here"]


def test_an_exception_that_cannot_be_rebuilt_arrives_as_a_stand_in(handler):
    error = arrive(handler, make_and_throw, CannotBeRebuilt, True, "foo")

    assert isinstance(error, RuntimeError)
    assert isinstance(error, CannotBeRebuilt)
    assert "Failed to create original exception type" in str(error)
    assert "Original exception on remote side was On WorkerInfo" in str(error)
    assert "foo" in str(error)


def test_a_stand_in_can_travel_on(handler):
    error = arrive(handler, make_and_throw, CannotBeRebuilt, True, "foo")

    assert "foo" in str(arrive(handler, throw, error))


def test_an_exception_that_does_not_pickle_is_made_anew_from_its_text(handler):
    error = arrive(handler, make_and_throw, HoldsALock, "stuck")

    assert type(error) is HoldsALock
    assert "stuck" in str(error)


def test_a_class_that_is_unknown_here_is_replaced_by_its_nearest_known_base():
    error = _remote_error.stand_in([("nowhere", "Odd"), ("builtins", "KeyError")], "text")

    assert isinstance(error, KeyError)
    assert isinstance(error, RuntimeError)
    assert type(error).__name__ == "Odd"
    assert str(error) == "text"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exception_meant_for_the_process_does_not_leave_the_function(handler, error):
    arrived = arrive(handler, throw, error)

    assert type(arrived) is RuntimeError
    assert str(arrived).startswith(f"{type(error).__name__}: {error}")


class Unloadable:
    def __reduce__(self):
        return throw, (ValueError("cannot load"),)


class Undumpable:
    def __reduce__(self):
        raise ValueError("cannot dump")


def test_arguments_that_cannot_be_unpickled_are_an_error_that_names_the_node(handler):
    error = arrive(handler, max, Unloadable())

    assert type(error) is RuntimeError
    assert "Error on Node 1: ValueError: cannot load" in str(error)


def test_a_result_that_cannot_be_pickled_is_an_error_with_the_original_text(handler):
    error = arrive(handler, Undumpable)

    assert type(error) is RuntimeError
    assert "ValueError: cannot dump" in str(error)


def vanishing():
    return None


def test_a_function_that_is_missing_here_is_a_runtime_error(handler, monkeypatch):
    module = sys.modules[vanishing.__module__]
    payload, tensors = serialize(PythonUDF(vanishing, (), {}))
    monkeypatch.delattr(module, "vanishing")

    encoding, payload, tensors = handler.run_pickled(payload, tensors, 0)

    error = _remote_error.load(payload, tensors)
    assert encoding == 2
    assert type(error) is RuntimeError
    assert "RPC pickler does not serialize" in str(error)
    with pytest.raises(RuntimeError, match="RPC pickler does not serialize"):
        handler.resolve(f"{module.__name__}:vanishing")


class BadRepr(Exception):
    def __repr__(self):
        raise ValueError("no repr")


def test_an_exception_that_cannot_be_described_is_still_answered(handler):
    error = arrive(handler, make_and_throw, BadRepr)

    assert isinstance(error, RuntimeError)
    assert "BadRepr" in str(error)


def test_a_missing_stderr_is_no_error(handler, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)

    assert "x" in str(arrive(handler, make_and_throw, ValueError, "x"))
