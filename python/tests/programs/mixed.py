"""A Python worker of a job in both languages; `integration/test_mixed_jobs.py` starts it.

    mixed.py WORKER RUST

`WORKER` is the program of Rust workers, `RUST` the ranks where it is to run, as `2,3`: this program
becomes it there. The environment says where the workers meet. The first Python worker tries everything.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__" and os.environ["RANK"] in sys.argv[2].split(","):
    # Before anything is imported that takes long.
    os.execv(sys.argv[1], [sys.argv[1], f"rust{os.environ['RANK']}"])

import tensorcall.rpc as rpc
import torch

SOON = 30.0


@rpc.function
def double(x: Any) -> Any:
    return x + x


@rpc.function("tests.fail")
def fail(text: str) -> None:
    raise LookupError(text)


@rpc.function
def a_set() -> set[int]:
    return {1, 2}


@rpc.function
async def later(x: int) -> int:
    return x + 1


@rpc.function
def sleep(seconds: float) -> None:
    time.sleep(seconds)


seen = {"begun": 0, "cancelled": 0}
notes: list[str] = []


@rpc.function
async def hang() -> None:
    seen["begun"] += 1
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen["cancelled"] += 1
        raise


@rpc.function
def hanging() -> tuple[int, int]:
    return seen["begun"], seen["cancelled"]


@rpc.function
def note_later(text: str) -> None:
    time.sleep(0.3)
    notes.append(text)


@rpc.function
def die() -> None:
    # At another exit status torchrun would end all.
    os._exit(0)


@rpc.function
def sum_of(rref: Any) -> float:
    return float(rref.to_here().sum())


def count_on(counter: Any) -> Any:
    """Runs on another Python worker than the one that made the counter."""
    return counter.rpc_sync().add(10), counter.rpc_async().add(100).wait(), counter.owner_name()


def make(shape: list[int]) -> torch.Tensor:
    return torch.ones(shape)


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def raises(kind: type[BaseException], *texts: str) -> Any:
    """As that of pytest, which workers do without."""

    class Raises:
        def __enter__(self) -> None:
            pass

        def __exit__(self, cls: Any, error: Any, traceback: Any) -> bool:
            assert cls is not None, f"nothing was raised, but {kind.__name__} with {texts}"
            assert isinstance(error, kind), repr(error)
            for text in texts:
                assert text in str(error), f"{text!r} is not in {error}"
            return True

    return Raises()


def calls(python: list[str], rust: list[str]) -> None:
    left, right = torch.randn(3, 4), torch.randn(4, 2)
    plain = [None, True, -3, 0.5, "text", b"bytes", [1, [2]], (3, "x"), {"k": {"n": 1}}]
    for worker in rust:
        assert torch.allclose(rpc.rpc_sync(worker, "matmul", args=(left, right)), left @ right)
        assert rpc.rpc_sync(worker, "echo", args=(plain,)) == plain
        many = [rpc.rpc_async(worker, "echo", args=(number,)) for number in range(50)]
        assert [future.wait() for future in many] == list(range(50))
        large = torch.arange(1 << 20, dtype=torch.float64)
        assert torch.equal(rpc.rpc_sync(worker, "echo", args=(large,)), large)
        parameter = torch.nn.Parameter(torch.ones(2))
        assert torch.equal(rpc.rpc_sync(worker, "echo", args=(parameter,)), parameter)
        assert set(rpc.rpc_sync(worker, "workers")) == {*python, *rust}
    first, second = rust
    there = (first, "forward")
    for worker in python:
        assert rpc.rpc_sync(*there, args=(worker, "math:sqrt", [2.0])) == math.sqrt(2)
        assert rpc.rpc_sync(*there, args=(worker, "os.path.join", ["a", "b"])) == "a/b"
        assert rpc.rpc_sync(*there, args=(worker, "later", [1])) == 2
        for add in ("torch.add", "torch:add", "aten::add.Tensor"):
            assert torch.equal(rpc.rpc_sync(*there, args=(worker, add, [left, left])), 2 * left)
        assert torch.equal(rpc.rpc_sync(*there, args=(worker, "double", [left])), 2 * left)
    # From Rust to Rust, and from Python to Python by name.
    assert rpc.rpc_sync(*there, args=(second, "echo", ["x"])) == "x"
    assert rpc.rpc_sync(python[1], "double", args=(4,)) == 8


def errors(python: list[str], rust: list[str]) -> None:
    worker, other = rust[0], python[1]
    with raises(RuntimeError, "invalid digit", "parse", worker):
        rpc.rpc_sync(worker, "parse", args=("x",))
    with raises(RuntimeError, "panicked: as it was told to", worker):
        rpc.rpc_sync(worker, "panics")
    with raises(ValueError, f"worker '{worker}'", "matmull"):
        rpc.rpc_sync(worker, "matmull")
    with raises(ValueError, f"worker '{worker}'", "'parse'", "takes 1 argument"):
        rpc.rpc_sync(worker, "parse", args=("1", "2"))
    with raises(ValueError, f"worker '{worker}'", "'parse'", "argument 1", "expected"):
        rpc.rpc_sync(worker, "parse", args=(1,))
    with raises(ValueError, f"worker '{worker}'", "'parse'", "no keyword arguments"):
        rpc.rpc_sync(worker, "parse", kwargs={"text": "1"})
    with raises(TypeError, f"argument 2 of echo on worker '{worker}'", "at ['x'] is an object of type set"):
        rpc.rpc_sync(worker, "echo", args=(1, {"x": {1}}))
    with raises(TypeError, f"worker '{worker}', which runs no Python", "fail"):
        rpc.rpc_sync(worker, fail, args=({1},))
    with raises(ValueError, f"worker '{worker}'", "sqrt"):
        rpc.rpc_sync(worker, math.sqrt, args=(2.0,))
    with raises(RuntimeError, "200 ms", "nap", worker):
        rpc.rpc_sync(worker, "nap", args=(1.0,), timeout=0.2)

    def failure(function: str, *args: Any, seconds: float = SOON) -> Any:
        """How Rust sees that a function of Python fails."""
        return rpc.rpc_sync(worker, "failure", args=(other, function, list(args), seconds))

    kind, cls, message, origin, text = failure("tests.fail", "not here")
    assert (kind, cls, message) == ("Raised", "builtins.LookupError", "not here")
    assert origin.startswith(f"On WorkerInfo(id={python_rank(other)}, name={other})")
    assert "mixed.py" in origin
    assert "in fail" in origin
    assert f"tests.fail on worker '{other}' raised builtins.LookupError: not here" in text
    kind, cls, message, *_ = failure("a_set")
    assert (kind, cls) == ("Raised", "builtins.TypeError")
    assert "the result of a_set is not plain data: it is an object of type set" in message
    kind, _, message, *_ = failure("douple", 1)
    assert kind == "Raised"
    assert "no function is registered as 'douple' on this worker (similar names are 'double')" in message
    kind, *_, text = failure("sleep", 1.0, seconds=0.2)
    assert kind == "Timeout"
    assert "sleep" in text
    assert other in text


def python_rank(name: str) -> int:
    return int(rpc.get_worker_info(name).id)


def cancellations(python: list[str], rust: list[str]) -> None:
    # Of Python's call of an async function in Rust, and the other way round.
    future = rpc.rpc_async(rust[0], "hang")
    eventually(lambda: rpc.rpc_sync(rust[0], "hanging") == (1, 0))
    future.cancel()
    eventually(lambda: rpc.rpc_sync(rust[0], "hanging") == (1, 1))
    rpc.rpc_sync(rust[0], "abandon", args=(python[1],))
    assert rpc.rpc_sync(python[1], hanging) == (1, 1)


def references(python: list[str], rust: list[str]) -> None:
    (first, second), other = rust, python[1]
    counter = rpc.remote(first, "new_counter", args=(1,))
    assert counter.owner_name() == first
    assert counter.rpc_sync().add(1) == 2
    assert rpc.rpc_sync(other, count_on, args=(counter,)) == (12, 112, first)
    with raises(ValueError, first, "stays on its worker"):
        counter.to_here()
    with raises(RuntimeError, "is not the owner"):
        rpc.rpc_sync(second, "add", args=(counter, 1))
    # A value of Rust, read by both languages; one of Python, likewise.
    theirs = rpc.remote(first, "echo", args=(torch.arange(3.0),))
    ours = rpc.RRef(torch.arange(3.0))
    on_rust = rpc.rpc_sync(first, "share", args=([1, "x"],))
    assert on_rust.to_here() == [1, "x"]
    assert rpc.rpc_sync(second, "fetch", args=(on_rust,)) == [1, "x"]
    for rref in (theirs, ours):
        assert torch.equal(rref.to_here(), torch.arange(3.0))
        assert torch.equal(rpc.rpc_sync(second, "fetch", args=(rref,)), torch.arange(3.0))
        assert rpc.rpc_sync(other, "sum_of", args=(rref,)) == 3.0
        assert rpc.rpc_sync(second, "forward", args=(other, "sum_of", [rref])) == 3.0
    # Made by Rust on a Python worker, and given back.
    made = rpc.rpc_sync(first, "remote", args=(other, "__main__:make", [[2, 2]]))
    assert made.owner_name() == other
    assert torch.equal(made.to_here(), torch.ones(2, 2))
    # Values that never came to be, and one that is not plain.
    failed = rpc.remote(first, "parse", args=("x",))
    with raises(RuntimeError, "invalid digit"):
        failed.to_here()
    pickled = rpc.remote(other, fail, args=("no value",))
    kind, cls, message, *_ = rpc.rpc_sync(first, "fetch_failure", args=(pickled,))
    assert (kind, cls, message) == ("Raised", "builtins.LookupError", "no value")
    kind, cls, message, *_ = rpc.rpc_sync(first, "fetch_failure", args=(rpc.RRef({1}),))
    assert (kind, cls) == ("Raised", "builtins.TypeError")
    assert "an object of type set" in message


def losses(python: list[str], rust: list[str]) -> None:
    kept = rpc.remote(rust[1], "echo", args=(1,))
    assert kept.to_here() == 1
    with raises(RuntimeError, f"worker '{rust[1]}'", "is lost", "die"):
        rpc.rpc_sync(rust[1], "die")
    with raises(RuntimeError, rust[1]):
        kept.to_here()
    kind, *_, text = rpc.rpc_sync(rust[0], "failure", args=(rust[1], "echo", [1], SOON))
    assert kind == "PeerLost"
    assert f"'{rust[1]}'" in text
    # The others go on.
    assert rpc.rpc_sync(rust[0], "forward", args=(python[1], "double", [2])) == 4
    kind, *_, text = rpc.rpc_sync(rust[0], "failure", args=(python[1], "die", [], SOON))
    assert kind == "PeerLost"
    assert f"worker '{python[1]}'" in text
    assert "the call of die" in text


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rust = [int(each) for each in sys.argv[2].split(",")]
    python = [each for each in range(size) if each not in rust]
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=SOON)
    rpc.init_rpc(f"py{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == python[0]:
        names = [f"py{each}" for each in python], [f"rust{each}" for each in rust]
        for part in (calls, errors, cancellations, references, losses):
            began = time.monotonic()
            part(*names)
            print(f"{part.__name__} done in {time.monotonic() - began:.1f} s", flush=True)
        # What was begun is done before anybody leaves, whoever does it for whom.
        last = rpc.rpc_async(f"rust{rust[0]}", "nap", args=(0.3,))
        rpc.rpc_sync(f"rust{rust[0]}", "begin", args=(f"py{rank}", "note_later", ["done"]))
    rpc.shutdown()
    if rank == python[0]:
        assert last.done()
        assert last.wait() is None
        assert notes == ["done"]
    print(f"py{rank} left", flush=True)


if __name__ == "__main__":
    main()
