"""Distributed autograd: the names of ``torch.distributed.autograd``.

tensorcall does not record calls for autograd yet. Opening a context says so, rather than giving
gradients that miss what happened on other workers.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

__all__ = ["context", "is_available"]

_MISSING = "tensorcall does not implement distributed autograd yet"


class DistAutogradContext:
    """What a context is called."""


class context:
    """A distributed forward and backward pass; raises ``RuntimeError`` on entering."""

    def __enter__(self) -> int:
        _new_context()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


def is_available() -> bool:
    """Whether the names of this module exist (they do)."""
    return True


def backward(context_id: int, roots: list[Any], retain_graph: bool = False) -> NoReturn:
    """Not implemented yet."""
    raise RuntimeError(_MISSING)


def get_gradients(context_id: int) -> NoReturn:
    """Not implemented yet."""
    raise RuntimeError(_MISSING)


def _init(worker_id: int) -> None:
    """Prepare for contexts of this worker; called by ``init_rpc``."""


def _new_context() -> NoReturn:
    raise RuntimeError(_MISSING)


def _release_context(context_id: int) -> NoReturn:
    raise RuntimeError(_MISSING)


def _retrieve_context(context_id: int) -> NoReturn:
    raise RuntimeError(_MISSING)


def _current_context() -> NoReturn:
    raise RuntimeError(_MISSING)


def _is_valid_context(context_id: int) -> NoReturn:
    raise RuntimeError(_MISSING)


def _get_max_id() -> NoReturn:
    raise RuntimeError(_MISSING)


def _get_debug_info() -> dict[str, str]:
    return {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}
