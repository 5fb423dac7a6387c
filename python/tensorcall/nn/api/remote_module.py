"""A module that lives on another worker and is used like one that is here.

The object here is a shell: a reference to the module, where it is, and two methods. Whatever else
``torch.nn.Module`` offers is about parameters and submodules, of which the shell has none: it is refused
rather than applied to nothing.

A RemoteModule can be sent to any worker. What travels is data alone (`_reduce`): the methods of the
object that arrives are those of this file on the worker that it arrives at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device

from ... import rpc
from ...rpc import _agent
from ...rpc.internal import _internal_rpc_pickler

__all__ = ["RemoteModule"]

Self = TypeVar("Self", bound="_RemoteModule")

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""Attributes of a RemoteModule that has been sent, in their order."""

_OWN = frozenset(vars(nn.Module())) | {"forward_async", "forward"}
"""Attributes that every RemoteModule makes for itself."""


def forward_async(self: _RemoteModule, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
    """Run the module on its worker and return at once with a future for the result."""
    where = (self.module_rref, self.device, self.is_device_map_set)
    return rpc.rpc_async(self.module_rref.owner(), _remote_forward, (*where, args, kwargs))


def forward(self: _RemoteModule, *args: Any, **kwargs: Any) -> Any:
    """Run the module on its worker and return the result."""
    return forward_async(self, *args, **kwargs).wait()


class _RemoteModule(nn.Module):
    """As :class:`RemoteModule`, which see.

    Args:
        remote_device: where the module is to be.
        module_cls: makes it.
        args: positional arguments of `module_cls`.
        kwargs: its keyword arguments.
        _module_interface_cls: an interface of TorchScript: the module is compiled there, and is used from
            Python here. The shell itself cannot be part of a script.
    """

    on: str | int
    """The worker that has the module, by name or rank."""
    device: str
    """The device that the module is on there."""
    is_device_map_set: bool
    """Whether this worker can send tensors of other devices than the CPU there."""
    is_scriptable: bool
    """Whether an interface was given."""
    generated_methods: list[Callable[..., Any]]
    module_rref: rpc.RRef[nn.Module]
    """The reference to the module."""
    forward_async: Callable[..., torch.futures.Future[Any]]
    """Runs the module on its worker and returns at once with a future for the result."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        self._look_at(remote_device)
        self.is_scriptable = _module_interface_cls is not None
        creation = (module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        if self.is_scriptable:
            # An RRef with an interface is made where the value is.
            rref = rpc.rpc_sync(self.on, _create_scripted, (*creation, _module_interface_cls))
        else:
            rref = rpc.remote(self.on, _create, creation)
        self._refer_to(rref)

    def _look_at(self, remote_device: str) -> None:
        if not _agent.is_set():
            raise AssertionError("RemoteModule only works in RPC.")
        where = _remote_device(remote_device)
        name, rank = where.worker_name(), where.rank()
        on = rank if name is None else name
        if on is None:
            raise ValueError(
                f"{remote_device!r} names no worker: it must have the form '<workername>/<device>' or "
                "'rank:<rank>/<device>'"
            )
        agent = _agent.current()
        self.on = on
        self.device = str(where.device())
        self.is_device_map_set = bool(agent._get_device_map(agent.get_worker_info(on)))

    def _refer_to(self, rref: rpc.RRef[nn.Module]) -> None:
        self.generated_methods = [forward_async, forward]
        self.module_rref = rref
        for method in self.generated_methods:
            setattr(self, method.__name__, MethodType(method, self))

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: rpc.RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Another RemoteModule for the module that `module_rref` refers to.

        Args:
            remote_device: where the module is.
            module_rref: a reference to it.
            _module_interface_cls: as for the class.
        """
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        made._look_at(remote_device)
        made.is_scriptable = _module_interface_cls is not None
        made._refer_to(module_rref)
        return made

    def remote_parameters(self, recurse: bool = True) -> list[rpc.RRef[nn.Parameter]]:
        """References to the module's parameters, for a ``DistributedOptimizer`` for example.

        Args:
            recurse: those of submodules, too.
        """
        found: list[rpc.RRef[nn.Parameter]] = rpc.rpc_sync(
            self.on, _parameters, args=(self.module_rref, recurse)
        )
        return found

    def get_module_rref(self) -> rpc.RRef[nn.Module]:
        """The reference to the module."""
        return self.module_rref

    def train(self: Self, mode: bool = True) -> Self:
        """Set the module's training mode, on its worker."""
        rpc.rpc_sync(self.on, _train, args=(self.module_rref, mode))
        return self

    def eval(self: Self) -> Self:
        """Set the module's evaluation mode, on its worker."""
        return self.train(False)

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Refused: the parameters are elsewhere."""
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            "tensorcall: a RemoteModule cannot be part of a script, which would call its worker from inside "
            "TorchScript. Use it from Python; the module on its worker may be a script"
        )

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled when using "
            "RPC"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r})"


class RemoteModule(_RemoteModule):
    """A module on another worker.

    It is made there at once; what making it raises is raised by its first use. ``forward`` runs the
    module there and returns the result, ``forward_async`` returns a future for it. Both take the
    arguments of the module's own ``forward`` and are recorded in distributed autograd contexts.

    Arguments on the CPU are moved to a module on a GPU. Without a device map for that worker, results
    come back on the CPU.

    Args:
        remote_device: where the module is to be: ``"worker1/cuda:0"``, ``"worker1"`` or
            ``"rank:1/cpu"``; on the CPU if no device is named.
        module_cls: makes the module when it is called there.
        args: positional arguments of `module_cls`.
        kwargs: its keyword arguments.

    Raises:
        ValueError: there is no sense in `remote_device`, or later if `module_cls` made no module.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


_REFUSED = (
    *("add_module", "apply", "bfloat16", "buffers", "children", "compile", "cpu", "cuda", "double"),
    *("extra_repr", "float", "get_buffer", "get_parameter", "get_submodule", "half", "ipu"),
    *("load_state_dict", "modules", "mtia", "named_buffers", "named_children", "named_modules"),
    *("named_parameters", "register_backward_hook", "register_buffer", "register_forward_hook"),
    *("register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"),
    *("register_module", "register_parameter", "requires_grad_", "set_submodule", "share_memory"),
    *("state_dict", "to", "to_empty", "type", "xpu", "zero_grad"),
)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: _RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    refuse.__name__ = name
    refuse.__doc__ = "Refused: parameters and submodules are elsewhere."
    return refuse


for _name in _REFUSED:
    setattr(_RemoteModule, _name, _refused(_name))


def _create(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    """Runs on the module's worker: make it."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns "
            f"an instance of {type(module)}."
        )
    return module.to(device)


def _create_scripted(
    module_cls: Callable[..., nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    interface: Any,
) -> rpc.RRef[nn.Module]:
    """Runs on the module's worker: make it, and compile it unless it is."""
    module = torch.jit.script(_create(module_cls, args, kwargs, device))
    return rpc.RRef(module, interface)


def _parameters(module: rpc.RRef[nn.Module], recurse: bool) -> list[rpc.RRef[nn.Parameter]]:
    """Runs on the module's worker: references to its parameters."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters(recurse)]


def _train(module: rpc.RRef[nn.Module], mode: bool) -> None:
    """Runs on the module's worker: set its mode."""
    module.local_value().train(mode)


def _remote_forward(
    rref: rpc.RRef[nn.Module],
    device: str,
    is_device_map_set: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs on the module's worker: use it."""
    module = rref.local_value()
    if torch.device(device).type != "cuda":
        return module(*args, **kwargs)
    result = module(*_moved(args, device), **_moved(kwargs, device))
    return result if is_device_map_set else _moved(result, "cpu")


def _moved(value: Any, device: str) -> Any:
    """The tensors in plain containers, on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    return value


def _reduce(module: _RemoteModule) -> tuple[Any, ...]:
    """What of a RemoteModule travels."""
    for name in vars(module):
        if name not in _REMOTE_MODULE_PICKLED_ATTRIBUTES and name not in _OWN:
            print(  # noqa: T201 (as torch does; programs may look for it)
                f"The new attribute ``{name}`` of RemoteModule is ignored during RPC pickling",
                file=sys.stderr,
            )
    return _receive, (
        module.on,
        module.device,
        module.is_device_map_set,
        module.is_scriptable,
        module.module_rref,
    )


def _receive(
    on: str | int, device: str, is_device_map_set: bool, is_scriptable: bool, module_rref: rpc.RRef[nn.Module]
) -> RemoteModule:
    """The RemoteModule that these belong to."""
    types: tuple[tuple[Any, Any], ...] = ((on, (str, int)), (device, str), (module_rref, rpc.PyRRef))
    for value, kind in types:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} in the place of {kind} in a RemoteModule that was sent")
    made = RemoteModule.__new__(RemoteModule)
    # Not the attributes of a module that is here: what was sent, and the methods.
    vars(made).update(
        on=on,
        device=device,
        is_device_map_set=bool(is_device_map_set),
        is_scriptable=bool(is_scriptable),
        generated_methods=[forward_async, forward],
        module_rref=module_rref,
    )
    for method in made.generated_methods:
        vars(made)[method.__name__] = MethodType(method, made)
    return made


_internal_rpc_pickler._register_reducer(RemoteModule, _reduce)
