"""Calling the methods of a value through a reference to it.

The owner looks the method up in the value, calls it, and follows the future of one that is marked by
``functions.async_execution``: one message there and one back. Only ``remote`` has to ask before,
since a method that does not exist is an error of the call and not of the reference that it returns.

The value of a worker that runs no Python has no methods: the function of that name is called there, with the
reference as its first argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import api
from ._target import Method
from .constants import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from ._rref import PyRRef


class RRefProxy:
    """Its attributes are functions that call the methods of these names of a value.

    Args:
        rref: the reference to the value.
        rpc_api: how to call: ``rpc_sync``, ``rpc_async`` or ``remote``.
        timeout: seconds that a call may take.
    """

    def __init__(self, rref: PyRRef, rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        return partial(_invoke_rpc, self.rref, self.rpc_api, func_name, self.rpc_timeout)


def _invoke_rpc(
    rref: PyRRef, rpc_api: Callable[..., Any], func_name: str, timeout: float, *args: Any, **kwargs: Any
) -> Any:
    if rref._agent._native.is_plain(rref._owner.id):
        rref._look()
        return rpc_api(rref.owner(), func_name, args=(rref, *args), kwargs=kwargs, timeout=timeout)
    if rpc_api is api.remote:
        _check_method(rref, func_name, timeout)
    rref._look()
    return rpc_api(rref.owner(), Method(rref, func_name), args=args, kwargs=kwargs, timeout=timeout)


def _check_method(rref: PyRRef, name: str, timeout: float) -> None:
    """Raise if the value has no such method."""
    found = rref._get_type(timeout=timeout, blocking=False).wait()
    if hasattr(found, name) or issubclass(found, (torch.jit.ScriptModule, torch._C.ScriptModule)):
        return
    # Not of the class, but perhaps of the object.
    if not api.rpc_sync(rref.owner(), _has, args=(rref, name), timeout=timeout):
        raise AttributeError(f"type object '{found.__name__}' has no attribute '{name}'")


def _has(rref: PyRRef, name: str) -> bool:
    return hasattr(rref.local_value(), name)
