"""A profile of all threads that serve requests; the name only, so far."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn


class _server_process_global_profile:
    """Profiles what other workers call here; raises ``RuntimeError`` on entering, not there yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> NoReturn:
        raise RuntimeError("tensorcall does not implement _server_process_global_profile yet")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None
