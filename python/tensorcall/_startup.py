"""Installing as soon as torch is there, without importing it.

``python -m tensorcall run`` puts the mark `MARK` into the environment, and every Python process
started below inherits it. The wheel lays the start-up file `FILE` beside the package; Python
executes its one line whenever it starts, and if the process is marked the line calls :func:`arm`.
From then on a hook waits for ``import torch`` and installs when that has finished, before the
statement after it runs and before any other thread sees the module.
"""

from __future__ import annotations

import os
import site
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MARK = "TENSORCALL_INSTALL"
"""The environment variable; empty and ``0`` count as not set."""

BACKEND = "TENSORCALL_BACKEND"
"""The environment variable that names the backend of programs which name none, or the default one."""

FILE = "tensorcall_install.pth"
"""The start-up file's name. Sorts behind ``tensorcall.pth``, which an editable install has."""


def mark() -> None:
    """Mark this process and those that it will start."""
    os.environ[MARK] = "1"


def is_marked() -> bool:
    """Whether this process should install."""
    return os.environ.get(MARK, "0") not in ("", "0")


def find_file() -> str | None:
    """Path of the start-up file; ``None`` if there is none: child processes will not install."""
    # Not all of sys.path: Python runs start-up files only in these.
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    candidates = (os.path.join(folder, FILE) for folder in folders)
    return next((path for path in candidates if os.path.exists(path)), None)


def arm() -> None:
    """Install now if torch is loaded, else as soon as it is. Calling it again changes nothing."""
    if "torch" in sys.modules:
        _install()
    elif not any(isinstance(finder, _Hook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hook())


def disarm() -> None:
    """Wait for torch no longer."""
    remove_finders(_Hook)


def remove_finders(kind: type[Any]) -> None:
    """Take all finders of a kind out of ``sys.meta_path``."""
    # A new list, since another thread may be in the middle of the old one.
    sys.meta_path = [finder for finder in sys.meta_path if not isinstance(finder, kind)]


class _Hook:
    """Finds torch as the others do, and sees to what happens when it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = self._ask_others(name, path, target)
        # A folder that merely has the name has no origin.
        if spec is not None and spec.origin is not None and spec.loader is not None:
            _install_after(spec.loader)
        return spec

    def _ask_others(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if isinstance(finder, _Hook) or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
        return None


def _install_after(loader: Loader) -> None:
    """Let `loader` install when it has executed its module.

    By an attribute of the loader, which stays the module's real one: others ask it for sources and data.
    """
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        _install()

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _install() -> None:
    from . import compat

    try:
        compat.install()
    except Exception as error:
        raise RuntimeError(
            f"the environment has {MARK}={os.environ.get(MARK)}, but tensorcall could not take the place of "
            f"torch.distributed.rpc: {error}. Unset {MARK} to go on with torch's own"
        ) from error
    disarm()
