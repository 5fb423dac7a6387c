"""Functions that are called by a name of their own, whatever language the caller or the callee is in.

A name has no ``:``. It is one that a function was registered with here, or else the way to a function by
dots, ``package.module.qualname``. What is called by name takes and returns plain data alone, since whoever
reads it may be no Python program.
"""

from __future__ import annotations

import difflib
import importlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, overload

from . import _fork

_F = TypeVar("_F", bound=Callable[..., Any])

_registered: dict[str, Callable[..., Any]] = {}
_lock = threading.Lock()
"""For registering: held for moments only."""


@_fork.in_child
def _have_a_free_lock() -> None:
    global _lock
    _lock = threading.Lock()


@overload
def function(name: _F, /) -> _F: ...
@overload
def function(name: str, /) -> Callable[[_F], _F]: ...
def function(name: Any, /) -> Any:
    """Register a function, so that other workers can call it by name: a decorator.

    ``@rpc.function`` takes the function's own name, ``@rpc.function("name")`` another one. A Python worker
    then calls ``rpc.rpc_sync(to, "name", args=...)``, a Rust worker ``agent.call(to, "name", ...)``.
    Arguments and results are plain data: ``None``, ``bool``, ``int`` of 64 bits, ``float``, ``str``,
    ``bytes``, ``list``, ``tuple``, ``dict``, ``torch.Tensor`` and ``RRef``.

    Raises:
        ValueError: the name is empty or has a ``:``, or another function has it.
    """
    if isinstance(name, str):
        return partial(_register, name)
    return _register(name.__name__, name)


def _register(name: str, func: _F) -> _F:
    if not callable(func):
        raise TypeError(f"what is registered as {name!r} should be callable, but is {func!r}")
    if not name or ":" in name:
        raise ValueError(f"a function cannot be registered as {name!r}: a name has no ':', and is not empty")
    with _lock:
        before = _registered.get(name)
        # A module that is loaded again brings the same functions anew.
        if before is not None and _origin(before) != _origin(func):
            raise ValueError(
                f"{'.'.join(_origin(func))} cannot be registered as {name!r}: "
                f"{'.'.join(_origin(before))} has that name"
            )
        _registered[name] = func
    return func


def _origin(func: Callable[..., Any]) -> tuple[str, str]:
    module, qualname = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    return str(module), str(qualname or repr(func))


def find(name: str) -> Callable[..., Any]:
    """The function of that name, which has no ``:``.

    Raises:
        RuntimeError: there is none.
        ImportError: a module on the way to it cannot be imported.
    """
    found = _registered.get(name)
    if found is None:
        found = _by_dots(name)
    if found is None:
        raise RuntimeError(_unknown(name))
    return found


def _by_dots(name: str) -> Callable[..., Any] | None:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # One that the module itself imports is missing: that has to be said.
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found if callable(found) else None
    return None


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _registered, 3)
    if close:
        known = f"similar names are {', '.join(map(repr, close))}"
    elif _registered:
        known = f"{len(_registered)} others are registered"
    else:
        known = "none is"
    return (
        f"no function is registered as {name!r} on this worker ({known}), nor is it the way to one by dots: "
        "register it with @tensorcall.rpc.function in a module that the worker imports"
    )
