"""References to values on other workers are with tensorcall what they are with torch's own RPC."""

from __future__ import annotations

import copy
import io
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
from torch.distributed.rpc import RRef, functions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls TorchScript deprecated

    @torch.jit.script
    def scripted(a: torch.Tensor) -> torch.Tensor:
        return a + 1

    class Scale(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2


class Counter:
    """Something with a state."""

    shared = 5

    def __init__(self, n: int = 0) -> None:
        self.n = n
        self.on_instance = lambda: self.n

    def __getstate__(self) -> Any:
        return {"n": self.n}

    def add(self, by: int) -> int:
        self.n += by
        return self.n

    def get(self) -> int:
        return self.n

    def fail(self) -> None:
        raise ValueError("in the method")

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x

    @classmethod
    def made(cls, n: int) -> int:
        return cls(n).n

    @functions.async_execution
    def later(self, to: str, x: int) -> Any:
        return rpc.rpc_async(to, add, args=(x, self.n))

    @staticmethod
    @functions.async_execution
    def later_static(to: str, x: int) -> Any:
        return rpc.rpc_async(to, add, args=(x, 1))

    @classmethod
    @functions.async_execution
    def later_of_class(cls, to: str, x: int) -> Any:
        return rpc.rpc_async(to, add, args=(x, cls.shared))


def add(x: Any, y: Any) -> Any:
    return x + y


def fail(text: str) -> None:
    raise ValueError(text)


def fail_of_key() -> None:
    raise KeyError("missing")


@functions.async_execution
def later(to: str, x: Any, y: Any) -> Any:
    return rpc.rpc_async(to, add, args=(x, y)).then(lambda future: future.wait() + 1)


@functions.async_execution
def no_future() -> Any:
    return 5


def value_of(rref: Any) -> Any:
    return rref.to_here()


def about(rref: Any) -> Any:
    """What a worker sees of a reference that it was sent."""
    return rref.is_owner(), rref.owner_name(), isinstance(rref, rpc.PyRRef)


def local_of(rref: Any) -> Any:
    return rref.local_value()


def give_local() -> Any:
    return RRef(torch.ones(2))


def give_several() -> Any:
    return {"list": [RRef(1), RRef("two")], "tuple": (RRef(3.0),)}


def give_on(to: str) -> Any:
    return rpc.remote(to, add, args=(2, 3))


def pass_on(rref: Any, to: str) -> Any:
    return rpc.rpc_sync(to, value_of, args=(rref,))


def change(rref: Any) -> None:
    rref.local_value().n = 99


class Holder:
    def __init__(self, rref: Any) -> None:
        self.rref = rref


def value_in(holder: Holder) -> Any:
    return holder.rref.to_here()


def remotely(func: Callable[..., Any], *args: Any, to: str = "w1") -> Any:
    return rpc.remote(to, func, args=args)


def of_identity() -> Any:
    value = Counter(3)
    mine = RRef(value)
    return mine.local_value() is value, mine.to_here() is value, mine.is_owner(), mine.confirmed_by_owner()


def of_two_values() -> Any:
    one, other = remotely(add, 1, 1), remotely(add, 2, 2)
    return one == other, one == one, one.owner() == other.owner(), len({one, other})


def of_shared_state() -> Any:
    rref = remotely(Counter, 1)
    rref.rpc_sync().add(4)
    rref.rpc_async().add(2).wait()
    return rref.remote().add(1).to_here(), rref.to_here().n


def of_a_changed_value() -> Any:
    rref = remotely(Counter, 1)
    rpc.rpc_sync("w1", change, args=(rref,))
    return rref.to_here().n


def of_type() -> Any:
    rref = remotely(Counter, 1)
    future = rref._get_type(blocking=False)
    return future.wait() is Counter, rref._get_type(blocking=False) is future


def of_types_here() -> Any:
    return RRef(torch.ones(1))._get_type(), RRef(torch.ones(1))._get_type(blocking=False).wait()


def of_creation() -> Any:
    rref = remotely(add, 1, 1)
    future = rref._get_future()
    future.wait()
    return isinstance(future, torch._C.Future), future.done(), rref.confirmed_by_owner(), rref.to_here()


def of_proxies_by_hand() -> Any:
    proxy = remotely(Counter, 1).rpc_sync(timeout=5)
    return proxy.get(), proxy.get(), callable(proxy.get)


def saved() -> Any:
    torch.save(RRef(1), io.BytesIO())


def deleted() -> Any:
    rref = remotely(add, 1, 1)
    rref.to_here()
    del rref
    return rpc.remote("w1", add, args=(1, 1)).to_here()


def expired() -> Any:
    return rpc.remote("w1", add, args=(1, 1), timeout=30).to_here(timeout=30)


def counts() -> Any:
    return sorted(rpc._rref_context_get_debug_info())


USES: dict[str, Callable[[], Any]] = {
    "text of a local one": lambda: str(RRef(1)).partition("local")[0],
    "text of a remote one": lambda: [
        part.partition(")")[2] for part in str(remotely(add, 1, 1)).split("local_id=")
    ],
    "identity": of_identity,
    "two values": of_two_values,
    "remote": lambda: remotely(add, 1, 2).to_here(),
    "remote of tensors": lambda: remotely(torch.add, torch.ones(2), 1).to_here().tolist(),
    "remote of a script function": lambda: remotely(scripted, torch.ones(2)).to_here().tolist(),
    "remote to itself": lambda: remotely(add, 1, 2, to="w0").to_here(),
    "remote to itself, local": lambda: remotely(add, 1, 2, to="w0").local_value(),
    "remote to itself, what it is": lambda: about(remotely(add, 1, 2, to="w0")),
    "remote, what it is": lambda: remotely(add, 1, 2).is_owner(),
    "remote, whose": lambda: (remotely(add, 1, 2).owner(), remotely(add, 1, 2).owner_name()),
    "remote of no result": lambda: remotely(print).to_here(),
    "remote by rank": lambda: rpc.remote(1, add, args=(1, 2)).to_here(),
    "remote by info": lambda: rpc.remote(rpc.get_worker_info("w1"), add, args=(1, 2)).to_here(),
    "remote by keyword": lambda: rpc.remote("w1", add, args=(1,), kwargs={"y": 2}).to_here(),
    "remote to nobody": lambda: rpc.remote("nobody", add, args=(1, 2)),
    "remote of wrong arguments": lambda: rpc.remote("w1", torch.add, args=("x", {})),
    "remote async": lambda: remotely(later, "w0", 1, 2).to_here(),
    "remote async without a future": lambda: remotely(no_future).to_here(),
    "remote with a limit": expired,
    "error": lambda: remotely(fail, "here").to_here(),
    "error of a key": lambda: remotely(fail_of_key).to_here(),
    "error of an operator": lambda: remotely(torch.add, torch.ones(2), torch.ones(3)).to_here(),
    "error of a script function": lambda: remotely(scripted, torch.ones(1), 2),
    "error here": lambda: remotely(fail, "here", to="w0").to_here(),
    "error here, local": lambda: remotely(fail, "here", to="w0").local_value(),
    "error of a type query": lambda: remotely(fail, "here")._get_type(),
    "error by a proxy": lambda: remotely(fail, "here").rpc_sync().size(),
    "local value elsewhere": lambda: remotely(add, 1, 1).local_value(),
    "as argument": lambda: rpc.rpc_sync("w1", value_of, args=(RRef(7),)),
    "as argument, what it is": lambda: rpc.rpc_sync("w1", about, args=(RRef(7),)),
    "as argument to its owner": lambda: rpc.rpc_sync("w1", about, args=(remotely(add, 1, 1),)),
    "as argument to its owner, local": lambda: rpc.rpc_sync("w1", local_of, args=(remotely(add, 1, 1),)),
    "as argument to a third": lambda: rpc.rpc_sync("w2", value_of, args=(remotely(add, 1, 1),)),
    "as argument to a third, what it is": lambda: rpc.rpc_sync("w2", about, args=(remotely(add, 1, 1),)),
    "as argument of remote": lambda: remotely(value_of, remotely(add, 1, 1)).to_here(),
    "as argument here": lambda: rpc.rpc_sync("w0", value_of, args=(RRef(7),)),
    "by a fourth hand": lambda: rpc.rpc_sync("w1", pass_on, args=(RRef(4), "w2")),
    "by hand to its owner": lambda: rpc.rpc_sync("w2", pass_on, args=(remotely(add, 1, 1), "w1")),
    "in a list": lambda: rpc.rpc_sync("w1", sum_of, args=([RRef(1), remotely(add, 1, 1)],)),
    "in an object": lambda: rpc.rpc_sync("w1", value_in, args=(Holder(RRef(5)),)),
    "as result": lambda: rpc.rpc_sync("w1", give_local).to_here().tolist(),
    "as result, what it is": lambda: about(rpc.rpc_sync("w1", give_local)),
    "as result, several": lambda: [
        [rref.to_here() for rref in rrefs] for rrefs in rpc.rpc_sync("w1", give_several).values()
    ],
    "as result of another": lambda: rpc.rpc_sync("w1", give_on, args=("w2",)).to_here(),
    "as result of one's own": lambda: about(rpc.rpc_sync("w1", give_on, args=("w0",))),
    "nested": lambda: remotely(give_on, "w2").to_here().to_here(),
    "proxy": of_shared_state,
    "proxy by hand": of_proxies_by_hand,
    "proxy here": lambda: RRef(Counter(4)).rpc_sync().get(),
    "proxy, static": lambda: remotely(Counter, 1).rpc_sync().twice(4),
    "proxy, of class": lambda: remotely(Counter, 1).rpc_async().made(4).wait(),
    "proxy, async": lambda: remotely(Counter, 1).rpc_sync().later("w0", 4),
    "proxy, async, by future": lambda: remotely(Counter, 1).rpc_async().later("w0", 4).wait(),
    "proxy, async, by remote": lambda: remotely(Counter, 1).remote().later("w0", 4).to_here(),
    "proxy, async, static": lambda: remotely(Counter, 1).rpc_sync().later_static("w0", 4),
    "proxy, async, of class": lambda: remotely(Counter, 1).remote().later_of_class("w0", 4).to_here(),
    "proxy, error": lambda: remotely(Counter, 1).rpc_sync().fail(),
    "proxy, error by future": lambda: remotely(Counter, 1).rpc_async().fail().wait(),
    "proxy, error by remote": lambda: remotely(Counter, 1).remote().fail().to_here(),
    "proxy, no such thing": lambda: remotely(Counter, 1).rpc_sync().nothing(),
    "proxy, no such thing by future": lambda: remotely(Counter, 1).rpc_async().nothing().wait(),
    "proxy, no such thing by remote": lambda: remotely(Counter, 1).remote().nothing(),
    "proxy of a tensor": lambda: remotely(torch.ones, 2).rpc_sync().add(1).tolist(),
    "shared state": of_a_changed_value,
    "type": of_type,
    "type here": of_types_here,
    "creation": of_creation,
    "deleted": deleted,
    "counts": counts,
    "backward": lambda: of_backward(),
    "backward of no tensor": lambda: RRef("x").backward(),
    "backward without a graph": lambda: RRef(torch.ones(1)).backward(),
    "backward of many": lambda: RRef(torch.ones(3, requires_grad=True)).backward(),
    "backward from elsewhere": lambda: remotely(torch.ones, 1).backward(),
    "a script module without a hint": lambda: RRef(torch.jit.script(Scale())),
    "a hint without a script module": lambda: RRef(5, int),
    "by pickle": lambda: pickle.dumps(RRef(1)),
    "by copy": lambda: copy.copy(RRef(1)),
    "by deep copy": lambda: copy.deepcopy([RRef(1)]),
    "by save": saved,
    "generic": lambda: RRef[int](5).to_here(),
    "kinds": lambda: (issubclass(RRef, rpc.PyRRef), isinstance(RRef(1), RRef)),
}


def sum_of(rrefs: Any) -> Any:
    return sum(rref.to_here() for rref in rrefs)


def of_backward() -> Any:
    leaf = torch.ones(2, requires_grad=True)
    RRef((leaf * 3).sum()).backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


TEXTS = (
    "remote to nobody",
    "remote of wrong arguments",
    "error of a script function",
    "local value elsewhere",
    "proxy, no such thing by remote",
    "backward of no tensor",
    "backward without a graph",
    "backward of many",
    "backward from elsewhere",
    "a script module without a hint",
    "a hint without a script module",
    "by pickle",
    "by copy",
    "by deep copy",
    "by save",
)
"""What raises here: the texts begin alike, too. Those of functions are longer with tensorcall."""


def outcome(name: str) -> Any:
    """What a use came to: its result, or the type (and the beginning) of what it raised."""
    try:
        return USES[name]()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0][:30] if name in TEXTS else ""


def use_all(worker: Worker) -> None:
    warnings.simplefilter("ignore")
    worker.start()
    worker.tell({name: repr(outcome(name)) for name in USES})
    rpc.shutdown()


def outcomes(folder: Path, engine: str) -> dict[str, str]:
    found: dict[str, str] = told_on(engine, Path(__file__), folder, use_all, serve, serve)
    return found


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_every_use_comes_to_what_it_comes_to_with_torch(tmp_path: Path) -> None:
    ours = outcomes(tmp_path / "ours", "tensorcall")
    theirs = outcomes(tmp_path / "theirs", "torch")

    differing = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
    assert differing == {}, "\n".join(f"{name}: {both}" for name, both in differing.items())
