"""Tensors on their way: which bytes travel, what arrives, and who keeps memory alive."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensorcall import _tensorcall

testing = _tensorcall._testing

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED, key=str)
MAX_GAP = 4096
COPIED = 64 << 10

pytestmark = pytest.mark.filterwarnings(
    "ignore:(B?Complex|Quantized|torch.quantize|The PyTorch API of nested|Sparse)"
)


@pytest.fixture(params=["stable", "attributes"])
def path(request: pytest.FixtureRequest) -> str:
    """Each way to torch that this torch offers."""
    if request.param == "stable" and testing.path() != "stable":
        pytest.skip("this torch lacks the stable C interface")
    return request.param


@pytest.fixture
def send(path: str) -> Callable[[Any], Any]:
    return lambda value: testing.roundtrip(value, path)


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's whole storage."""
    return bytes(tensor.untyped_storage())


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:
        pytest.skip(f"this torch cannot make {dtype}")


def test_torch_2_15_is_reached_by_the_stable_interface() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        pytest.skip("older torch")

    assert testing.path() == "stable"


class TestWhatArrives:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_keeps_its_bits(self, send: Any, dtype: torch.dtype) -> None:
        tensor = empty((4, 3), dtype)
        tensor.untyped_storage().copy_(torch.arange(tensor.nbytes, dtype=torch.uint8).untyped_storage())

        result = send(tensor)

        assert result.dtype is dtype
        assert result.shape == tensor.shape
        assert raw(result) == raw(tensor)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_keeps_views_and_strides(self, send: Any, dtype: torch.dtype) -> None:
        tensor = empty((4, 3), dtype)
        tensor.untyped_storage().copy_(torch.arange(tensor.nbytes, dtype=torch.uint8).untyped_storage())

        column, whole, tail = send([tensor[:, 1], tensor, tensor[2:]])

        assert column.dtype is whole.dtype is tail.dtype is dtype
        assert column.stride() == (3,)
        assert whole.data_ptr() + 6 * whole.itemsize == tail.data_ptr()
        assert whole.data_ptr() + whole.itemsize == column.data_ptr()
        assert raw(whole) == raw(tensor)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.tensor(3.5),
            torch.empty(0),
            torch.empty(2, 0, 3),
            torch.empty(0, 3).t(),
            torch.arange(6.0).reshape(2, 3),
            torch.arange(6.0).reshape(2, 3).t(),
            torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.arange(3.0).reshape(3, 1).expand(3, 4),
            torch.arange(3.0)[1],
            torch.arange(10.0).unfold(0, 3, 1),
            torch.arange(10.0)[::3],
            torch.ones(1, 5).as_strided((1, 5), (100, 1)),
            torch.tensor([True, False]),
            torch.tensor([], dtype=torch.int64),
        ],
        ids=lambda t: f"{tuple(t.shape)}-{t.stride()}",
    )
    def test_values_shape_and_strides_are_kept(self, send: Any, tensor: torch.Tensor) -> None:
        result = send(tensor)

        assert torch.equal(result, tensor)
        assert result.dtype == tensor.dtype
        assert result.shape == tensor.shape
        assert result.stride() == tensor.stride()
        assert result.device == tensor.device
        assert result.is_contiguous() == tensor.is_contiguous()

    def test_it_is_private_writable_and_a_base_of_its_own(self, send: Any) -> None:
        tensor = torch.zeros(3)

        result = send(tensor)
        result.add_(1)

        assert tensor.tolist() == [0, 0, 0]
        assert result.tolist() == [1, 1, 1]
        assert type(result) is torch.Tensor
        assert not result._is_view()

    def test_a_conjugate_stays_one(self, send: Any) -> None:
        tensor = torch.tensor([1 - 2j, 3 + 0j]).conj()

        result = send(tensor)

        assert result.is_conj()
        assert torch.equal(result, tensor)

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
    def test_a_negative_view_stays_one(self, send: Any, dtype: torch.dtype) -> None:
        imaginary = torch.tensor([1 - 2j, 3 + 5j], dtype=dtype).conj().imag
        complex_ = torch._neg_view(torch.tensor([1 + 1j], dtype=dtype))

        for tensor in (imaginary, complex_, complex_.conj()):
            result = send(tensor)
            assert result.is_neg() == tensor.is_neg()
            assert result.is_conj() == tensor.is_conj()
            assert torch.equal(result, tensor)

    def test_requires_grad_is_kept_on_a_leaf(self, send: Any) -> None:
        leaf = torch.ones(2, requires_grad=True)
        inner = leaf * 2
        conjugate = torch.ones(2, dtype=torch.complex64, requires_grad=True).conj()

        for tensor in (leaf, inner, conjugate):
            result = send(tensor)
            assert result.requires_grad
            assert result.is_leaf
            assert result.grad_fn is None
            assert torch.equal(result, tensor)
        assert not send(leaf.detach()).requires_grad

    def test_one_object_twice_is_one_object(self, send: Any) -> None:
        tensor = torch.ones(2)

        first, second, other = send([tensor, tensor, torch.ones(2)])

        assert first is second
        assert other is not first

    def test_many_tensors_keep_their_places(self, send: Any) -> None:
        tensors = [torch.full((2,), float(i)) for i in range(50)]

        result = send([*tensors, *reversed(tensors)])

        assert [int(t[0]) for t in result] == [*range(50), *reversed(range(50))]
        assert result[0] is result[-1]

    def test_resizing_works_within_the_storage_and_not_beyond(self, send: Any) -> None:
        # As with TensorPipe, whose storages cannot be resized either.
        result = send(torch.arange(6.0))

        assert result.resize_(2, 2).tolist() == [[0, 1], [2, 3]]
        with pytest.raises(RuntimeError, match="not resizable"):
            result.resize_(7)

    @pytest.mark.parametrize("tensors", [[torch.arange(6.0)], [torch.empty(0, 2)]], ids=["full", "empty"])
    def test_the_default_device_of_the_receiver_does_not_matter(self, send: Any, tensors: Any) -> None:
        tensors = [*tensors, *tensors, tensors[0][:1]]

        with torch.device("meta"):
            results = send(tensors)

        assert [r.device.type for r in results] == ["cpu", "cpu", "cpu"]
        assert all(torch.equal(a, b) for a, b in zip(results, tensors, strict=True))

    def test_memory_of_a_result_outlives_everything_else(self, send: Any) -> None:
        result = send({"x": torch.arange(100_000.0)})["x"][5:]
        gc.collect()

        assert torch.equal(result, torch.arange(5.0, 100_000.0))


class TestSharing:
    def test_views_of_one_storage_share_again(self, send: Any) -> None:
        base = torch.arange(12.0).reshape(3, 4)

        whole, row, transposed = send([base, base[1], base.t()])
        row.zero_()

        assert whole[1].tolist() == [0, 0, 0, 0]
        assert transposed[:, 1].tolist() == [0, 0, 0, 0]
        assert whole.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()

    def test_views_that_share_nothing_travel_apart(self, path: str) -> None:
        base = torch.arange(12.0).reshape(3, 4)

        descs, buffers = testing.describe([base[0], base[1]], path)

        assert [len(b) for b in buffers] == [16, 16]
        assert [d["buffer"] for d in descs] == [0, 1]

    def test_shared_bytes_travel_once(self, path: str) -> None:
        base = torch.arange(100.0)

        descs, buffers = testing.describe([base[10:50], base[40:60], base[90:]], path)

        assert sorted(len(b) for b in buffers) == [10 * 4, 50 * 4]
        assert descs[0]["buffer"] == descs[1]["buffer"] != descs[2]["buffer"]
        assert descs[1]["offset"] == 30 * 4

    def test_views_of_different_dtypes_share(self, send: Any) -> None:
        numbers = torch.tensor([1.0, 2.0, 3.0])

        bits, odd, result = send([numbers.view(torch.int32), numbers.view(torch.uint8)[1:8], numbers])
        bits[0] = 0
        odd[3:] = 0

        assert result.tolist() == [0, 0, 3]

    def test_an_unaligned_neighbour_does_not_move_anyone_between_items(self, path: str) -> None:
        base = torch.arange(64, dtype=torch.uint8)
        odd, numbers = base[3:20], base[8:40].view(torch.float64)

        descs, buffers = testing.describe([odd, numbers], path)
        first, second = testing.roundtrip([odd, numbers], path)
        first[5] = 255

        assert len(buffers) == 1
        assert descs[1]["offset"] % 8 == 0
        assert second.view(torch.uint8)[0] == 255
        assert second.view(torch.uint8)[1:].tolist() == list(range(9, 40))
        assert second.data_ptr() % 8 == 0

    def test_interleaved_columns_with_small_gaps_share(self, send: Any) -> None:
        base = torch.arange(30.0).reshape(10, 3)

        left, right = send([base[:, :2], base[:, 1:]])
        left[0, 1] = -1

        assert right[0, 0] == -1
        assert right.stride() == (3, 1)

    def test_overlapping_views_with_large_gaps_travel_apart_and_packed(self, path: str) -> None:
        base = torch.arange(1_000_000.0).reshape(1000, 1000)
        left, right = base[:, :500], base[:, 400:800]

        descs, buffers = testing.describe([left, right], path)
        result = testing.roundtrip([left, right], path)

        assert [len(b) for b in buffers] == [500 * 1000 * 4, 400 * 1000 * 4]
        assert [d["strides"] for d in descs] == [None, None]
        assert torch.equal(result[0], left)
        assert torch.equal(result[1], right)

    def test_a_view_with_gaps_shares_with_the_whole_that_it_lies_in(self, path: str) -> None:
        base = torch.arange(1_000_000.0).reshape(1000, 1000)
        far = torch.zeros(1)

        _, buffers = testing.describe([base[:, ::7], far, base], path)
        part, _, whole = testing.roundtrip([base[:, ::7], far, base], path)
        part.zero_()

        assert sum(len(b) for b in buffers) == base.nbytes + far.nbytes
        assert part.stride() == (1000, 7)
        assert whole[:, ::7].abs().sum() == 0
        assert whole[5, 1] == 5001


class TestWhatTravels:
    def test_a_row_travels_without_its_storage(self, path: str) -> None:
        base = torch.arange(1_000_000.0).reshape(1000, 1000)

        descs, buffers = testing.describe([base[7]], path)

        assert [len(b) for b in buffers] == [4000]
        assert descs[0]["strides"] is None

    def test_bytes_between_elements_do_not_leave_the_process(self, path: str) -> None:
        base = torch.full((4, 4), 77, dtype=torch.uint8)
        view = base[:, :2]

        descs, buffers = testing.describe([view], path)

        assert descs[0]["strides"] == [4, 1]
        assert buffers == [bytes([77, 77, 0, 0] * 3 + [77, 77])]

    def test_bytes_between_shared_views_do_not_leave_the_process(self, path: str) -> None:
        base = torch.full((3, 8), 77, dtype=torch.uint8)

        _, buffers = testing.describe([base[:, :3], base[:, 2:5]], path)

        assert buffers == [bytes(([77] * 5 + [0] * 3) * 2 + [77] * 5)]

    @pytest.mark.parametrize("gap", [MAX_GAP, MAX_GAP + 1])
    def test_the_receiver_holds_at_most_a_page_of_gaps(self, path: str, gap: int) -> None:
        view = torch.ones(2, 100 + gap, dtype=torch.uint8)[:, :100]

        descs, buffers = testing.describe([view], path)

        assert [len(b) for b in buffers] == [200 + gap if gap <= MAX_GAP else 200]
        assert (descs[0]["strides"] is None) == (gap > MAX_GAP)
        assert torch.equal(testing.roundtrip(view, path), view)

    def test_a_large_expanded_view_with_gaps_stays_expanded(self, path: str) -> None:
        base = torch.arange(40_000.0).reshape(4, 10_000)
        view = base[:, None, :5000].expand(4, 1000, 5000)

        descs, buffers = testing.describe([view], path)

        assert [len(b) for b in buffers] == [4 * 5000 * 4]
        assert descs[0]["strides"] == [5000, 0, 1]
        assert torch.equal(testing.roundtrip(view, path), view)

    def test_a_large_strided_view_arrives_right(self, send: Any) -> None:
        view = torch.arange(2_000_000.0).reshape(100, 20, 1000).permute(2, 0, 1)[::3, :, 1:]

        result = send(view)

        assert torch.equal(result, view)
        assert result.is_contiguous()


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("make", "error"),
        [
            (lambda: torch.eye(3).to_sparse(), NotImplementedError),
            (lambda: torch.eye(3).to_sparse_csr(), NotImplementedError),
            (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), NotImplementedError),
            (lambda: torch.eye(3).to_mkldnn(), NotImplementedError),
            (lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), NotImplementedError),
            (lambda: torch._efficientzerotensor((2,)), NotImplementedError),
            (lambda: torch._to_functional_tensor(torch.ones(2)), NotImplementedError),
            (lambda: torch.nn.Parameter(torch.eye(3)), TypeError),
            (lambda: 3, TypeError),
        ],
        ids=["coo", "csr", "nested", "mkldnn", "quantized", "zero", "functional", "subclass", "number"],
    )
    def test_what_is_not_plain_memory(
        self, path: str, make: Callable[[], Any], error: type[Exception], capfd: Any
    ) -> None:
        try:
            tensor = make()
        except RuntimeError as reason:
            pytest.skip(f"this torch cannot make one: {reason}")
        capfd.readouterr()

        with pytest.raises(error):
            testing.describe([tensor], path)
        with pytest.raises(TypeError, match="not plain"):
            testing.roundtrip(object(), path)
        assert capfd.readouterr().err == ""

    def test_a_wrapper_of_vmap(self, path: str) -> None:
        seen = []

        def inner(x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(RuntimeError):
                testing.describe([x], path)
            seen.append(type(x))
            return x

        torch.vmap(inner)(torch.ones(3, 2))

        assert seen == [torch.Tensor]

    def test_another_device_in_the_words_that_programs_know(self, path: str) -> None:
        with pytest.raises(RuntimeError, match=r"^TensorPipe RPC backend only supports CPU") as error:
            testing.describe([torch.ones(2, device="meta")], path)

        assert str(error.value).endswith("but found tensor on device: meta")


class TestLifetimes:
    def test_a_small_tensor_may_be_changed_at_once(self) -> None:
        tensor = torch.zeros(COPIED // 4)

        result = testing.owner_dropped_outside(tensor, lambda: tensor.fill_(1))

        assert result.sum() == 0

    def test_a_large_one_is_read_from_its_place(self) -> None:
        tensor = torch.zeros(COPIED // 4 + 1)

        result = testing.owner_dropped_outside(tensor, lambda: tensor.fill_(1))

        assert result.sum() == tensor.numel()

    @pytest.mark.parametrize("how", ["set_", "data", "del"])
    def test_a_large_ones_memory_survives_what_happens_to_the_tensor(self, how: str) -> None:
        held = [torch.full((1 << 20,), 3.0)]

        def meanwhile() -> None:
            if how == "set_":
                held[0].set_(torch.zeros(1))
            elif how == "data":
                held[0].data = torch.zeros(1)
            else:
                held.clear()
            gc.collect()
            torch.full((1 << 20,), 4.0)

        result = testing.owner_dropped_outside(held[0], meanwhile)

        assert torch.equal(result, torch.full((1 << 20,), 3.0))

    def test_what_a_foreign_thread_let_go_is_freed_soon(self) -> None:
        tensor = torch.zeros(1 << 20)
        freed = weakref.ref(tensor.untyped_storage())
        tensors = [tensor]
        del tensor

        testing.owner_dropped_outside(tensors, tensors.clear)

        # The door back into Python drained the graveyard.
        assert freed() is None
