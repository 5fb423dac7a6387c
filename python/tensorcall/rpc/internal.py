"""Pickling: an object becomes bytes and a table of tensors.

A plain tensor in a message is replaced by its index in the table, so that its memory goes to
the other worker as it is and never through a pickle. What is not plain memory (sparse, nested,
quantized tensors and subclasses) is taken apart until the parts are (``_layouts``). Large memory
of other objects joins the table too (``_out_of_band``).
"""

from __future__ import annotations

import array
import copyreg
import enum
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _tensorcall
from . import _fork, _layouts, _out_of_band

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


_Rrefs = dict[int, tuple[int, _tensorcall.RRef]]
"""References by their `id`, each with its place in the table of its message."""


class _Tables(threading.local):
    """The tables that this thread is filling and reading; ``None`` outside of pickling.

    Those of tensors belong to one pickle, those of references to a whole message, and so do those of the
    tensors that autograd records.
    """

    sending: list[torch.Tensor] | None = None
    receiving: Sequence[torch.Tensor] | None = None
    recording: list[torch.Tensor] | None = None
    recorded: dict[int, torch.Tensor] | None = None
    sending_rrefs: _Rrefs | None = None
    receiving_rrefs: Sequence[_tensorcall.RRef] | None = None


_tables = _Tables()


class _Table(dict[type, _Reducer]):
    """Reducers by class; subclasses of ``torch.Tensor`` share one."""

    def __missing__(self, cls: type) -> _Reducer:
        if torch.Tensor in cls.__mro__:
            return _layouts.reduce_subclass
        raise KeyError(cls)


class _InternalRPCPickler:
    """Turns objects into bytes and tensors, and back.

    Reentrant: a ``__getstate__`` or ``__setstate__`` may itself serialize and deserialize.
    """

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, _Reducer] = {}
        self._lock = threading.Lock()
        self._table = _Table()
        self._table_version = -1

    def _register_reducer(self, obj_class: type, reducer: _Reducer) -> None:
        """Reduce instances of exactly `obj_class` with `reducer`; the first registration wins."""
        with self._lock:
            self._class_reducer_dict.setdefault(obj_class, reducer)
            self._table_version = -1

    def serialize(self, obj: Any, *, lend: bool = False) -> tuple[bytes, list[torch.Tensor]]:
        """Return the bytes of `obj` and the tensors that they refer to.

        With `lend`, memory of large buffers (numpy arrays for example) is named where it lies, and must
        stay as it is until the tensors were used; otherwise it is copied.
        """
        writer = _out_of_band.Writer(lend=lend)
        pickler = pickle.Pickler(writer, _PROTOCOL, buffer_callback=writer.take_buffer)
        table = self._dispatch_table()
        if isinstance(obj, torch.jit.ScriptModule) and type(obj) not in table:
            table = _Table({**table, type(obj): _reduce_script_module})
        pickler.dispatch_table = table
        outer, recording = _tables.sending, _tables.recording
        tensors: list[torch.Tensor] = []
        _tables.sending = tensors
        if outer is not None:
            # Inside of another pickle, which will see these tensors itself.
            _tables.recording = None
        try:
            pickler.dump(obj)
        finally:
            _tables.sending, _tables.recording = outer, recording
        return writer.finish(tensors), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """Return the object that :meth:`serialize` was given."""
        outer = _tables.receiving
        _tables.receiving = tensor_table
        try:
            return _out_of_band.load(binary_data, tensor_table)
        finally:
            _tables.receiving = outer

    def _dispatch_table(self) -> _Table:
        # Reducers that the user registers with copyreg later must count too; the table only grows.
        version = len(copyreg.dispatch_table)
        if version != self._table_version:
            with self._lock:
                self._table = _Table({**copyreg.dispatch_table, **_BUILT_IN, **self._class_reducer_dict})
                self._table_version = version
        return self._table


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
        table = _tables.sending
        if table is None:
            raise pickle.PicklingError("a tensor of an RPC message can only be pickled by the RPC pickler")
        table.append(tensor)
        reduced: Any = (_receive_tensor, (len(table) - 1,))
    else:
        reduced = _layouts.reduce(tensor)
    if tensor.requires_grad and _tables.recording is not None:
        _tables.recording.append(tensor)
        return _receive_recorded, (len(_tables.recording) - 1, *reduced)
    return reduced


def _receive_tensor(index: int) -> torch.Tensor:
    table = _tables.receiving
    if table is None:
        raise pickle.UnpicklingError("a tensor of an RPC message can only be unpickled by the RPC pickler")
    return table[index]


def _receive_recorded(place: int, rebuild: Callable[..., torch.Tensor], args: Any) -> torch.Tensor:
    """A tensor that the sender's autograd has recorded."""
    tensor = rebuild(*args)
    if _tables.recorded is not None:
        _tables.recorded[place] = tensor
    return tensor


def _reduce_script_module(module: torch.jit.ScriptModule) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load_script_module, (file.getvalue(),)


def _load_script_module(code: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(code))  # type: ignore[no-any-return, no-untyped-call]


_BUILT_IN: dict[type, _Reducer] = {
    torch.Tensor: _reduce_tensor,
    torch.UntypedStorage: _layouts.reduce_untyped_storage,
    torch.TypedStorage: _layouts.reduce_typed_storage,
    array.array: _out_of_band.reduce_array,
    torch.jit.RecursiveScriptModule: _reduce_script_module,  # type: ignore[attr-defined]
}

_internal_rpc_pickler = _InternalRPCPickler()


@_fork.in_child
def _have_a_free_lock() -> None:
    _internal_rpc_pickler._lock = threading.Lock()


def pack(pickler: Any, obj: Any, **options: Any) -> tuple[bytes, list[torch.Tensor], list[_tensorcall.RRef]]:
    """What a message with `obj` consists of: bytes, tensors and references."""
    with collecting_rrefs() as rrefs:
        payload, tensors = pickler.serialize(obj, **options)
    return payload, tensors, [rref for _, rref in rrefs.values()]


class recording:
    """In the block, tensors that need gradients are added to a list as they are pickled; not for `None`."""

    def __init__(self, tensors: list[torch.Tensor] | None) -> None:
        self._tensors = tensors

    def __enter__(self) -> None:
        self._outer, _tables.recording = _tables.recording, self._tensors

    def __exit__(self, *exception: object) -> None:
        _tables.recording = self._outer


class collecting_recorded:
    """In the block, tensors that the sender has recorded are added as they are unpickled, by their places."""

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._tensors = tensors

    def __enter__(self) -> None:
        self._outer, _tables.recorded = _tables.recorded, self._tensors

    def __exit__(self, *exception: object) -> None:
        _tables.recorded = self._outer


class collecting_rrefs:
    """What is pickled in this block is for one message, whose references it collects, by their ids."""

    def __enter__(self) -> _Rrefs:
        self._outer = _tables.sending_rrefs
        rrefs: _Rrefs = {}
        _tables.sending_rrefs = rrefs
        return rrefs

    def __exit__(self, *exception: object) -> None:
        _tables.sending_rrefs = self._outer


def unpack(
    payload: bytes, tensors: Sequence[torch.Tensor], rrefs: Sequence[_tensorcall.RRef], read: Any = None
) -> Any:
    """The object that :func:`pack` was given. `read`, by default :func:`deserialize`, reads the pickle."""
    outer = _tables.receiving_rrefs
    _tables.receiving_rrefs = rrefs
    try:
        return (read or deserialize)(payload, tensors)
    finally:
        _tables.receiving_rrefs = outer


def place_of_rref(rref: _tensorcall.RRef) -> int | None:
    """A reference's index in the table of the message that is being made; ``None`` if there is none."""
    table = _tables.sending_rrefs
    if table is None or _tables.sending is None:
        return None
    place, _ = table.setdefault(id(rref), (len(table), rref))
    return place


def rref_at(index: int) -> _tensorcall.RRef:
    """The reference of that index in the message that is being read."""
    table = _tables.receiving_rrefs
    if table is None:
        raise pickle.UnpicklingError("an RRef of an RPC message can only be unpickled by the RPC pickler")
    return table[index]


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
