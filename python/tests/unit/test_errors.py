"""Exceptions arrive as they were, or as a stand-in that says what happened."""

from __future__ import annotations

import gc
import sys
import time

import pytest
import torch
from tensorcall.rpc import _remote_error
from tensorcall.rpc._futures import Future
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
    encoding, payload, tensors, _ = handler.run_pickled(*serialize(PythonUDF(func, args, {})), [], 0)
    assert encoding == 2
    return _remote_error.load(payload, tensors)


def test_class_and_attributes_are_kept_and_the_text_names_the_worker(handler, capsys):
    """LOG row 29."""
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
    """LOG row 23."""
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
    """LOG row 24."""
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
    """LOG row 25."""
    error = arrive(handler, max, Unloadable())

    assert type(error) is RuntimeError
    assert "Error on Node 1: ValueError: cannot load" in str(error)


def test_a_result_that_cannot_be_pickled_is_an_error_with_the_original_text(handler):
    """LOG row 25."""
    error = arrive(handler, Undumpable)

    assert type(error) is RuntimeError
    assert "ValueError: cannot dump" in str(error)


def vanishing():
    return None


def test_a_function_that_is_missing_here_is_a_runtime_error(handler, monkeypatch):
    module = sys.modules[vanishing.__module__]
    payload, tensors = serialize(PythonUDF(vanishing, (), {}))
    monkeypatch.delattr(module, "vanishing")

    encoding, payload, tensors, _ = handler.run_pickled(payload, tensors, [], 0)

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


class BrokenStream:
    def write(self, text):
        raise UnicodeEncodeError("ascii", text, 0, 1, "not here")


def test_a_stderr_that_cannot_write_the_text_costs_nobody_the_exception(handler, monkeypatch):
    monkeypatch.setattr(sys, "stderr", BrokenStream())

    assert type(arrive(handler, make_and_throw, KeyError, "☃")) is KeyError


@pytest.mark.parametrize(
    "text", ["日本語 \\n \\u2603", "עברית\n\tعربى", "\udc80 alone", "\x00 and {braces} %s", "🦀" * 1000]
)
def test_text_of_any_script_arrives_as_it_was(handler, text):
    assert text in str(arrive(handler, make_and_throw, ValueError, text))


def sent(handler, error):
    """The exception as its caller gets it, without a way through the arguments of a call."""
    _, payload, tensors, _ = handler.dump_exception(error)
    return _remote_error.load(payload, tensors)


def test_attributes_and_notes_survive_a_class_whose_pickle_forgets_them(handler):
    """LOG row 23."""
    error = TwoArgs(1, "x")
    error.extra = {"a": torch.ones(2)}
    error.add_note("look here")

    arrived = sent(handler, error)

    assert type(arrived) is TwoArgs
    assert arrived.extra["a"].tolist() == [1, 1]
    assert arrived.__notes__ == ["look here"]


def test_what_an_attribute_cannot_bring_the_others_do(handler):
    error = HoldsALock("stuck")
    error.code = 7

    arrived = sent(handler, error)

    assert type(arrived) is HoldsALock
    assert arrived.code == 7


def test_a_stand_in_has_the_attributes_and_takes_them_along(handler):
    error = CannotBeRebuilt([1, 2], "foo")
    error.add_note("look here")

    once = sent(handler, error)
    twice = sent(handler, once)

    for arrived in (once, twice):
        assert arrived.flag == [1, 2]
        assert arrived.__notes__ == ["look here"]


def raise_from(cause):
    try:
        raise cause
    except Exception as error:
        raise ValueError("consequence") from error


def raise_within():
    try:
        raise LookupError("first")
    except LookupError:
        raise OSError(2, "second", "file") from None


def test_the_text_tells_the_cause_too(handler):
    """LOG row 29."""
    error = arrive(handler, raise_from, KeyError("reason"))

    assert "KeyError: 'reason'" in str(error)
    assert "direct cause" in str(error)
    assert "consequence" in str(error)
    assert "in raise_within" in str(arrive(handler, raise_within).__cause__)


def test_groups_of_exceptions_arrive_whole(handler):
    error = arrive(handler, throw, ExceptionGroup("two", [ValueError("a"), TwoArgs(1, "b")]))

    assert [type(inner) for inner in error.exceptions] == [ValueError, TwoArgs]


class Forgotten(ConnectionError):
    pass


def test_a_class_that_the_caller_cannot_import_still_matches_its_bases(handler, monkeypatch):
    """LOG row 24."""
    payload = handler.dump_exception(Forgotten("gone"))[1]
    monkeypatch.delattr(sys.modules[Forgotten.__module__], "Forgotten")

    error = _remote_error.load(payload, [])

    assert isinstance(error, ConnectionError)
    assert isinstance(error, RuntimeError)
    assert type(error).__name__ == "Forgotten"
    assert "gone" in str(error)
    assert _remote_error.text_of(payload) in str(error)


def settled(rpc, future):
    """Let the future go, then wait until all that it sets off has happened."""
    while not future.done():
        time.sleep(0.01)
    del future
    gc.collect()


def logged(caplog, text):
    end = time.monotonic() + 10
    while text not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    return caplog.text.count(text)


def test_an_error_that_nobody_looked_at_is_logged_once(alone, caplog):
    """LOG row 26."""
    alone.rpc_async("me", make_and_throw, args=(ValueError, "let go while pending"))
    settled(alone, alone.rpc_async("me", make_and_throw, args=(ValueError, "let go when done")))

    for text in ("let go while pending", "let go when done"):
        assert logged(caplog, f"ValueError: {text}") == 1
    assert "make_and_throw on worker 'me' failed" in caplog.text


def test_errors_that_somebody_looked_at_or_gave_up_are_not_logged(alone, caplog):
    looked_at = alone.rpc_async("me", make_and_throw, args=(ValueError, "quiet 1"))
    with pytest.raises(ValueError, match="quiet 1"):
        looked_at.wait()
    chained = alone.rpc_async("me", make_and_throw, args=(ValueError, "quiet 2"))
    assert chained.then(lambda future: "saved").wait(10) == "saved"
    cancelled = alone.rpc_async("me", time.sleep, args=(0.2,))
    cancelled.cancel()
    del looked_at, chained, cancelled
    alone.rpc_async("me", time.sleep, args=(5,))
    alone.shutdown(graceful=False)
    gc.collect()

    assert "nobody looked" not in caplog.text


def test_an_error_of_a_callback_that_nobody_looked_at_is_logged(caplog):
    future = Future()
    child = future.then(lambda parent: parent.value() + 1)
    future.set_result("a")
    del child
    gc.collect()

    assert "nobody looked at it: RuntimeError: Got the following error" in caplog.text
