"""What can be called, and what comes back."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve


class Account:
    """Something with methods of every kind."""

    def __init__(self, balance: int) -> None:
        self.balance = balance

    def add(self, amount: int) -> int:
        return self.balance + amount

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @staticmethod
    def double(amount: int) -> int:
        return 2 * amount


class OddError(Exception):
    """Cannot be made from one string."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def pid() -> int:
    return os.getpid()


def add(a: Any, b: Any = 10, *, c: Any = 0) -> Any:
    return a + b + c


def fail(kind: str) -> None:
    if kind == "value":
        raise ValueError("no such value: ümläut \\ and a\nnew line")
    if kind == "key":
        raise KeyError("missing")
    if kind == "odd":
        raise OddError(7, "seven")
    raise SystemExit(3)


def change(tensor: torch.Tensor, items: list[int]) -> tuple[torch.Tensor, list[int]]:
    tensor.zero_()
    items.append(99)
    return tensor, items


def call_everything(worker: Worker) -> list[Any]:
    with worker.joined():
        other = rpc.get_worker_info("w1")
        return [
            rpc.rpc_sync("w1", add, args=(1,)),
            rpc.rpc_sync(1, add, args=(1, 2), kwargs={"c": 3}),
            rpc.rpc_sync(other, add, kwargs={"a": 1}),
            rpc.rpc_sync("w1", Account(5).add, args=(2,)),
            rpc.rpc_sync("w1", Account.name),
            rpc.rpc_sync("w1", Account.double, args=(4,)),
            rpc.rpc_sync("w1", Account, args=(8,)).balance,
            rpc.rpc_sync("w1", min, args=(3, 2)),
            rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), 1)).tolist(),
            rpc.rpc_sync("w1", torch.Tensor.mul, args=(torch.ones(2), 3)).tolist(),
            rpc.rpc_sync("w1", torch.clamp, args=(torch.arange(4.0),), kwargs={"max": 1}).tolist(),
            rpc.rpc_sync("w1", pid) != os.getpid(),
        ]


def test_functions_methods_classes_and_builtins_can_be_called(group: Group) -> None:
    results = group.run(call_everything, serve)[0]

    assert results == [11, 6, 11, 7, "Account", 8, 8, 2, [2, 2], [3, 3], [0, 1, 1, 1], True]


def call_myself(worker: Worker) -> list[Any]:
    with worker.joined():
        tensor, items = torch.ones(3), [1]
        got = rpc.rpc_sync(worker.name, change, args=(tensor, items))
        same = rpc.rpc_sync(worker.name, pid)
        return [tensor.tolist(), items, got[0].tolist(), got[1], same == os.getpid()]


def test_a_call_to_oneself_copies_its_arguments(group: Group) -> None:
    assert group.run(call_myself)[0] == [[1, 1, 1], [1], [0, 0, 0], [1, 99], True]


def collect_errors(worker: Worker) -> dict[str, tuple[str, str]]:
    seen = {}
    with worker.joined():
        for kind in ("value", "key", "odd", "exit"):
            for to in ("w1", worker.name):
                with pytest.raises(Exception) as raised:  # noqa: PT011  (each kind has its own)
                    rpc.rpc_sync(to, fail, args=(kind,))
                seen[f"{kind} at {to}"] = type(raised.value).__name__, str(raised.value)
        with pytest.raises(RuntimeError) as raised:
            rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), torch.ones(3)))
        seen["builtin"] = type(raised.value).__name__, str(raised.value)
        rpc.rpc_sync("w1", add, args=(1,))
    return seen


def test_what_a_function_raises_is_raised_at_the_caller(group: Group) -> None:
    seen = group.run(collect_errors, serve)[0]

    for to in ("w1", "w0"):
        kind, text = seen[f"value at {to}"]
        assert kind == "ValueError"
        assert f"On WorkerInfo(id={to[1]}, name={to})" in text
        assert "no such value" in text
        assert "missing" in seen[f"key at {to}"][1]
        assert "seven" in seen[f"odd at {to}"][1]
        assert "SystemExit" in seen[f"exit at {to}"][1]
        assert seen[f"exit at {to}"][0] == "RuntimeError"
    assert "size of tensor" in seen["builtin"][1]


def unpicklable(worker: Worker) -> list[str]:
    seen = []
    with worker.joined():
        for function, arguments in [(lambda: 1, ()), (add, (threading.Lock(),)), (add, (1, "a"))]:
            with pytest.raises(Exception) as raised:  # noqa: PT011  (pickle's own)
                rpc.rpc_sync("w1", function, args=arguments)
            seen.append(type(raised.value).__name__)
        seen.append(rpc.rpc_sync("w1", add, args=("a", "b"), kwargs={"c": "c"}))
    return seen


def test_what_cannot_be_pickled_is_refused_at_the_call(group: Group) -> None:
    seen = group.run(unpicklable, serve)[0]

    assert seen[1:] == ["TypeError", "TypeError", "abc"]


def nap(number: int) -> int:
    time.sleep(0.2)
    return number


def call_at_once(worker: Worker) -> tuple[list[int], float]:
    with worker.joined():
        rpc.rpc_sync("w1", add, args=(1,))
        began = time.monotonic()
        futures = [rpc.rpc_async("w1", nap, args=(number,)) for number in range(8)]
        return torch.futures.wait_all(futures), time.monotonic() - began


def test_calls_run_in_parallel(group: Group) -> None:
    results, seconds = group.run(call_at_once, serve)[0]

    assert results == list(range(8))
    assert seconds < 8 * 0.2


def call_from_threads(worker: Worker) -> int:
    results: list[int] = []

    def many(start: int) -> None:
        results.extend(rpc.rpc_sync("w1", add, args=(start, number)) for number in range(50))

    with worker.joined():
        threads = [threading.Thread(target=many, args=(1000 * n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    expected = {1000 * n + number for n in range(8) for number in range(50)}
    return len(expected.symmetric_difference(results))


def test_many_threads_can_call_at_once(group: Group) -> None:
    assert group.run(call_from_threads, serve)[0] == 0


def flood(worker: Worker) -> bool:
    with worker.joined():
        futures = [rpc.rpc_async("w1", add, args=(number, 0)) for number in range(5000)]
        return torch.futures.wait_all(futures) == list(range(5000))


def test_thousands_of_calls_in_flight_all_come_back(group: Group) -> None:
    """LOG row 11."""
    assert group.run(flood, serve)[0]
