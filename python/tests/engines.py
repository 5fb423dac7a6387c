"""The same workers on torch's agent and on ours, for tests that compare what they come to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ENGINE_VARIABLE, Group


def told_on(engine: str, tests: Path, folder: Path, *functions: Callable[..., Any]) -> Any:
    """What the first of the workers that run `functions` of the file `tests` tells, on that engine."""
    folder.mkdir()
    group = Group(tests, folder, deadline=60)
    group.environment = {ENGINE_VARIABLE: engine}
    try:
        group.start(*functions)
        # Nobody waits for the end: torch's agents now and then take each other's store away.
        return group.hear(0)
    finally:
        group.close()
