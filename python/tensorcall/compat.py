"""Putting this package in the place of ``torch.distributed.rpc``, on request only."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

_SUBMODULES = (
    "_testing",
    "api",
    "backend_registry",
    "constants",
    "functions",
    "internal",
    "options",
    "server_process_global_profiler",
)

_ABSENT = object()


class _Change:
    """One attribute or module entry that was replaced, and what was there before."""

    def __init__(self, holder: Any, key: str, value: object) -> None:
        self._holder = holder
        self._key = key
        if isinstance(holder, dict):
            self._before = holder.get(key, _ABSENT)
        else:
            self._before = getattr(holder, key, _ABSENT)
        self._put(value)

    def undo(self) -> None:
        self._put(self._before)

    def _put(self, value: object) -> None:
        if isinstance(self._holder, dict):
            if value is _ABSENT:
                self._holder.pop(self._key, None)
            else:
                self._holder[self._key] = value
        elif value is _ABSENT:
            delattr(self._holder, self._key)
        else:
            setattr(self._holder, self._key, value)


_lock = threading.RLock()
_changes: list[_Change] = []


def install() -> None:
    """See :func:`tensorcall.install`."""
    with _lock:
        if _changes:
            return
        _refuse_if_running()
        import torch
        import torch.distributed

        from . import autograd, rpc
        from .rpc import _futures

        parent = torch.distributed
        modules = {"torch.distributed.rpc": rpc, "torch.distributed.autograd": autograd}
        for name in _SUBMODULES:
            modules[f"torch.distributed.rpc.{name}"] = importlib.import_module(f".{name}", rpc.__name__)
        # Submodules of torch's that we do not have must not be mixed with ours.
        gone = [
            name for name in sys.modules if name.startswith("torch.distributed.rpc.") and name not in modules
        ]
        for name in gone:
            _changes.append(_Change(sys.modules, name, _ABSENT))
        for name, module in modules.items():
            _changes.append(_Change(sys.modules, name, module))
        _changes.append(_Change(parent, "rpc", rpc))
        _changes.append(_Change(parent, "autograd", autograd))
        # TorchScript compares annotations with this name.
        _changes.append(_Change(_jit_internal(), "RRef", rpc.RRef))
        _futures.patch()


def uninstall() -> None:
    """See :func:`tensorcall.uninstall`."""
    with _lock:
        if not _changes:
            return
        from .rpc import _agent, _futures

        if _agent.is_set():
            raise RuntimeError("tensorcall cannot be uninstalled while its agent runs: call shutdown first")
        while _changes:
            _changes.pop().undo()
        _futures.unpatch()


def _refuse_if_running() -> None:
    native: ModuleType | None = sys.modules.get("torch._C._distributed_rpc")
    if native is not None and native._is_current_rpc_agent_set():
        raise RuntimeError(
            "tensorcall cannot take the place of torch.distributed.rpc: torch's own RPC is initialized in "
            "this process; call install() before init_rpc"
        )


def _jit_internal() -> Any:
    return importlib.import_module("torch._jit_internal")
