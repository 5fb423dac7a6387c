"""Tensors of every kind arrive as they were."""

from __future__ import annotations

import os
import resource
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
    """LOG row 76."""
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
    """LOG row 68."""
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


def send_shapes(worker: Worker) -> list[list[int]]:
    shapes = [(), (0,), (1,), (3, 0, 2), (0, 0), (2, 1, 3), (1 << 18,)]
    sent = [torch.full(shape, index, dtype=torch.uint8) for index, shape in enumerate(shapes)]
    with worker.joined():
        rref = rpc.remote("w1", identity, args=(sent,))
        for got in (rpc.rpc_sync("w1", identity, args=(sent,)), rref.to_here()):
            assert all(torch.equal(x, y) for x, y in zip(got, sent, strict=True))
    return [list(tensor.shape) for tensor in got]


def test_scalars_empty_and_large_tensors_go_in_one_call(group: Group) -> None:
    """LOG row 61: on the CPU; what is on a GPU too is in `cargo xtask gpu-check`."""
    assert group.run(send_shapes, serve)[0] == [[], [0], [1], [3, 0, 2], [0, 0], [2, 1, 3], [1 << 18]]


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
    """LOG row 69."""
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
    """LOG row 74."""
    assert group.run(send_grad, serve)[0] == (True, True)


def kinds() -> Iterator[tuple[str, Any]]:
    """A name and a tensor for each kind that is not plain memory."""
    values = torch.arange(8.0).reshape(2, 4)
    eye = torch.eye(4)
    yield "coo", eye.to_sparse()
    yield "coo that is not coalesced", torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    yield "csr", eye.to_sparse_csr()
    yield "csc", eye.to_sparse_csc()
    yield "bsr", eye.to_sparse_bsr((2, 2))
    yield "bsc", eye.to_sparse_bsc((2, 2))
    yield "quantized per tensor", torch.quantize_per_tensor(values, 0.5, 1, torch.quint8)
    yield (
        "quantized per channel",
        torch.quantize_per_channel(values, torch.ones(2), torch.zeros(2), 0, torch.qint8),
    )
    yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    yield "jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    if torch.backends.mkldnn.is_available():
        yield "mkldnn", values.to_mkldnn()
    yield "subclass", values.as_subclass(Tagged)
    yield "parameter", torch.nn.Parameter(values)
    yield "buffer", torch.nn.Buffer(values)
    with torch.inference_mode():
        yield "inference", torch.ones(3)
    yield "with a history", (torch.ones(3, requires_grad=True) * 2)


class Tagged(torch.Tensor):
    """A subclass that a user may have."""


def dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The numbers of a tensor of any kind."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.dequantize()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def send_kinds(worker: Worker) -> list[str]:
    wrong = []
    with worker.joined():
        for name, sent in kinds():
            got = rpc.rpc_sync("w1", identity, args=(sent,))
            same = type(got) is type(sent) and got.layout is sent.layout and got.dtype is sent.dtype
            same &= got.requires_grad == sent.requires_grad and got.is_leaf and not got.is_inference()
            same &= all(torch.equal(a, b) for a, b in zip(dense(got), dense(sent), strict=True))
            if sent.layout is torch.sparse_coo:
                same &= got.is_coalesced() == sent.is_coalesced()
            if not same:
                wrong.append(name)
    return wrong


def test_every_kind_makes_the_round_trip(group: Group) -> None:
    """LOG row 68."""
    if ENGINE == "torch":
        pytest.skip("torch refuses some, and is ended by others")

    assert group.run(send_kinds, serve)[0] == []


def fake() -> torch.Tensor:
    with torch._subclasses.FakeTensorMode():
        return torch.ones(2)


UNSENDABLE = {
    "meta": lambda: torch.ones(2, device="meta"),
    "meta parameter": lambda: torch.nn.Parameter(torch.ones(2, device="meta")),
    "meta sparse": lambda: torch.sparse_coo_tensor(size=(2, 2), device="meta"),
    "fake": fake,
    "functional": lambda: torch._to_functional_tensor(torch.ones(2)),
    "zero": lambda: torch._efficientzerotensor((2,)),
}


def give_unsendable(name: str) -> Any:
    return UNSENDABLE[name]()


def refuse_all(worker: Worker) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with worker.joined():
        for name, make in UNSENDABLE.items():
            sent, texts = make(), []
            for wrap in (lambda x: x, lambda x: {"deep": [x, {1, 2}]}):
                try:
                    rpc.rpc_async("w1", identity, args=(wrap(sent),))
                except RuntimeError as error:
                    texts.append(str(error))
            try:
                rpc.rpc_sync("w1", give_unsendable, args=(name,))
            except RuntimeError as error:
                texts.append(str(error))
            found[name] = texts
        assert rpc.rpc_sync("w1", identity, args=(1,)) == 1
    return found


def test_what_cannot_travel_is_refused_at_the_call_with_the_reason(group: Group) -> None:
    if ENGINE == "torch":
        pytest.skip("torch is ended by some")

    found = group.run(refuse_all, serve)[0]

    assert all(len(texts) == 3 for texts in found.values()), found
    for name in ("meta", "meta parameter", "meta sparse"):
        assert all("found tensor on device: meta" in text for text in found[name])
    assert all("FakeTensor has no data" in text for text in found["fake"])
    for name in ("functional", "zero"):
        assert all("no memory that could be sent" in text for text in found[name])


def send_arrays(worker: Worker) -> list[str]:
    import numpy as np

    wrong = []
    with worker.joined():
        for size in (0, 10, 1 << 16, 1 << 20, 1 << 24):
            for sent in (np.arange(size, dtype=np.uint8), bytes(size), bytearray(size)):
                got = rpc.rpc_sync("w1", identity, args=({"a": sent, "b": {size}},))["a"]
                if type(got) is not type(sent) or memoryview(got) != memoryview(sent):
                    wrong.append(f"{type(sent).__name__} of {size}")
        array = np.arange(1 << 20)
        future = rpc.rpc_async("w1", identity, args=(array,))
        array[:] = 0
        if future.wait()[-1] != (1 << 20) - 1:
            wrong.append("changed after the call")
    return wrong


def test_large_memory_of_other_objects_makes_the_round_trip(group: Group) -> None:
    pytest.importorskip("numpy")

    assert group.run(send_arrays, serve)[0] == []


HUGE = (22 << 30) // 10


def ends(tensor: torch.Tensor) -> tuple[int, list[int]]:
    middle = (1 << 31) - 1
    return tensor.numel(), [int(tensor[i]) for i in (0, middle, middle + 1, -1)]


def send_huge(worker: Worker) -> tuple[Any, int]:
    with worker.joined(timeout=100):
        tensor = torch.empty(HUGE, dtype=torch.uint8)
        middle = (1 << 31) - 1
        tensor[0], tensor[middle], tensor[middle + 1], tensor[-1] = 1, 2, 3, 4
        found = rpc.rpc_sync("w1", ends, args=(tensor,))
    return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_tensor_of_more_than_two_to_the_31_bytes_arrives(group: Group) -> None:
    """LOG row 22."""
    group.deadline += 100

    found, peak = group.run(send_huge, serve)[0]

    assert found == (HUGE, [1, 2, 3, 4])
    # It was not copied on its way out.
    assert peak < 3 << 20
