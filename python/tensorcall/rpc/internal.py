"""Pickling: an object becomes bytes and a table of tensors.

A plain tensor in a message is replaced by its index in the table, so that its memory goes to
the other worker as it is and never through a pickle. What is not plain memory (sparse, nested,
quantized tensors and subclasses) is taken apart until the parts are.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_Reducer = Callable[[Any], Any]

_PROTOCOL = 5


class RPCExecMode(enum.Enum):
    """How a call is made; the value is part of its profiling key."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function with its arguments, as a call carries them."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """What is left of an exception when only its text and type are known."""

    msg: str
    exception_type: type[BaseException]


class _Tables(threading.local):
    """The tensor tables that this thread is filling and reading; ``None`` outside of pickling."""

    sending: list[torch.Tensor] | None = None
    receiving: Sequence[torch.Tensor] | None = None


_tables = _Tables()


class _InternalRPCPickler:
    """Turns objects into bytes and tensors, and back.

    Reentrant: a ``__getstate__`` or ``__setstate__`` may itself serialize and deserialize.
    """

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, _Reducer] = {}
        self._lock = threading.Lock()
        self._table: dict[type, _Reducer] = {}
        self._table_version = -1

    def _register_reducer(self, obj_class: type, reducer: _Reducer) -> None:
        """Reduce instances of exactly `obj_class` with `reducer`; the first registration wins."""
        with self._lock:
            self._class_reducer_dict.setdefault(obj_class, reducer)
            self._table_version = -1

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return the bytes of `obj` and the tensors that they refer to."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, _PROTOCOL)
        table = self._dispatch_table()
        if isinstance(obj, torch.jit.ScriptModule) and type(obj) not in table:
            table = table | {type(obj): _reduce_script_module}
        pickler.dispatch_table = table
        outer = _tables.sending
        tensors: list[torch.Tensor] = []
        _tables.sending = tensors
        try:
            pickler.dump(obj)
        finally:
            _tables.sending = outer
        return buffer.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """Return the object that :meth:`serialize` was given."""
        outer = _tables.receiving
        _tables.receiving = tensor_table
        try:
            return pickle.loads(binary_data)
        finally:
            _tables.receiving = outer

    def _dispatch_table(self) -> dict[type, _Reducer]:
        # Reducers that the user registers with copyreg later must count too; the table only grows.
        version = len(copyreg.dispatch_table)
        if version != self._table_version:
            with self._lock:
                self._table = {**copyreg.dispatch_table, **_BUILT_IN, **self._class_reducer_dict}
                self._table_version = version
        return self._table


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
        table = _tables.sending
        if table is None:
            raise pickle.PicklingError("a tensor of an RPC message can only be pickled by the RPC pickler")
        table.append(tensor)
        return _receive_tensor, (len(table) - 1,)
    whole = tensor.detach()
    reduced = _reduce_quantized(whole) if whole.is_quantized else _reduce_parts(whole)
    # The parts come from the detached tensor: the flag has to be put back on the whole.
    return (_rebuild_leaf, reduced) if tensor.requires_grad else reduced


def _receive_tensor(index: int) -> torch.Tensor:
    table = _tables.receiving
    if table is None:
        raise pickle.UnpicklingError("a tensor of an RPC message can only be unpickled by the RPC pickler")
    return table[index]


def _reduce_parts(tensor: torch.Tensor) -> tuple[Any, Any]:
    # torch's own way for sparse tensors keeps each one it rebuilds in a list until torch.load comes by.
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
        return _rebuild_mkldnn, (tensor.to_dense(),)
    reduced: Any = tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
    return reduced[0], reduced[1]


def _reduce_quantized(tensor: torch.Tensor) -> tuple[Any, Any]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return _rebuild_per_tensor, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return _rebuild_per_channel, (tensor.int_repr(), scales, zero_points, tensor.q_per_channel_axis())


def _rebuild_leaf(rebuild: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    return rebuild(*args).detach().requires_grad_()


def _rebuild_coo(
    indices: torch.Tensor, values: torch.Tensor, size: tuple[int, ...], is_coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False, is_coalesced=is_coalesced)


def _rebuild_compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    size: tuple[int, ...],
    layout: torch.layout,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, check_invariants=False
    )


def _rebuild_mkldnn(dense: torch.Tensor) -> torch.Tensor:
    return dense.to_mkldnn()


def _rebuild_per_tensor(values: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(values, scale, zero_point)


def _rebuild_per_channel(
    values: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int
) -> torch.Tensor:
    return torch._make_per_channel_quantized_tensor(values, scales, zero_points, axis)


def _reduce_script_module(module: torch.jit.ScriptModule) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load_script_module, (file.getvalue(),)


def _load_script_module(code: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(code))  # type: ignore[no-any-return, no-untyped-call]


_BUILT_IN: dict[type, _Reducer] = {
    torch.Tensor: _reduce_tensor,
    torch.jit.RecursiveScriptModule: _reduce_script_module,  # type: ignore[attr-defined]
}

_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the bytes of `obj` and the tensors that they refer to."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """Return the object that :func:`serialize` was given."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name under which a profiler shows a call."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
