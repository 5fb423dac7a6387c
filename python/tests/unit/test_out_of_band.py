"""Large memory inside objects goes beside the pickle and arrives usable where it was received."""

from __future__ import annotations

import array
import pickle
import sys

import pytest
import torch
from tensorcall import _tensorcall
from tensorcall.rpc import _out_of_band, internal

np = pytest.importorskip("numpy")

LARGE = _out_of_band.PIECE_BYTES + 1000


def sent(obj, *, lend=False):
    payload, tensors = internal._internal_rpc_pickler.serialize(obj, lend=lend)
    # What the wire does: other memory, other objects.
    return payload, [tensor.clone() for tensor in tensors]


def round_trip(obj):
    return internal.deserialize(*sent(obj))


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(LARGE, dtype=np.uint8),
        lambda: np.arange(40_000.0).reshape(200, 200),
        lambda: np.asfortranarray(np.arange(40_000.0).reshape(200, 200)),
        lambda: np.zeros(30_000, dtype=[("a", "<f4"), ("b", ">i2")]),
        lambda: np.full(50_000, "text"),
        lambda: np.arange(50_000).astype("datetime64[s]"),
        lambda: np.ma.masked_array(np.arange(40_000.0), mask=np.arange(40_000) % 2),
        lambda: np.arange(100_000.0)[::2],
        lambda: np.broadcast_to(np.arange(3.0), (40_000, 3)),
        lambda: np.zeros((0, 1 << 20)),
        lambda: np.array([1, "a", None] * 100, dtype=object),
    ],
)
def test_numpy_arrays_arrive_as_they_were(make):
    value = make()

    back = round_trip({"x": [value, 1]})["x"][0]

    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert np.array_equal(back, value)
    assert back.flags.f_contiguous == value.flags.f_contiguous or not value.flags.forc
    back[...] = back[...]


def test_a_large_array_is_not_in_the_pickle_and_is_used_where_it_was_received():
    value = np.arange(100_000.0)

    payload, tensors = sent(value)
    back = internal.deserialize(payload, tensors)

    assert len(payload) < 500
    assert tensors[0].data_ptr() == back.ctypes.data
    assert back.flags.writeable
    assert back.flags.aligned


def test_a_small_array_stays_in_the_pickle():
    payload, tensors = sent(np.zeros(_out_of_band.BUFFER_BYTES, dtype=np.uint8))

    assert tensors == []
    assert internal.deserialize(payload, tensors).flags.writeable


def test_a_read_only_array_stays_read_only():
    value = np.arange(100_000.0)
    value.flags.writeable = False

    assert not round_trip(value).flags.writeable


def test_memory_is_copied_unless_it_is_lent():
    value = np.zeros(100_000)

    _, copied = internal.serialize(value)
    _, lent = internal._internal_rpc_pickler.serialize(value, lend=True)

    assert copied[0].data_ptr() != value.ctypes.data
    assert lent[0].data_ptr() == value.ctypes.data


def test_lent_memory_outlives_its_array():
    value = np.arange(100_000.0)
    payload, tensors = internal._internal_rpc_pickler.serialize(value, lend=True)
    expected = value.copy()

    del value

    assert np.array_equal(internal.deserialize(payload, tensors), expected)


def test_received_memory_outlives_the_table():
    payload, tensors = sent([np.arange(100_000.0)])
    back = internal.deserialize(payload, tensors)[0][5:]

    tensors.clear()

    assert back[0] == 5
    assert back[-1] == 99_999


@pytest.mark.parametrize("size", [0, 10, _out_of_band.PIECE_BYTES, LARGE, 3 * LARGE])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_of_any_size_arrive_as_they_were(kind, size):
    value = kind(i % 251 for i in range(size))

    back = round_trip(["before", value, {"after": value}])

    assert back[1] == value
    assert type(back[1]) is kind
    assert back[2]["after"] is back[1]


def test_large_bytes_are_not_in_the_pickle():
    payload, tensors = sent([bytes(LARGE), bytearray(LARGE), "text"])

    assert len(payload) < 500
    assert [tensor.nbytes for tensor in tensors] == [LARGE, LARGE]


def test_a_bytearray_may_grow_at_once():
    value = bytearray(LARGE)
    kept = internal._internal_rpc_pickler.serialize(value, lend=True)

    value += b"more"

    assert len(internal.deserialize(*kept)) == LARGE


def test_an_array_of_the_standard_library_arrives_and_may_grow_at_once():
    value = array.array("d", range(40_000))

    kept = internal._internal_rpc_pickler.serialize([value, array.array("i", [1, 2])], lend=True)
    value.append(1)
    back = internal.deserialize(*kept)

    assert len(kept[0]) < 500
    assert back[0] == value[:-1]
    assert back[1].tolist() == [1, 2]


def test_pickle_buffers_arrive_as_memory_of_the_same_kind():
    writable, constant = bytearray(b"a" * LARGE), b"b" * LARGE

    first, second, small = round_trip(
        [pickle.PickleBuffer(writable), pickle.PickleBuffer(constant), pickle.PickleBuffer(bytearray(b"c"))]
    )

    assert memoryview(first) == writable
    assert not memoryview(first).readonly
    assert memoryview(second) == constant
    assert memoryview(second).readonly
    assert small == b"c"


def test_a_view_with_gaps_is_refused_in_the_words_of_pickle():
    with pytest.raises(pickle.PicklingError, match="non-contiguous"):
        internal.serialize(pickle.PickleBuffer(memoryview(bytes(2 * LARGE))[::2]))


def test_all_kinds_of_memory_keep_their_places():
    value = {
        "tensor": torch.arange(5.0),
        "array": np.arange(100_000),
        "bytes": b"x" * LARGE,
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "text": "é" * LARGE,
        "numbers": list(range(200_000)),
        "arrays": [np.full(70_000, i, dtype=np.uint8) for i in range(3)],
        "bytearray": bytearray(b"y" * LARGE),
        "exception": ValueError(b"z" * LARGE, np.ones(100_000)),
    }

    back = round_trip(value)

    for name in ("bytes", "text", "numbers", "bytearray"):
        assert back[name] == value[name], name
    assert torch.equal(back["tensor"], value["tensor"])
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert np.array_equal(back["array"], value["array"])
    assert [int(a[0]) for a in back["arrays"]] == [0, 1, 2]
    assert back["exception"].args[0] == b"z" * LARGE


class Nested:
    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        return internal.serialize(self.value)

    def __setstate__(self, state):
        self.value = internal.deserialize(*state)


def test_pickles_inside_of_pickles_have_memory_of_their_own():
    value = [np.arange(100_000), Nested({"a": np.ones(100_000), "b": bytes(LARGE)}), b"x" * LARGE]

    first, nested, last = round_trip(value)

    assert np.array_equal(first, value[0])
    assert np.array_equal(nested.value["a"], np.ones(100_000))
    assert nested.value["b"] == bytes(LARGE)
    assert last == value[2]


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_note_that_does_not_fit_is_refused(cut):
    payload, tensors = sent([np.arange(100_000), bytes(LARGE)])

    with pytest.raises(pickle.UnpicklingError):
        internal.deserialize(payload, tensors[:1])
    with pytest.raises(pickle.UnpicklingError):
        internal.deserialize(payload[-cut:], tensors)
    with pytest.raises((pickle.UnpicklingError, EOFError, IndexError, ValueError)):
        internal.deserialize(payload[: len(payload) // 2] + payload[-9:], tensors)


def test_memory_as_a_tensor_and_back():
    memory = bytearray(b"abc")

    tensor = _tensorcall.tensor_on(memory)
    view = memoryview(_tensorcall.memory_of(tensor))
    view[0] = ord("x")

    assert memory == b"xbc"
    assert tensor.dtype is torch.uint8
    assert not view.readonly
    with pytest.raises(BufferError):
        memory.append(1)
    with pytest.raises(BufferError, match="gaps"):
        _tensorcall.tensor_on(memoryview(memory)[::2])
    with pytest.raises(ValueError, match="contiguous tensor of bytes"):
        _tensorcall.memory_of(tensor[::2])
    with pytest.raises(ValueError, match="contiguous tensor of bytes"):
        _tensorcall.memory_of(torch.ones(2))


def test_lent_memory_is_let_go():
    value = np.zeros(100_000)
    before = sys.getrefcount(value)

    kept = internal._internal_rpc_pickler.serialize(value, lend=True)
    assert sys.getrefcount(value) > before
    del kept

    assert sys.getrefcount(value) == before


def test_arrays_go_to_a_worker_and_back(alone):
    value = np.arange(1_000_000.0)

    double = alone.rpc_sync("me", np.multiply, args=(value, 2.0))
    changed = alone.rpc_sync("me", changed_in_place, args=(value,))
    future = alone.rpc_async("me", total, args=(value,))
    value[:] = 0

    assert np.array_equal(double, np.arange(1_000_000.0) * 2)
    assert changed[0] == 7
    # Arrays are copied when a call is made that is not waited for, as torch does.
    assert future.wait() == np.arange(1_000_000.0).sum()
    assert double.flags.writeable


def changed_in_place(value):
    value[0] = 7
    return value


def total(value):
    return float(value.sum())
