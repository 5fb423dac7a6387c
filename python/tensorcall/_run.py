"""Running a program, or a module, as Python itself would, with the process marked to install."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import logging
import os
import pkgutil
import sys
from types import CodeType, ModuleType
from typing import Any

from . import _startup

_logger = logging.getLogger("tensorcall")


def run(program: str, args: list[str], *, is_module: bool) -> None:
    """Execute `program` as ``__main__``.

    Args:
        program: path of a file, or of a folder or archive with a ``__main__.py``; name of a module
            if `is_module`.
        args: its arguments.
        is_module: as Python's option ``-m``.

    Raises:
        SystemExit: there is no such program. What the program raises passes through.
    """
    code, module = _load_module(program) if is_module else _load_path(program)
    if _startup.find_file() is None:
        _logger.warning(
            "%s is not beside the packages of this Python (tensorcall was not installed by pip): processes "
            "that the program starts will have torch's own RPC",
            _startup.FILE,
        )
    _startup.mark()
    _startup.arm()
    sys.argv = [str(module.__file__) if is_module else program, *args]
    # Pickling and multiprocessing look for the program's functions in the module of this name.
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)


def choose_backend(name: str) -> None:
    """Let workers of this process, and of those that it starts, use a backend whatever the program says."""
    os.environ[_startup.BACKEND] = name
    if name == "process_group":
        from . import _launcher

        _launcher.claim()


def _load_path(path: str) -> tuple[CodeType, ModuleType]:
    importer = pkgutil.get_importer(os.path.abspath(path))
    if importer is not None:
        sys.path[0 : not sys.flags.safe_path] = [path]
        spec = importer.find_spec("__main__", None)
        if spec is None:
            raise SystemExit(f"tensorcall: can't find '__main__' module in {path!r}")
        return _load_spec(spec, path)
    place = os.path.abspath(path)
    try:
        with io.open_code(place) as file:
            source = file.read()
    except OSError as error:
        raise SystemExit(f"tensorcall: can't open {path!r}: {error.strerror}") from error
    module = _main_module(place)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", place)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(place))
    return compile(source, place, "exec", dont_inherit=True), module


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    # Python itself has put the current directory first, unless it was told not to.
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise SystemExit(f"tensorcall: no module {name!r} that can be run: {error}") from error
    if spec is None:
        raise SystemExit(f"tensorcall: no module {name!r} that can be run")
    return _load_spec(spec, name)


def _load_spec(spec: importlib.machinery.ModuleSpec, name: str) -> tuple[CodeType, ModuleType]:
    loader: Any = spec.loader
    code: CodeType | None = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise SystemExit(f"tensorcall: {name!r} has no code to run")
    module = _main_module(spec.origin or name)
    module.__loader__ = loader
    module.__spec__ = spec
    module.__package__ = spec.parent
    return code, module


def _main_module(path: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    module.__dict__["__cached__"] = None
    return module
