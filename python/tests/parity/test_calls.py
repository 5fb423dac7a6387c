"""Calls, their futures and their errors are with tensorcall what they are with torch's own RPC."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from engines import told_on
from harness import Worker, serve
from torch.distributed.rpc import functions
from torch.distributed.rpc.internal import RPCExecMode, _build_rpc_profiling_key, _internal_rpc_pickler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls TorchScript deprecated

    @torch.jit.script
    def scripted(a: torch.Tensor, b: int) -> torch.Tensor:
        if b < 0:
            raise ValueError("below zero")
        return a + b


@functions.async_execution
def later(to: str, x: Any, y: Any) -> Any:
    return rpc.rpc_async(to, add, args=(x, y)).then(lambda future: future.wait() + 1)


@functions.async_execution
def chained(to: str, n: int) -> Any:
    future = rpc.rpc_async(to, add, args=(0, 0))
    for _ in range(n):
        future = future.then(lambda future: future.wait() + 1)
    return future


@functions.async_execution
def by_hand(to: str, x: Any) -> Any:
    made = torch.futures.Future()  # type: ignore[var-annotated]
    rpc.rpc_async(to, add, args=(x, x)).then(lambda future: made.set_result(future.wait()))
    return made


@functions.async_execution
def fanned_out(to: str, n: int) -> Any:
    futures = [rpc.rpc_async(to, add, args=(i, 1)) for i in range(n)]
    return torch.futures.collect_all(futures).then(lambda all_: [f.wait() for f in all_.wait()])


@functions.async_execution
def no_future() -> Any:
    return torch.zeros(2)


@functions.async_execution
def raises_at_once() -> Any:
    raise ValueError("at once")


@functions.async_execution
def raises_in_callback(to: str) -> Any:
    def fail(_: Any) -> Any:
        raise ValueError("in the callback")

    return rpc.rpc_async(to, add, args=(1, 1)).then(fail)


class Made:
    def __init__(self, n: int) -> None:
        self.n = n

    @staticmethod
    @functions.async_execution
    def static(to: str, x: Any) -> Any:
        return rpc.rpc_async(to, add, args=(x, 1))

    @classmethod
    @functions.async_execution
    def of_class(cls, to: str, x: Any) -> Any:
        return rpc.rpc_async(to, add, args=(x, cls(2).n))

    @functions.async_execution
    def bound(self, to: str, x: Any) -> Any:
        return rpc.rpc_async(to, add, args=(x, self.n))


def add(x: Any, y: Any) -> Any:
    return x + y


def fail(text: str) -> None:
    raise ValueError(text)


def give_future() -> Any:
    made: Any = torch.futures.Future()
    made.set_result(1)
    return made


class Point:
    def __init__(self, x: Any) -> None:
        self.x = x


class UpperCasePickler:
    """Sends strings in capitals, to be told from the pickler that is there otherwise."""

    def serialize(self, obj: Any) -> Any:
        func, args, kwargs = obj
        return _internal_rpc_pickler.serialize(
            type(obj)(func, tuple(a.upper() if isinstance(a, str) else a for a in args), kwargs)
        )

    def deserialize(self, data: Any, tensors: Any) -> Any:
        return _internal_rpc_pickler.deserialize(data, tensors)


def with_pickler() -> Any:
    with rpc.api._use_rpc_pickler(UpperCasePickler()):
        inside = rpc.rpc_sync("w1", add, args=("a", "b"))
    return inside, rpc.rpc_sync("w1", add, args=("a", "b")), rpc.api._default_pickler is _internal_rpc_pickler


def waiting_for_all() -> Any:
    with rpc.api._wait_all():
        futures = [rpc.rpc_async("w1", add, args=(i, i)) for i in range(3)]
    return [future.done() for future in futures], hasattr(rpc.api._thread_local_var, "future_list")


def waiting_for_a_failure() -> Any:
    with rpc.api._wait_all():
        rpc.rpc_async("w1", fail, args=("waited for",))


def completed_twice() -> None:
    future: Any = torch.futures.Future()
    future.set_result(1)
    future.set_result(2)


def of_two_callbacks() -> Any:
    seen: list[int] = []
    future = rpc.rpc_async("w1", add, args=(1, 1))
    future.add_done_callback(lambda f: seen.append(f.wait()))
    child = future.then(lambda f: f.wait() + 1).then(lambda f: f.wait() + 1)
    return child.wait(), seen, future.value(), isinstance(child, torch._C.Future)


def of_a_failed_parent() -> Any:
    return rpc.rpc_async("w1", fail, args=("parent",)).then(lambda future: future.done()).wait()


def key_of_a_call() -> str:
    return _build_rpc_profiling_key(RPCExecMode.ASYNC, "f", "a", "b")


USES: dict[str, Callable[[], Any]] = {
    "async by then": lambda: rpc.rpc_sync("w1", later, args=("w0", 1, 2)),
    "async by then of tensors": lambda: rpc.rpc_sync("w1", later, args=("w0", torch.ones(2), 2)).tolist(),
    "async to itself": lambda: rpc.rpc_async("w1", later, args=("w1", 1, 2)).wait(),
    "async chained": lambda: rpc.rpc_sync("w1", chained, args=("w0", 10)),
    "async by hand": lambda: rpc.rpc_sync("w1", by_hand, args=("w0", 4)),
    "async fanned out": lambda: rpc.rpc_sync("w1", fanned_out, args=("w0", 5)),
    "async static": lambda: rpc.rpc_sync("w1", Made.static, args=("w0", 1)),
    "async of class": lambda: rpc.rpc_sync("w1", Made.of_class, args=("w0", 1)),
    "async bound": lambda: rpc.rpc_sync("w1", Made(7).bound, args=("w0", 1)),
    "async called here": lambda: later("w1", 1, 2).wait(),
    "async without a future": lambda: rpc.rpc_sync("w1", no_future),
    "async raises at once": lambda: rpc.rpc_sync("w1", raises_at_once),
    "async raises in a callback": lambda: rpc.rpc_sync("w1", raises_in_callback, args=("w0",)),
    "callbacks": of_two_callbacks,
    "callback of a failed parent": of_a_failed_parent,
    "callback that raises": lambda: (
        rpc.rpc_async("w1", add, args=(1, 1)).then(lambda f: f.wait() + "x").wait()
    ),
    "then of None": lambda: rpc.rpc_async("w1", add, args=(1, 1)).then(None),
    "completed twice": completed_twice,
    "a future as argument": lambda: rpc.rpc_async("w1", add, args=(torch.futures.Future(), 1)),
    "an rpc's future as argument": lambda: rpc.rpc_async(
        "w1", add, args=(rpc.rpc_async("w1", add, args=(1, 1)), 1)
    ),
    "a future as result": lambda: rpc.rpc_sync("w1", give_future),
    "wait_all": lambda: torch.futures.wait_all([rpc.rpc_async("w1", add, args=(i, i)) for i in range(3)]),
    "wait_all of a failure": lambda: torch.futures.wait_all([rpc.rpc_async("w1", fail, args=("x",))]),
    "collect_all": lambda: [
        f.value() for f in torch.futures.collect_all([rpc.rpc_async("w1", add, args=(1, 1))]).wait()
    ],
    "_wait_all": waiting_for_all,
    "_wait_all of a failure": waiting_for_a_failure,
    "error": lambda: rpc.rpc_sync("w1", fail, args=("here",)),
    "error of lines": lambda: rpc.rpc_sync("w1", fail, args=("\nfirst\nsecond",)),
    "error by future": lambda: rpc.rpc_async("w1", fail, args=("here",)).wait(),
    "script": lambda: rpc.rpc_sync("w1", scripted, args=(torch.ones(1), 2)).tolist(),
    "script by keyword": lambda: rpc.rpc_sync(
        "w1", scripted, args=(torch.ones(1),), kwargs={"b": 2}
    ).tolist(),
    "script with too many": lambda: rpc.rpc_sync("w1", scripted, args=(torch.ones(1), 2, 3)),
    "operator": lambda: rpc.rpc_sync("w1", torch.add, args=(torch.ones(1), 2)).tolist(),
    "operator of wrong arguments": lambda: rpc.rpc_sync("w1", torch.add, args=("x", {})),
    "operator that fails": lambda: rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), torch.ones(3))),
    "an object": lambda: rpc.rpc_sync("w1", Point, args=(torch.ones(2),)).x.tolist(),
    "not callable": lambda: rpc.rpc_sync("w1", 5),
    "nobody": lambda: rpc.rpc_sync("nobody", add, args=(1, 1)),
    "a float for a worker": lambda: rpc.rpc_sync(1.5, add, args=(1, 1)),
    "pickler": with_pickler,
    "who": lambda: (rpc.get_worker_info(), rpc.get_worker_info("w1"), rpc.get_worker_info().id),
    "who else": lambda: rpc.get_worker_info("nobody"),
    "info by pickle": lambda: (
        pickle.loads(pickle.dumps(rpc.get_worker_info("w1"))) == rpc.get_worker_info("w1")
    ),
    "timeout": rpc.get_rpc_timeout,
    "key": key_of_a_call,
    "options": lambda: rpc.RpcBackendOptions(rpc_timeout=-1),
    "threads": lambda: rpc.TensorPipeRpcBackendOptions(num_worker_threads=0),
    "transport": lambda: rpc.TensorPipeRpcBackendOptions(_transports=["x"]),
}


HERE = (
    "completed twice",
    "then of None",
    "a future as argument",
    "script with too many",
    "operator of wrong arguments",
    "operator that fails",
    "not callable",
    "nobody",
    "a float for a worker",
    "who else",
    "threads",
    "transport",
)
"""What raises without the other worker: the texts begin alike too. Those of functions are longer here."""


def outcome(name: str) -> Any:
    """What a use came to: its result, or the type (and the beginning) of what it raised."""
    try:
        return USES[name]()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0][:40] if name in HERE else ""


def use_all(worker: Worker) -> None:
    worker.start()
    worker.tell({name: repr(outcome(name)) for name in USES})
    rpc.shutdown()


def outcomes(folder: Path, engine: str) -> dict[str, str]:
    found: dict[str, str] = told_on(engine, Path(__file__), folder, use_all, serve)
    return found


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_every_call_comes_to_what_it_comes_to_with_torch(tmp_path: Path) -> None:
    ours = outcomes(tmp_path / "ours", "tensorcall")
    theirs = outcomes(tmp_path / "theirs", "torch")

    differing = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
    assert differing == {}, "\n".join(f"{n}: {d}" for n, d in differing.items())
