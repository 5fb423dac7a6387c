"""A received tensor can be used as one that torch's own RPC brought."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from engines import told_on
from harness import Worker, serve

Use = Callable[[torch.Tensor], Any]

SIZES = {"empty": 0, "small": 6, "copied": 16 << 10, "large": 64 << 10}


def seen(tensor: torch.Tensor) -> Any:
    """What is compared: all that a program sees of a tensor, its values in short."""
    values = tensor.detach().flatten()
    return {
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "offset": tensor.storage_offset(),
        "dtype": str(tensor.dtype),
        "flags": (tensor.requires_grad, tensor.is_leaf, tensor.is_inference(), tensor._is_view()),
        "ends": (values[:5].tolist(), values[-5:].tolist()),
        "sum": values.double().sum().item(),
    }


def saved(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    return len(file.getvalue()), seen(torch.load(io.BytesIO(file.getvalue())))


def with_grad(tensor: torch.Tensor) -> Any:
    tensor.requires_grad_()
    (tensor * 2).sum().backward()
    assert tensor.grad is not None
    return seen(tensor.grad)


def taken_over(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()
    other = torch.empty(0).set_(storage, 0, tensor.shape, tensor.stride())
    other.fill_(3)
    return seen(tensor), storage.resizable(), storage.is_shared(), storage.nbytes()


def given_new_memory(tensor: torch.Tensor) -> Any:
    tensor.set_(torch.arange(8.0))
    tensor.resize_(20)
    return tensor.shape, seen(tensor[:8])


def with_new_data(tensor: torch.Tensor) -> Any:
    tensor.data = torch.arange(9.0)
    return seen(tensor)


def emptied(tensor: torch.Tensor) -> Any:
    tensor.untyped_storage().resize_(0)
    return tensor.untyped_storage().nbytes()


def shared(tensor: torch.Tensor) -> Any:
    tensor.share_memory_()
    return tensor.is_shared(), seen(tensor)


def shared_and_resized(tensor: torch.Tensor) -> Any:
    tensor.share_memory_()
    return seen(tensor.resize_(tensor.numel() + 1)[:-1])


def exported(tensor: torch.Tensor) -> Any:
    array = tensor.numpy()
    array += 1
    return array.flags.writeable, array.flags.aligned, seen(tensor), seen(torch.from_dlpack(tensor))


def as_parameter(tensor: torch.Tensor) -> Any:
    parameter = torch.nn.Parameter(tensor)
    torch.optim.SGD([parameter], lr=0.1).zero_grad()
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5).step()
    return seen(parameter), seen(tensor)


def outlived(tensor: torch.Tensor) -> Any:
    view = tensor[1:]
    del tensor
    gc.collect()
    return seen(view)


USES: dict[str, Use] = {
    "look": seen,
    "resize_ to less": lambda t: seen(t.resize_(max(t.numel() - 2, 0))),
    "resize_ to the same": lambda t: seen(t.resize_(t.numel())),
    "resize_ to more": lambda t: seen(t.resize_(t.numel() + 5)[: t.numel()]),
    "resize_ of the storage to more": lambda t: t.untyped_storage().resize_(t.nbytes + 8).nbytes(),
    "resize_ of the storage to nothing": emptied,
    "resize_as_ a larger one": lambda t: t.resize_as_(torch.empty(t.numel() + 5)).shape,
    "an out= that has to grow": lambda t: seen(torch.add(torch.ones(t.numel() + 3), 1, out=t)),
    "an out= that fits": lambda t: seen(torch.mul(t.clone(), 2, out=t)),
    "set_ to other memory": given_new_memory,
    "set_ to nothing": lambda t: seen(t.set_()),
    "set_ on its storage": taken_over,
    "data of another": with_new_data,
    "share_memory_": shared,
    "share_memory_ and resize_": shared_and_resized,
    "torch.save": saved,
    "in-place arithmetic": lambda t: seen(t.mul_(2).add_(1).clamp_(max=7)),
    "in-place on a view": lambda t: (seen(t[1:4].zero_()), seen(t)),
    "index_put_": lambda t: seen(t.index_put_((torch.tensor([0]),), torch.tensor(9.0))),
    "squeeze_ and t_": lambda t: seen(t.unsqueeze_(0).t_()),
    "gradients": with_grad,
    "numpy and dlpack": exported,
    "as a parameter": as_parameter,
    "view as other dtypes": lambda t: (seen(t.view(torch.int32)), seen(t.view(torch.uint8))),
    "kept by a view": outlived,
    "deep copy": lambda t: seen(copy.deepcopy(t)),
    "detach_": lambda t: seen(t.detach_()),
    "requires_grad_ of a view": lambda t: seen(t[1:].requires_grad_()),
    "typed storage": lambda t: len(t.storage()),
    "pin_memory": lambda t: t.pin_memory().is_pinned(),
    "record version": lambda t: (t._version, t.add_(1)._version),
}


MODES: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "another default device": lambda: torch.device("meta"),
    "another default dtype": lambda: _default_dtype(torch.float64),
}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def outcome(use: Callable[[Any], Any], what: Any) -> Any:
    """What a use came to: its result, or the type and the beginning of what it raised."""
    try:
        return use(what)
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0][:60]


def give(size: int) -> torch.Tensor:
    return torch.arange(float(size)) % 10


def give_several(of: str) -> Any:
    """Tensors of several kinds, made by the callee."""
    base = torch.arange(24.0).reshape(4, 6)
    kinds = {
        "plain": base,
        "none": torch.empty(0, 2),
        "two of one storage": (base, base[1]),
        "grad": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base.clone()),
        "sparse": base.to_sparse(),
    }
    return kinds[of]


def seen_in(mode: str, of: str) -> Any:
    """What comes back to a caller that is in a mode."""
    with MODES[mode]():
        got = rpc.rpc_sync("w1", give_several, args=(of,))
    tensors = got if isinstance(got, tuple) else (got,)
    return [(type(t).__name__, str(t.device), seen(t.to_dense() if t.is_sparse else t)) for t in tensors]


def use_one(name: str, tensor: torch.Tensor) -> Any:
    """Runs on the callee, on its argument."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(USES[name], tensor)


def use_all(worker: Worker) -> None:
    found = {}
    warnings.simplefilter("ignore")
    worker.start()
    for which, size in SIZES.items():
        for name, use in USES.items():
            if name == "pin_memory" and not torch.cuda.is_available():
                continue
            result = rpc.rpc_sync("w1", give, args=(size,))
            found[f"{name}, {which} result"] = outcome(use, result)
            found[f"{name}, {which} argument"] = rpc.rpc_sync("w1", use_one, args=(name, give(size)))
    for mode in MODES:
        for of in ("plain", "none", "two of one storage", "grad", "parameter", "sparse"):
            found[f"{of} in {mode}"] = outcome(partial(seen_in, mode), of)
    worker.tell(found)
    rpc.shutdown()


def outcomes(folder: Path, engine: str) -> dict[str, Any]:
    found: dict[str, Any] = told_on(engine, Path(__file__), folder, use_all, serve)
    return found


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_every_use_comes_to_what_it_comes_to_with_torch(tmp_path: Path) -> None:
    """LOG row 103."""
    ours = outcomes(tmp_path / "ours", "tensorcall")
    theirs = outcomes(tmp_path / "theirs", "torch")

    assert len(ours) > 200
    assert {
        name: (ours[name], theirs[name]) for name in theirs if repr(ours[name]) != repr(theirs[name])
    } == {}
