"""What the tests of several processes share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import Group


@pytest.fixture
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    """The worker processes of a test; gone when it ends."""
    group = Group(request.path, tmp_path)
    yield group
    group.close()
