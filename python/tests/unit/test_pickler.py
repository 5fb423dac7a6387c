"""Objects survive the trip through bytes and a table of tensors."""

from __future__ import annotations

import threading
import weakref
from collections import namedtuple

import pytest
import torch
from tensorcall.rpc import internal
from tensorcall.rpc.internal import PythonUDF, _internal_rpc_pickler, deserialize, serialize

Pair = namedtuple("Pair", ["left", "right"])


def round_trip(obj):
    payload, tensors = serialize(obj)
    return deserialize(payload, tensors)


def test_plain_tensors_go_to_the_table_and_not_into_the_bytes():
    tensor = torch.arange(10_000)

    payload, tensors = serialize({"a": [tensor, 1], "b": Pair(tensor, torch.ones(1))})

    assert len(payload) < 500
    assert tensors[0] is tensor
    assert len(tensors) == 2


def test_one_tensor_that_occurs_twice_is_one_object_again():
    tensor = torch.ones(2)

    left, right = round_trip([tensor, tensor])

    assert left is right


def test_parameters_stay_parameters_and_their_data_goes_to_the_table():
    parameter = torch.nn.Parameter(torch.ones(3))

    payload, tensors = serialize(parameter)
    back = deserialize(payload, tensors)

    assert type(tensors[0]) is torch.Tensor
    assert isinstance(back, torch.nn.Parameter)
    assert back.requires_grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse().coalesce(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.eye(4).to_sparse_bsc((2, 2)),
        lambda: torch.sparse_coo_tensor(size=(3, 4)),
    ],
)
def test_sparse_tensors_are_sent_by_their_parts(make, requires_grad):
    tensor = make().requires_grad_(requires_grad)

    payload, tensors = serialize([tensor])
    (back,) = deserialize(payload, tensors)

    assert tensors
    assert all(part.layout is torch.strided for part in tensors)
    assert back.layout is tensor.layout
    assert back.requires_grad is requires_grad
    assert back.is_leaf
    assert torch.equal(back.detach().to_dense(), tensor.detach().to_dense())
    if tensor.layout is torch.sparse_coo:
        assert back.is_coalesced() == tensor.is_coalesced()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_tensor_that_was_received_goes_when_its_user_lets_go(make):
    received = round_trip([make(torch.eye(3))])
    gone = weakref.ref(received[0])

    del received

    assert gone() is None


@pytest.mark.filterwarnings("ignore")
def test_quantized_nested_and_mkldnn_tensors_are_kept():
    values = torch.tensor([[0.5, 1.0], [1.5, 2.0]])
    tensor = torch.quantize_per_tensor(values, 0.5, 1, torch.quint8)
    channels = torch.quantize_per_channel(values, torch.ones(2), torch.zeros(2), 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    back = round_trip([tensor, channels, nested, values.to_mkldnn()])

    assert torch.equal(back[0].dequantize(), tensor.dequantize())
    assert back[0].qscheme() == tensor.qscheme()
    assert torch.equal(back[1].dequantize(), channels.dequantize())
    assert back[2].is_nested
    assert torch.equal(back[2].unbind()[1], torch.ones(3))
    assert torch.equal(back[3].to_dense(), values)


class Nested:
    """Serializes in __getstate__ and deserializes in __setstate__."""

    def __init__(self):
        self.value = None

    def __getstate__(self):
        return serialize(PythonUDF(max, (torch.ones(2), torch.zeros(2)), None))

    def __setstate__(self, state):
        self.value = deserialize(*state).args[0]


def test_pickling_may_happen_inside_of_pickling():
    before = torch.full((1,), 3.0)

    first, nested, last = round_trip([before, Nested(), torch.full((1,), 4.0)])

    assert first.item() == 3
    assert torch.equal(nested.value, torch.ones(2))
    assert last.item() == 4


class Refusing:
    def __reduce__(self):
        raise ValueError("not me")


def test_a_failure_leaves_no_table_behind():
    with pytest.raises(ValueError, match="not me"):
        serialize([torch.ones(1), Refusing()])

    assert internal._tables.sending is None
    assert len(serialize(torch.ones(1))[1]) == 1


def test_tables_of_two_threads_do_not_meet():
    results = []

    def work(value):
        for _ in range(200):
            (back,) = round_trip([torch.tensor(value)])
            if back.item() != value:
                results.append(back)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)

    assert results == []


class Custom:
    def __init__(self, value):
        self.value = value


def test_the_first_registered_reducer_wins():
    pickler = internal._InternalRPCPickler()
    pickler._register_reducer(Custom, lambda obj: (Custom, ("first",)))
    pickler._register_reducer(Custom, lambda obj: (Custom, ("second",)))

    assert pickler.deserialize(*pickler.serialize(Custom(0))).value == "first"


@pytest.mark.filterwarnings("ignore")
def test_script_modules_travel_with_their_code():
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

    back = round_trip([torch.jit.script(Double())])[0]

    assert torch.equal(back(torch.ones(2)), torch.full((2,), 2.0))


def test_futures_cannot_be_pickled():
    with pytest.raises(RuntimeError, match=r"Can not pickle torch.futures.Future"):
        _internal_rpc_pickler.serialize(torch.futures.Future())


def test_profiling_key_names_mode_function_and_workers():
    key = internal._build_rpc_profiling_key(internal.RPCExecMode.ASYNC, "foo", "worker0", "worker1")

    assert key == "rpc_async#foo(worker0 -> worker1)"
