"""Calls by name with plain data, as between Python and other languages.

Worker 1 says of itself that it reads plain data only, which is all that a Rust worker is to Python; real
ones are in `integration/test_mixed_jobs.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from native_pair import NativeWorker, joined
from tensorcall import _tensorcall
from tensorcall.rpc import _call, _named, _remote_error

SOON = 20.0


class Refused(ValueError):
    """What a function raises."""


class Worker(NativeWorker):
    """Knows a few functions."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, plain=rank == 1)
        self.go = threading.Event()
        self.later_answer: Callable[[_tensorcall.Later], object] = lambda later: later.returned({"a": {1}})
        self.held: _tensorcall.RRef | None = None

    def resolve(self, name: str) -> Callable[..., Any]:
        functions: dict[str, Callable[..., Any]] = {
            "same": lambda x: x,
            "set": lambda: [{"x": {1}}],
            "fail": self.fail,
            "exit": self.exit,
            "wait": self.wait,
            "later": self.later,
            "give": lambda: self.held,
        }
        return functions[name]

    def run_value(self, function: Any, args: Any, kwargs: Any, caller: int) -> Any:
        return function(*args, **kwargs)

    def wrap_rref(self, native: _tensorcall.RRef) -> Any:
        self.held = native
        return "a reference"

    def fail(self) -> None:
        raise Refused("no luck")

    def exit(self) -> None:
        raise SystemExit(3)

    def wait(self) -> set[int]:
        assert self.go.wait(SOON)
        return {3}

    def later(self) -> _tensorcall.Later:
        later = _tensorcall.Later(self)
        self.later_answer(later)
        return later


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    with joined(Worker(0), Worker(1)) as pair:
        yield pair


def take(call: Any) -> Any:
    assert call.wait(SOON)
    return _call.decode(*call.result())


def call(worker: Worker, to: int, name: str, *args: Any, **kwargs: Any) -> Any:
    return take(worker.native.call_named(to, name, args, kwargs, SOON))


def test_others_know_who_reads_plain_data_only(workers: tuple[Worker, Worker]) -> None:
    python, other = workers

    assert python.native.is_plain(1)
    assert not other.native.is_plain(0)


@pytest.mark.parametrize("sender", [0, 1])
def test_plain_data_and_tensors_cross_both_ways(workers: tuple[Worker, Worker], sender: int) -> None:
    data = [None, True, 3, 0.5, "text", b"bytes", (1, [2]), {"k": {"n": -1}}]
    tensors = [torch.arange(4.0), torch.eye(3)[:, 1], torch.nn.Parameter(torch.ones(2))]

    assert call(workers[sender], 1 - sender, "same", data) == data
    for tensor in tensors:
        found = call(workers[sender], 1 - sender, "same", tensor)
        assert type(found) is torch.Tensor
        assert torch.equal(found, tensor)


def test_a_container_that_occurs_twice_is_copied(workers: tuple[Worker, Worker]) -> None:
    inner = [1]

    assert call(workers[0], 1, "same", [inner, inner]) == [[1], [1]]


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, {2}), {}, "argument 2 of f on worker 'worker1' is not plain data: it is an object of type set."),
        (
            (),
            {"x": [1, {"k": object()}]},
            "argument 'x' of f on worker 'worker1' is not plain data: at [1]['k'] is",
        ),
        (
            ((1, {(1, 2j): 3}),),
            {},
            "argument 1 of f on worker 'worker1' is not plain data: at [1] key (1, 2j)[1]",
        ),
        ((2**63,), {}, "it is an int of more than 64 bits"),
        (("\ud800",), {}, "it is text with surrogates"),
        ((torch.eye(2).to_sparse(),), {}, "a torch.sparse_coo tensor cannot be sent as plain memory"),
    ],
)
def test_an_argument_that_is_not_plain_is_named(
    workers: tuple[Worker, Worker], args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError) as raised:
        workers[0].native.call_named(1, "f", args, kwargs, SOON)

    assert text in str(raised.value)
    assert "Between Python and Rust travel" in str(raised.value)


def test_an_argument_that_contains_itself_is_an_error(workers: tuple[Worker, Worker]) -> None:
    endless: list[Any] = []
    endless.append(endless)

    with pytest.raises(TypeError, match=r"at \[0\]\[0\]\[0\] is more nesting .* contain itself"):
        workers[0].native.call_named(1, "f", (endless,), {}, SOON)


def test_a_result_that_is_not_plain_is_an_error_for_who_reads_nothing_else(
    workers: tuple[Worker, Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    python, other = workers

    assert call(python, 0, "set") == [{"x": {1}}]
    with pytest.raises(
        TypeError, match=r"the result of set is not plain data: at \[0\]\['x'\] is an object of type set"
    ):
        call(other, 0, "set")
    with pytest.raises(TypeError, match=r"at \['a'\] is an object of type set"):
        call(other, 0, "later")
    assert "worker0" in capsys.readouterr().err


def test_exceptions_are_told_by_class_text_and_origin(workers: tuple[Worker, Worker]) -> None:
    _, other = workers

    outcome = other.native.call_named(0, "fail", (), {}, SOON)
    assert outcome.wait(SOON)
    kind, (classes, message, origin), *_ = outcome.result()

    assert kind == 3
    assert classes.split()[1:] == ["builtins:ValueError", "builtins:Exception"]
    assert classes.split()[0].endswith("test_plain_calls:Refused")
    assert message == "no luck"
    assert origin.startswith("On WorkerInfo(id=0, name=worker0):\nRefused('no luck')\nTraceback")
    with pytest.raises(Refused, match="no luck"):
        call(other, 0, "fail")
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        call(other, 0, "exit")


def test_an_exception_that_comes_later_is_told_in_plain_data(workers: tuple[Worker, Worker]) -> None:
    python, other = workers
    python.later_answer = lambda later: later.raised(Refused("later"))

    with pytest.raises(Refused, match="later"):
        call(other, 0, "later")
    with pytest.raises(Refused, match="later"):
        call(python, 0, "later")


def test_values_that_stay_are_fetched_as_plain_data(workers: tuple[Worker, Worker]) -> None:
    python, other = workers

    plain, made = other.native.remote_named(0, "same", (torch.ones(2),), {}, SOON)
    assert torch.equal(take(plain.fetch(SOON)), torch.ones(2))
    sets, _ = other.native.remote_named(0, "set", (), {}, SOON)
    with pytest.raises(TypeError, match="the value is not plain data"):
        take(sets.fetch(SOON))
    failed, outcome = other.native.remote_named(0, "fail", (), {}, SOON)
    for read in (failed.fetch(SOON), outcome):
        with pytest.raises(Refused, match="no luck"):
            take(read)
    assert take(made) is None
    del python


def test_what_was_pickled_for_python_is_packed_anew_for_others(workers: tuple[Worker, Worker]) -> None:
    python, other = workers
    failed, _ = python.native.remote_named(0, "fail", (), {}, SOON)
    # The value is an exception, which was pickled when the function ended.
    with pytest.raises(Refused):
        take(failed.fetch(SOON))

    assert call(python, 1, "same", failed_as_argument(failed)) is not None
    assert other.held is not None
    outcome = other.held.fetch(SOON)
    assert outcome.wait(SOON)
    kind, (classes, message, _), *_ = outcome.result()
    assert (kind, message) == (3, "no luck")
    assert "builtins:ValueError" in classes


def failed_as_argument(native: _tensorcall.RRef) -> Any:
    """A reference as programs have it."""
    from tensorcall.rpc._rref import RRef

    rref: RRef[Any] = RRef.__new__(RRef)
    rref._native = native
    return rref


def test_an_exception_is_of_the_nearest_class_that_is_loaded_here() -> None:
    load = _remote_error.load_plain

    known = load("test_none:Unknown builtins:KeyError builtins:Exception", "no", "On worker 'r'")
    stranger = load(
        "core.num.error:ParseIntError builtins:RuntimeError", "no digit", "On worker 'r': no digit"
    )
    unicode_error = load("builtins:UnicodeDecodeError builtins:ValueError", "bad", "")

    assert isinstance(known, KeyError)
    assert type(known).__name__ == "Unknown"
    assert "no (On worker 'r')" in str(known)
    assert type(stranger).__name__ == "ParseIntError"
    assert isinstance(stranger, RuntimeError)
    assert str(stranger) == "On worker 'r': no digit"
    assert isinstance(unicode_error, (ValueError, RuntimeError))
    assert "bad" in str(unicode_error)
    assert type(load("", "nothing known", "")) is RuntimeError


def test_functions_are_found_by_the_name_that_they_are_registered_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_named, "_registered", {})

    @_named.function
    def double(x: int) -> int:
        return 2 * x

    @_named.function("models.encode")
    def encode(x: int) -> int:
        return 3 * x

    assert _named.find("double") is double
    assert _named.find("models.encode") is encode
    assert _named.find("os.path.join") is __import__("os").path.join
    with pytest.raises(
        RuntimeError, match=r"registered as 'douple' on this worker \(similar names are 'double'\)"
    ):
        _named.find("douple")
    for name in ("nowhere.at_all", "math.nothing", "math.pi"):
        with pytest.raises(RuntimeError, match=f"no function is registered as '{name}'"):
            _named.find(name)


def test_a_name_belongs_to_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_named, "_registered", {})
    _named.function("f")(len)

    _named.function("f")(len)
    with pytest.raises(ValueError, match=r"cannot be registered as 'f': builtins\.len has that name"):
        _named.function("f")(max)
    for name in ("", "a:b"):
        with pytest.raises(ValueError, match="a name has no ':', and is not empty"):
            _named.function(name)(len)
