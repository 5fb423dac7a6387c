"""Tensors that are not one run of plain memory, taken apart into such ones and put together again.

Sparse, quantized, nested and mkldnn tensors, subclasses, and bare storages. Each reducer returns what
pickle's ``__reduce__`` does; the plain tensors among the parts reach the table of the message. What
cannot be taken apart raises here, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

_PROTOCOL = 5
_from_type: Any = torch._tensor._rebuild_from_type_v2


def reduce(tensor: torch.Tensor) -> Reduced:
    """Take a ``torch.Tensor`` apart that is not strided memory."""
    whole = tensor.detach()
    reduced = _reduce_quantized(whole) if whole.is_quantized else _reduce_layout(whole)
    # The parts come from the detached tensor: the flag has to be put back on the whole.
    return (_rebuild_leaf, reduced) if tensor.requires_grad else reduced


def reduce_subclass(tensor: torch.Tensor) -> Any:
    """Reduce a subclass as it wants to be, with its memory in the table."""
    cls = type(tensor)
    if isinstance(tensor, _without_data()):
        raise NotImplementedError(f"a {cls.__qualname__} has no data that could be sent")
    reduced: Any = tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
    if cls.__module__.startswith("torch.distributed.tensor") and cls.__name__ == "DTensor":
        return _rebuild_part, (_rank(), reduced[0], reduced[1])
    if reduced[0] is not _from_type or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return reduced
    # Torch's own reduction. It would take along the whole storage, and does not rebuild sparse ones.
    with torch._C.DisableTorchFunctionSubclass():
        plain = torch.Tensor._make_subclass(torch.Tensor, tensor)
        return _rebuild_subclass, (reduced[1][1], plain, reduced[1][3], tensor.requires_grad)


def reduce_untyped_storage(storage: torch.UntypedStorage) -> Reduced:
    """Take a storage for the tensor of its bytes."""
    return _rebuild_untyped_storage, (_bytes_of(storage),)


def reduce_typed_storage(storage: torch.TypedStorage) -> Reduced:
    """Take a storage for the tensor of its bytes and its dtype."""
    return _rebuild_typed_storage, (_bytes_of(storage._untyped_storage), storage.dtype)


def _reduce_layout(tensor: torch.Tensor) -> Reduced:
    # Torch's own way for sparse tensors keeps each one it rebuilds in a list until torch.load comes by.
    layout = tensor.layout
    if layout is torch.sparse_coo:
        parts = tensor._indices(), tensor._values()
        return _rebuild_coo, (*parts, tuple(tensor.size()), tensor.is_coalesced())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices()
        return _rebuild_compressed, (*parts, tensor.values(), tuple(tensor.size()), layout)
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices()
        return _rebuild_compressed, (*parts, tensor.values(), tuple(tensor.size()), layout)
    if layout is torch._mkldnn:  # type: ignore[attr-defined]
        return _rebuild_mkldnn, (tensor.to_dense(), tensor.dtype)
    reduced: Any = tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
    return reduced[0], reduced[1]


def _reduce_quantized(tensor: torch.Tensor) -> Reduced:
    # Torch's own way names the storage, since items may be smaller than a byte.
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    reduced: Any = tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
    return reduced[0], reduced[1]


def _rebuild_leaf(rebuild: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    return rebuild(*args).detach().requires_grad_()


def _rebuild_subclass(
    cls: type[torch.Tensor], plain: torch.Tensor, state: Any, requires_grad: bool
) -> torch.Tensor:
    made: torch.Tensor = _from_type(torch.Tensor._make_subclass, cls, (cls, plain, requires_grad), state)
    return made


def _rebuild_part(rank: int, rebuild: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    if _rank() != rank:
        raise RuntimeError(
            f"a DTensor holds the part of its tensor that belongs to rank {rank} of the mesh's job; this "
            "is another process. Send what to_local() or full_tensor() returns"
        )
    return rebuild(*args)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else -1


def _rebuild_coo(
    indices: torch.Tensor, values: torch.Tensor, size: tuple[int, ...], is_coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, size, device=values.device, check_invariants=False, is_coalesced=is_coalesced
    )


def _rebuild_compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    size: tuple[int, ...],
    layout: torch.layout,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, device=values.device, check_invariants=False
    )


def _rebuild_mkldnn(dense: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dense.to_mkldnn(dtype)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _rebuild_untyped_storage(data: torch.Tensor) -> torch.UntypedStorage:
    return data.untyped_storage()


def _rebuild_typed_storage(data: torch.Tensor, dtype: torch.dtype) -> torch.TypedStorage:
    made: torch.TypedStorage = torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=data.untyped_storage(), dtype=dtype, _internal=True
    )
    return made


def _without_data() -> tuple[type, ...]:
    subclasses: Any = torch._subclasses
    return subclasses.fake_tensor.FakeTensor, subclasses.functional_tensor.FunctionalTensor
