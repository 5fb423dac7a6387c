"""Putting this package in the place of ``torch.distributed.rpc``, on request only.

Three things happen, and :func:`uninstall` undoes them. Our modules take the names of torch's, in
``sys.modules``, in their packages and for what is imported later. Names that loaded modules took
from torch's, among them torch's own, are bound to ours. And torch's objects are made to lead to
ours, for those who hold them where nobody can look (`_stale`).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from . import _stale, _startup
from ._journal import ABSENT, Journal

_logger = logging.getLogger("tensorcall")

_PACKAGES = {"torch.distributed.rpc": "tensorcall.rpc", "torch.distributed.autograd": "tensorcall.autograd"}
_MODULES = {
    "torch.distributed.nn.api.remote_module": "tensorcall.nn.api.remote_module",
    "torch.distributed.optim.optimizer": "tensorcall.optim.optimizer",
}
"""Single modules of packages that are otherwise torch's; they are replaced when they are imported."""
_ROOTS = _PACKAGES | _MODULES
_NATIVE = {
    "torch._C._distributed_rpc": "tensorcall.rpc",
    "torch._C._distributed_autograd": "tensorcall.autograd",
}
_OTHER_NAMES = {"_TensorPipeRpcBackendOptionsBase": "TensorPipeRpcBackendOptions"}
"""Names in torch's C++ whose counterparts are called differently here."""

_PLAIN = (bool, bytes, float, frozenset, int, logging.Logger, str, timedelta, tuple, type(None))
"""Values that two modules may have in common by chance, or that do no harm."""

_lock = threading.RLock()
_journal: Journal | None = None


def install() -> None:
    """See :func:`tensorcall.install`."""
    global _journal
    # Outside of the lock: another thread may be importing torch, and install when it is through.
    for module in (*_PACKAGES, *_PACKAGES.values(), *_NATIVE):
        importlib.import_module(module)
    with _lock:
        if _journal is not None:
            return
        _refuse_if_running()
        journal = Journal()
        try:
            _replace(journal)
        except BaseException:
            _undo(journal)
            raise
        _journal = journal


def uninstall() -> None:
    """See :func:`tensorcall.uninstall`."""
    global _journal
    with _lock:
        _startup.disarm()
        if _journal is None:
            return
        from .autograd import _reducers
        from .rpc import _agent, _futures, _profiling

        if _agent.is_set():
            raise RuntimeError("tensorcall cannot be uninstalled while its agent runs: call shutdown first")
        _undo(_journal)
        _journal = None
        _futures.unpatch()
        _profiling.unpatch()
        _reducers.unpatch()


def _refuse_if_running() -> None:
    from .rpc import _agent

    native: Any = sys.modules["torch._C._distributed_rpc"]
    who = None
    if native._is_current_rpc_agent_set():
        who = "torch's own RPC is initialized"
    elif _agent.is_set():
        who = "tensorcall.rpc is initialized"
    if who is not None:
        raise RuntimeError(
            f"tensorcall cannot take the place of torch.distributed.rpc: {who} in this process; call "
            "install() before init_rpc"
        )


def _replace(journal: Journal) -> None:
    from .autograd import _reducers
    from .rpc import _futures, _profiling

    theirs = _loaded()
    ours = {name: module for name in theirs if (module := _counterpart(name)) is not None}
    counterparts = _counterparts(theirs, ours)
    for name, module in theirs.items():
        journal.put(sys.modules, name, ours.get(name, ABSENT))
        package, _, last = name.rpartition(".")
        if name in ours and package not in ours:
            journal.put(sys.modules[package], last, ours[name])
        counterparts[id(module)] = module, ours.get(name, module)
    # First of all, while torch's functions can still be found in torch's modules.
    _stale.forward(journal, theirs, ours)
    _replace_native(journal, counterparts)
    _rebind(journal, counterparts, theirs)
    sys.meta_path = [_Aliases(), *sys.meta_path]
    _futures.patch()
    _profiling.patch()
    _reducers.patch()


def _loaded() -> dict[str, ModuleType]:
    """Torch's modules that are loaded, by their names."""
    return {name: module for name, module in list(sys.modules.items()) if _is_torchs(name)}


def _is_torchs(name: str) -> bool:
    """Whether we take the place of a module of this name, or of a package that it belongs to."""
    return f"{name}.".startswith(tuple(f"{root}." for root in _ROOTS))


def _our_name(name: str) -> str:
    """The name of our module for one of torch's."""
    root = next(root for root in _ROOTS if f"{name}.".startswith(f"{root}."))
    return _ROOTS[root] + name.removeprefix(root)


def _counterpart(name: str) -> ModuleType | None:
    """Our module for one of torch's, imported if need be."""
    ours = _our_name(name)
    if ours not in sys.modules and importlib.util.find_spec(ours) is None:
        return None
    return importlib.import_module(ours)


def _counterparts(theirs: dict[str, ModuleType], ours: dict[str, ModuleType]) -> dict[int, tuple[Any, Any]]:
    """By their ids, what torch's modules define, and what we have for it."""
    found: dict[int, tuple[Any, Any]] = {}
    for name, module in ours.items():
        for key, value in list(vars(theirs[name]).items()):
            instead = getattr(module, key, ABSENT)
            if instead is not ABSENT and instead is not value and _is_own(key, value):
                found.setdefault(id(value), (value, instead))
    return found


def _is_own(key: str, value: Any) -> bool:
    """Whether `value` is defined in torch's modules, not only imported there."""
    if key.startswith("__") or isinstance(value, ModuleType):
        return False
    home = getattr(value, "__module__", None)
    if isinstance(home, str):
        return _is_torchs(home) or home in _NATIVE
    return not isinstance(value, _PLAIN)


def _replace_native(journal: Journal, counterparts: dict[int, tuple[Any, Any]]) -> None:
    """Do the same for the names of torch's C++; what belongs to its engine alone refuses."""
    refused: dict[type, str] = {}
    for name, our_name in _NATIVE.items():
        native = sys.modules[name]
        for key, value in list(vars(native).items()):
            if not _is_own(key, value):
                continue
            instead = _native_counterpart(our_name, _OTHER_NAMES.get(key, key))
            if instead is ABSENT and key.startswith("_invoke_"):
                instead = _stale.refuse_call(f"{name}.{key}")
            if instead is ABSENT:
                continue
            journal.put(native, key, instead)
            counterparts[id(value)] = value, instead
            if isinstance(value, type):
                refused[value] = f"{name}.{key}"
    refused.update(
        (value, f"{value.__module__}.{value.__qualname__}")
        for value, _ in list(counterparts.values())
        if isinstance(value, type) and value not in refused and issubclass(value, tuple(refused))
    )
    _stale.refuse(journal, refused)


def _native_counterpart(our_name: str, key: str) -> Any:
    for module in (our_name, f"{our_name}.api"):
        instead = getattr(sys.modules.get(module), key, ABSENT)
        if instead is not ABSENT:
            return instead
    return ABSENT


def _rebind(
    journal: Journal, counterparts: dict[int, tuple[Any, Any]], theirs: dict[str, ModuleType]
) -> None:
    """Bind names that loaded modules took from torch's to what we have instead."""
    for name, module in _others(theirs):
        contents: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
        for key, value in list(contents.items()):
            _, instead = counterparts.get(id(value), (value, value))
            if instead is value:
                continue
            journal.put(contents, key, instead)
            if name not in theirs:
                _logger.debug("%s.%s is now tensorcall's", name, key)


def _others(theirs: dict[str, ModuleType]) -> Iterator[tuple[str, ModuleType]]:
    """Modules that are not ours, with their names: torch's, which have left ``sys.modules``, and the rest."""
    everything: list[tuple[str, Any]] = [*theirs.items(), *list(sys.modules.items())]
    for name, module in everything:
        is_ours = name.partition(".")[0] == "tensorcall" or name in _NATIVE
        if isinstance(module, ModuleType) and not is_ours:
            yield name, module


class _Aliases:
    """Finds our submodules under torch's names, so that there is one of each and not two."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_torchs(name) or importlib.util.find_spec(_our_name(name)) is None:
            return None
        return importlib.machinery.ModuleSpec(name, _AliasLoader())


class _AliasLoader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        # In the place of the empty module that Python has made.
        sys.modules[module.__name__] = importlib.import_module(_our_name(module.__name__))


def _undo(journal: Journal) -> None:
    _startup.remove_finders(_Aliases)
    journal.undo()
    # What was imported under torch's names while ours were there.
    for name, module in list(sys.modules.items()):
        if _is_torchs(name) and getattr(module, "__name__", None) == _our_name(name):
            del sys.modules[name]
