"""Tensor RPC: call functions on other processes, with tensors as arguments and results.

``import tensorcall.rpc as rpc`` gives the interface of ``torch.distributed.rpc``. Programs
written for torch's module run unmodified under ``python -m tensorcall run prog.py``, or after
:func:`install`.

Importing this package does nothing but define names: torch is loaded by ``tensorcall.rpc``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import rpc as rpc

    __version__: str

__all__ = ["__version__", "install", "rpc", "uninstall"]


def install() -> None:
    """Put this package in the place of ``torch.distributed.rpc`` in this process.

    Modules imported afterwards get ``tensorcall.rpc`` when they ask for
    ``torch.distributed.rpc`` or one of its submodules, and the names that loaded modules took from
    there are bound to ours. Calling it again changes nothing.

    Raises:
        RuntimeError: RPC, torch's or ours, is initialized in this process.
    """
    from . import compat

    compat.install()


def uninstall() -> None:
    """Undo :func:`install`: everything is as it was, but for what others have replaced since.

    Raises:
        RuntimeError: an agent of ours is still running.
    """
    from . import compat

    compat.uninstall()


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        import importlib

        if name == "rpc":
            return importlib.import_module(".rpc", __name__)
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("tensorcall")
            except metadata.PackageNotFoundError:
                return "0.0.0"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
