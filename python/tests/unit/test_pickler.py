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
    """LOG row 68."""
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
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.stack([torch.eye(2), 2 * torch.eye(2)]).to_sparse_csr(),
        lambda: torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), torch.ones(2)
        ),
        lambda: torch.arange(12.0).reshape(3, 2, 2).to_sparse(1),
        lambda: torch.zeros(0, 4).to_sparse(),
        lambda: torch.tensor(3.0).to_sparse(),
        lambda: (torch.eye(3, requires_grad=True) * 2).to_sparse(),
    ],
    ids=["batched", "small indices", "hybrid", "empty", "zero-dimensional", "with a history"],
)
def test_unusual_sparse_tensors_are_kept(make):
    tensor = make()

    back = round_trip([tensor])[0]

    assert back.layout is tensor.layout
    assert back.requires_grad is tensor.requires_grad
    assert back.is_leaf
    assert torch.equal(back.detach().to_dense(), tensor.detach().to_dense())
    if tensor.layout is torch.sparse_csr:
        assert back.crow_indices().dtype is tensor.crow_indices().dtype


VALUES = torch.arange(8.0).reshape(2, 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(VALUES, 0.5, 1, torch.quint8),
        lambda: torch.quantize_per_tensor(VALUES, 0.5, 0, torch.qint32).t(),
        lambda: torch.quantize_per_channel(VALUES, torch.ones(2), torch.zeros(2), 0, torch.qint8),
        lambda: torch.quantize_per_channel(VALUES, torch.ones(4), torch.zeros(4), 1, torch.quint8),
        lambda: torch.quantize_per_channel(VALUES, torch.ones(2), torch.zeros(2), 0, torch.quint4x2),
        lambda: torch.quantize_per_tensor(torch.tensor(1.0), 0.5, 1, torch.qint8),
    ],
)
def test_quantized_tensors_are_kept(make):
    tensor = make()

    back = round_trip([tensor])[0]

    assert back.dtype is tensor.dtype
    assert back.qscheme() == tensor.qscheme()
    assert back.stride() == tensor.stride()
    assert torch.equal(back.dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore")
def test_a_view_of_a_quantized_tensor_travels_without_its_storage():
    tensor = torch.quantize_per_tensor(torch.arange(1000.0).reshape(10, 100), 1, 0, torch.qint32)[3]

    payload, tensors = serialize([tensor])

    assert [part.nbytes for part in tensors] == [400]
    assert torch.equal(deserialize(payload, tensors)[0].dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_kept(layout, requires_grad):
    parts = [torch.ones(2, 3), 2 * torch.ones(4, 3)]
    tensor = torch.nested.nested_tensor(parts, layout=layout, requires_grad=requires_grad)

    for sent in (tensor, tensor * 1):
        back = round_trip([sent])[0]

        assert back.is_nested
        assert back.layout is layout
        assert back.requires_grad is requires_grad
        assert back.is_leaf
        assert all(torch.equal(a.detach(), b) for a, b in zip(back.unbind(), parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mkldnn_tensors_are_kept(dtype):
    try:
        tensor = VALUES.to_mkldnn(dtype)
    except RuntimeError as reason:
        pytest.skip(f"this processor cannot make one: {reason}")

    back = round_trip([tensor])[0]

    assert back.layout is torch._mkldnn
    assert back.dtype is dtype
    assert torch.equal(back.to_dense(), tensor.to_dense())


class Tagged(torch.Tensor):
    """Keeps an attribute."""


class Slotted(torch.Tensor):
    __slots__ = ("slot",)


class Watching(torch.Tensor):
    """Sees the functions that it is given to, as many libraries' subclasses do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Reduced(torch.Tensor):
    def __reduce_ex__(self, protocol):
        return torch.full, ((2,), 7.0)


@pytest.mark.parametrize("cls", [Tagged, Watching])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_subclasses_keep_their_attributes_and_their_data_goes_to_the_table(cls, requires_grad):
    tensor = torch.arange(100_000.0).as_subclass(cls)[10:13].requires_grad_(requires_grad)
    tensor.tag = {"a": torch.ones(2)}

    payload, tensors = serialize(tensor)
    back = deserialize(payload, tensors)

    assert [(type(part), part.nbytes) for part in tensors] == [(torch.Tensor, 12), (torch.Tensor, 8)]
    assert type(back) is cls
    assert back.tolist() == [10, 11, 12]
    assert torch.equal(back.tag["a"], torch.ones(2))
    assert back.requires_grad is requires_grad
    assert back.is_leaf


def test_a_subclass_with_slots_keeps_them():
    tensor = torch.ones(2).as_subclass(Slotted)
    tensor.slot = "kept"

    assert round_trip(tensor).slot == "kept"


def test_a_subclass_that_reduces_itself_is_left_to_it():
    assert round_trip(torch.ones(2).as_subclass(Reduced)).tolist() == [7, 7]


@pytest.mark.filterwarnings("ignore")
def test_a_sparse_tensor_of_a_subclass_stays_one():
    tensor = torch.Tensor._make_subclass(Tagged, torch.eye(3).to_sparse())

    back = round_trip(tensor)

    assert type(back) is Tagged
    assert torch.equal(back.to_dense(), torch.eye(3))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameters_and_buffers_keep_what_they_are(requires_grad):
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=requires_grad)
    parameter.tag = "kept"
    buffer = torch.nn.Buffer(torch.zeros(2))
    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(torch.eye(2))

    back = round_trip([parameter, buffer, module, parameter, torch.nn.UninitializedParameter()])

    assert type(back[0]) is torch.nn.Parameter
    assert back[0].requires_grad is requires_grad
    assert back[0].tag == "kept"
    assert isinstance(back[1], torch.nn.Buffer)
    assert torch.equal(back[2].weight, torch.eye(2))
    assert back[3] is back[0]
    assert isinstance(back[4], torch.nn.UninitializedParameter)


def test_tensors_without_data_are_refused_by_name():
    with torch._subclasses.FakeTensorMode():
        tensor = torch.ones(2)

    with pytest.raises(NotImplementedError, match="a FakeTensor has no data"):
        serialize([tensor])


def test_a_dtensor_is_refused_by_a_process_whose_part_it_is_not(tmp_path):
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        payload, tensors = serialize(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        back = deserialize(payload, tensors)
        assert back.full_tensor().tolist() == [1, 1, 1, 1]
    finally:
        distributed.destroy_process_group()

    with pytest.raises(RuntimeError, match="part of its tensor that belongs to rank 0"):
        deserialize(payload, tensors)


def test_storages_travel_in_the_table_and_share_with_their_tensors():
    tensor = torch.arange(4.0)

    back, storage, typed = round_trip([tensor, tensor.untyped_storage(), tensor._typed_storage()])
    storage.fill_(0)

    assert isinstance(storage, torch.UntypedStorage)
    assert storage.data_ptr() == typed._untyped_storage.data_ptr() == back.data_ptr()
    assert typed.dtype is torch.float32


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
