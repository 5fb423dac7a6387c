"""``python -m tensorcall run prog.py args…``: run a program with this package in the place of torch's RPC."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import io
import os
import sys
from types import CodeType, ModuleType

from . import install


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Args:
        argv: the arguments after ``python -m tensorcall``; by default the process's.
    """
    options = _parser().parse_args(argv)
    code, module = _load_module(options.program) if options.module else _load_script(options.program)
    install()
    sys.argv = [str(module.__file__), *options.args]
    # Pickling and multiprocessing look for the program's functions in the module of this name.
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tensorcall", description="Tensor RPC.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a program written for torch.distributed.rpc",
        description="Run an unmodified program; its torch.distributed.rpc is tensorcall.rpc.",
    )
    run.add_argument(
        "-m", dest="module", action="store_true", help="the program is a module, as for python -m"
    )
    run.add_argument("program", help="path of the program, or name of the module with -m")
    run.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the program")
    return parser


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        raise SystemExit(f"tensorcall: can't open {path!r}: {error.strerror}") from error
    module = _main_module(path)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(path))
    return compile(source, path, "exec"), module


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    # Python itself has put the current directory first, unless it was told not to.
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    get_code = getattr(spec.loader if spec else None, "get_code", None)
    if spec is None or get_code is None:
        raise SystemExit(f"tensorcall: no module {name!r} that can be run")
    code: CodeType | None = get_code(spec.name)
    if code is None:
        raise SystemExit(f"tensorcall: module {name!r} has no code to run")
    module = _main_module(spec.origin or name)
    module.__loader__ = spec.loader
    module.__spec__ = spec
    module.__package__ = spec.parent
    return code, module


def _main_module(path: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    module.__dict__["__cached__"] = None
    return module


if __name__ == "__main__":
    main()
