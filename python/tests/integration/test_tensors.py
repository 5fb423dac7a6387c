"""Tensors of every kind arrive as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import ENGINE_VARIABLE, Group, Worker, serve

ENGINE = os.environ.get(ENGINE_VARIABLE, "tensorcall")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def layouts() -> Iterator[tuple[str, torch.Tensor]]:
    """A name and a tensor for each way in which the same numbers can lie in memory."""
    base = torch.arange(24.0).reshape(4, 6)
    complex_base = torch.complex(base, base + 1)
    yield "contiguous", base
    yield "zero-dimensional", torch.tensor(3.5)
    yield "empty", torch.empty(0)
    yield "empty with a shape", torch.empty(3, 0, 2)
    yield "transposed", base.t()
    yield "narrowed", base.narrow(1, 2, 3)
    yield "every other", base[::2, ::3]
    yield "with an offset", base.flatten()[5:]
    yield "expanded", torch.ones(1, 6).expand(5, 6)
    yield "channels last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield "conjugate view", complex_base.conj()
    yield "negative view", complex_base.conj().imag
    yield "conjugate and transposed", complex_base.conj().t()
    yield "imaginary part", complex_base.imag
    yield "large", torch.arange(1 << 20, dtype=torch.int32)
    yield "view of a large one", torch.zeros(1 << 22)[17:20]


def any_dtype(dtype: torch.dtype) -> torch.Tensor:
    """Twelve elements with arbitrary, but valid bytes."""
    if dtype == torch.bool:
        return torch.tensor([True, False, True] * 4).reshape(3, 4)
    size = 12 * dtype.itemsize
    return ((torch.arange(size) * 37 + 11) % 120).to(torch.uint8).view(dtype).reshape(3, 4)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit of every element agree."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.resolve_conj().resolve_neg().contiguous().flatten() for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def identity(value: Any) -> Any:
    return value


def send_dtypes(worker: Worker) -> list[str]:
    wrong = []
    with worker.joined():
        for dtype in DTYPES:
            sent = any_dtype(dtype)
            if not same_bits(rpc.rpc_sync("w1", identity, args=(sent,)), sent):
                wrong.append(str(dtype))
    return wrong


def test_every_dtype_makes_the_round_trip_bit_by_bit(group: Group) -> None:
    assert group.run(send_dtypes, serve)[0] == []


def send_layouts(worker: Worker) -> list[str]:
    wrong = []
    with worker.joined():
        for name, sent in layouts():
            got = rpc.rpc_sync("w1", identity, args=(sent,))
            if not same_bits(got, sent) or not torch.equal(got, sent):
                wrong.append(name)
    return wrong


def test_every_layout_makes_the_round_trip(group: Group) -> None:
    assert group.run(send_layouts, serve)[0] == []


def send_many(worker: Worker) -> bool:
    sent = {"a": [torch.full((n,), float(n)) for n in range(50)], "b": (torch.ones(2), "text")}
    with worker.joined():
        got = rpc.rpc_sync("w1", identity, args=(sent,))
    return (
        all(torch.equal(x, y) for x, y in zip(got["a"], sent["a"], strict=True))
        and torch.equal(got["b"][0], sent["b"][0])
        and got["b"][1] == "text"
    )


def test_tensors_in_containers_keep_their_places(group: Group) -> None:
    assert group.run(send_many, serve)[0]


def send_in_parallel(worker: Worker) -> bool:
    sent = [torch.full((1 << 18,), n, dtype=torch.int32) for n in range(16)]
    with worker.joined():
        futures = [rpc.rpc_async("w1", identity, args=(tensor,)) for tensor in sent]
        got = torch.futures.wait_all(futures)
    return all(torch.equal(x, y) for x, y in zip(got, sent, strict=True))


def test_large_tensors_in_flight_at_once_do_not_mix(group: Group) -> None:
    assert group.run(send_in_parallel, serve)[0]


def keep_a_view(worker: Worker) -> int:
    view = torch.zeros(1 << 22)[17:20]
    with worker.joined():
        got: torch.Tensor = rpc.rpc_sync("w1", identity, args=(view,))
    return got.untyped_storage().nbytes()


def test_a_view_travels_without_the_storage_behind_it(group: Group) -> None:
    if ENGINE == "torch":
        pytest.skip("torch may send the whole storage")

    assert group.run(keep_a_view, serve)[0] <= 64


def change_the_result(worker: Worker) -> list[float]:
    with worker.joined():
        got: torch.Tensor = rpc.rpc_sync("w1", identity, args=(torch.ones(3),))
        got += 1
    return got.tolist()


def test_a_received_tensor_is_writable(group: Group) -> None:
    assert group.run(change_the_result, serve)[0] == [2, 2, 2]


def keep_and_look(worker: Worker) -> list[float]:
    with worker.joined():
        kept = [rpc.rpc_sync("w1", identity, args=(torch.full((9,), n),)) for n in range(100)]
        for _ in range(100):
            rpc.rpc_sync("w1", identity, args=(torch.randn(9),))
    return [tensor.sum().item() / 9 for tensor in kept]


def test_a_received_tensor_is_its_own_and_stays_as_it_came(group: Group) -> None:
    assert group.run(keep_and_look, serve)[0] == list(range(100))


def send_grad(worker: Worker) -> tuple[bool, bool]:
    with worker.joined():
        sent = torch.ones(2, requires_grad=True)
        parameter = torch.nn.Parameter(torch.ones(3))
        got = rpc.rpc_sync("w1", identity, args=((sent, parameter),))
    return got[0].requires_grad, isinstance(got[1], torch.nn.Parameter)


def test_requires_grad_and_parameters_arrive_as_they_were(group: Group) -> None:
    assert group.run(send_grad, serve)[0] == (True, True)
