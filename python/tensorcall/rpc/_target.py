"""What a call runs: a torch operator, a script function or any other callable.

Operators and script functions go by their names in torch; a Python function that can be
imported goes by ``module:qualname``, or by a name of its own, without a ``:`` (``_named``). A name
contains ``::`` only if it is an operator's, and starts with ``__torch__.`` only if it is a script
function's; a script function marked by ``functions.async_execution`` has an ``@`` before that.
Everything else is pickled.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _named
from ._remote_error import OperatorError

if TYPE_CHECKING:
    from ._rref import PyRRef

_find_builtin: Callable[[Any], str | None] = torch.jit._builtins._find_builtin
_ScriptFunction = torch.jit.ScriptFunction
_SCRIPT = "__torch__."
_LATER = "@"
"""Before the name of a script function whose result is the value of the future that it returns."""


class _Known(NamedTuple):
    """A function of a module: it keeps this name as long as the module has it under this attribute."""

    name: str
    home: dict[str, Any]
    attribute: str


_known: dict[types.FunctionType, _Known] = {}
_MOST_KNOWN = 4096
"""Programs that make functions in a loop must not fill the memory."""


class TorchTarget:
    """An operator overload or a script function, called by its name.

    Errors are raised as :class:`OperatorError` with torch's text.
    """

    __slots__ = ("_function", "_name")

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except Exception as error:
            raise OperatorError(str(error)) from error

    def __repr__(self) -> str:
        return f"<torch function {self._name}>"

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return find, (self._name,)


class Method:
    """A method of the value that a reference refers to; to be called on the owner.

    Once it was called, it says itself whether its result is a future to be followed. As plain data it is
    the class's name with these arguments: the reference, the method's name, its arguments.
    """

    def __init__(self, rref: PyRRef, name: str) -> None:
        self.rref = rref
        self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self.rref.local_value(), self.__qualname__)
        self._wrapped_async_rpc_function = getattr(method, "_wrapped_async_rpc_function", None)
        return method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Method, (self.rref, self.__qualname__)


_METHOD = f"{Method.__module__}:{Method.__qualname__}"


class AsyncTorchTarget(TorchTarget):
    """A script function whose result is the value of the future that it returns."""

    __slots__ = ()

    _wrapped_async_rpc_function = True


def is_torchs(name: str) -> bool:
    """Whether `name` is that of an operator or a script function."""
    return "::" in name or name.startswith((_SCRIPT, _LATER))


def script_type(value: object) -> str:
    """What TorchScript calls the type of a value."""
    names = {bool: "Bool", int: "Int", float: "Double", str: "String", type(None): "None"}
    if isinstance(value, torch.Tensor):
        return "Tensor"
    return names.get(type(value), type(value).__name__)


def name_of(func: Any, args: Any, kwargs: Any) -> str | None:
    """The name under which `func` can be found on any worker; ``None`` if it must be pickled.

    Raises:
        RuntimeError: `func` is an operator or a script function that does not take these arguments.
    """
    if type(func) is Method:
        return _METHOD
    known = _known.get(func) if type(func) is types.FunctionType else None
    if known is not None and known.home.get(known.attribute) is func:
        return known.name
    operator = _find_builtin(func)
    if operator is not None:
        overload = torch._C._jit_resolve_packet(operator, *args, **kwargs)
        return operator if overload == "default" else f"{operator}.{overload}"
    script, mark = func, ""
    wrapped = getattr(func, "_wrapped_async_rpc_function", None)
    if isinstance(wrapped, _ScriptFunction):
        script, mark = wrapped, _LATER
    if isinstance(script, _ScriptFunction):
        _check_script_arguments(script, args, kwargs)
        return mark + torch._jit_internal._qualified_name(script)
    return _python_name(func)


def find(name: str) -> Any:
    """The callable of that name on this worker.

    Raises:
        AttributeError, ImportError, RuntimeError: there is none.
    """
    if "::" in name:
        return _operator(name)
    if name.startswith((_SCRIPT, _LATER)):
        return _script_function(name)
    module, colon, qualname = name.partition(":")
    if not colon:
        return _named.find(name)
    # Not cached: the attribute may be bound to something else tomorrow.
    loaded = sys.modules.get(module)
    if loaded is None:
        return _attribute(importlib.import_module(module), qualname)
    try:
        return _attribute(loaded, qualname)
    except AttributeError:
        # Another thread may be in the middle of importing it: this waits until it is done.
        return _attribute(importlib.import_module(module), qualname)


def _attribute(module: Any, qualname: str) -> Any:
    found = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def check_sendable(func: Any) -> None:
    """Say at once, and by its name, that a local function cannot be sent.

    Raises:
        PicklingError: `func` is a lambda or was defined inside another function.
    """
    if isinstance(func, types.FunctionType) and "<" in func.__qualname__:
        raise PicklingError(
            f"{func.__module__}.{func.__qualname__} cannot be sent: only a function that other workers "
            "can import by its name can be called there; a lambda or a local function has no such name"
        )


def _python_name(func: Any) -> str | None:
    module_name = getattr(func, "__module__", None)
    qualname = getattr(func, "__qualname__", None)
    if type(module_name) is not str or type(qualname) is not str:
        return None
    if module_name == "__mp_main__" and "__main__" in sys.modules:
        # A child of multiprocessing knows its main module by both names, the others by one.
        module_name = "__main__"
    module: Any = sys.modules.get(module_name)
    found = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not func:
        return None
    name = f"{module_name}:{qualname}"
    if type(func) is types.FunctionType and vars(module).get(qualname) is func and len(_known) < _MOST_KNOWN:
        _known[func] = _Known(name, vars(module), qualname)
    return name


@functools.cache
def _operator(name: str) -> TorchTarget:
    packet, _, overload = name.partition(".")
    found = torch._C._get_operation_overload(packet, overload)
    if found is None:
        raise AttributeError(f"torch has no operator {name}")
    return TorchTarget(name, found[0])


def _script_function(name: str) -> TorchTarget:
    script = name.removeprefix(_LATER)
    found = torch.jit._state._python_cu.find_function(script)
    if found is None:
        raise AttributeError(f"no script function {script} has been compiled on this worker")
    return TorchTarget(name, found) if script == name else AsyncTorchTarget(name, found)


def _check_script_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Compare the arguments with the function's schema by number and name."""
    schema = func.schema
    parameters = schema.arguments
    if len(args) > len(parameters):
        raise RuntimeError(
            f"{schema.name}() expected at most {len(parameters)} argument(s) but received "
            f"{len(args)} argument(s). Declaration: {schema}"
        )
    given = {parameter.name for parameter in parameters[: len(args)]}
    for name in kwargs:
        if name in given or name not in (parameter.name for parameter in parameters):
            what = "was given twice" if name in given else "is unknown"
            raise RuntimeError(f"{schema.name}(): argument '{name}' {what}. Declaration: {schema}")
    for parameter in parameters[len(args) :]:
        if parameter.name not in kwargs and not parameter.has_default_value():
            raise RuntimeError(
                f"{schema.name}() is missing value for argument '{parameter.name}'. Declaration: {schema}"
            )
