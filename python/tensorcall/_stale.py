"""What code that was loaded before :func:`tensorcall.install` may still hold of torch's RPC.

Names in modules are rebound. What sits elsewhere (a closure, a default argument, a container, a
base class) cannot be found, so torch's own objects are made to lead to ours: modules pass on what
is asked of them, functions call ours of the same name, and classes say what is wrong when an
object is made. What has no counterpart raises, naming the module that called it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ._journal import Journal

_ours: dict[str, ModuleType] = {}
"""Our modules by the names of torch's, while they are in their place."""


def forward(journal: Journal, theirs: Mapping[str, ModuleType], ours: Mapping[str, ModuleType]) -> None:
    """Make torch's modules and what is in them lead to ours. Both are by torch's names."""
    journal.put(globals(), "_ours", dict(ours))
    for name, module in theirs.items():
        for value in list(_contents(module).values()):
            if getattr(value, "__module__", None) == name and isinstance(value, FunctionType):
                journal.put(value, "__code__", _code_that_calls(value))
        if name in ours:
            journal.put(module, "__class__", _Stale)


def refuse(journal: Journal, classes: Mapping[type, str]) -> None:
    """Make these classes of torch's say what is wrong when an object is made; values are their full names."""
    for kind, name in classes.items():
        journal.put(kind, "__init__", _refusal(name))


def refuse_call(name: str) -> Callable[..., Any]:
    """What stands for a function of torch's engine that we have nothing for."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name}, called from the module {_caller(2)}, belongs to torch's own RPC, whose place "
            "tensorcall has taken"
        )

    return refuse


def call(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands in every function of torch's: call ours of the same name."""
    function = getattr(_ours.get(module), name, None)
    if function is None:
        raise RuntimeError(
            f"{module}.{name}, called from the module {_caller(3)}, belongs to torch's own RPC, whose place "
            "tensorcall has taken, and tensorcall has nothing like it"
        )
    return function(*args, **kwargs)


class _Stale(ModuleType):
    """A module of torch's that somebody still holds: ours shows through."""

    def __getattribute__(self, name: str) -> Any:
        if not _is_dunder(name):
            try:
                return getattr(_counterpart(self), name)
            except AttributeError:
                pass
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_dunder(name):
            ModuleType.__setattr__(self, name, value)
        else:
            setattr(_counterpart(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_counterpart(self), name)

    def __dir__(self) -> list[str]:
        return dir(_counterpart(self))


def _counterpart(module: ModuleType) -> ModuleType:
    return _ours[_contents(module)["__name__"]]


def _contents(module: ModuleType) -> dict[str, Any]:
    """The module's dictionary, also of one that is loaded on first access to it, without loading it."""
    contents: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
    return contents


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


_SOURCE = """
def make({cells}):
    def forward(*args, **kwargs):
        ({cells})
        from tensorcall._stale import call
        return call("MODULE", "NAME", args, kwargs)
    return forward.__code__
"""


def _code_that_calls(function: FunctionType) -> CodeType:
    original = function.__code__
    code = _template(original.co_freevars)
    words = {"MODULE": function.__module__, "NAME": function.__qualname__}
    constants = tuple(words.get(value, value) if type(value) is str else value for value in code.co_consts)
    return code.replace(
        co_consts=constants,
        co_name=original.co_name,
        co_qualname=original.co_qualname,
        co_firstlineno=original.co_firstlineno,
    )


@cache
def _template(cells: tuple[str, ...]) -> CodeType:
    # A function takes only code with as many free variables as it has cells.
    made: dict[str, Any] = {}
    exec(_SOURCE.format(cells="".join(f"{cell}, " for cell in cells)), made)
    code: CodeType = made["make"](*cells)
    return code


def _refusal(name: str) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        who = (
            f"the class {kind.__module__}.{kind.__qualname__}"
            if _is_users(kind)
            else f"the module {_caller(2)}"
        )
        raise RuntimeError(
            f"{who} uses {name} of torch's own RPC, whose place tensorcall has taken: import it after "
            "tensorcall.install(), or start the program by `python -m tensorcall run`"
        )

    return __init__


def _is_users(kind: type) -> bool:
    return not kind.__module__.startswith(("torch.distributed.", "torch._C."))


def _caller(depth: int) -> str:
    return str(sys._getframe(depth).f_globals.get("__name__", "?"))
