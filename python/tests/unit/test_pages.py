"""The Python in the documents runs, without a warning, and prints what the page says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pages
from pages import Program


def test_the_readme_has_a_program() -> None:
    assert pages.programs(pages.ROOT / "README.md")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "program", [p for page in pages.with_programs() for p in pages.programs(page)], ids=str
)
def test_a_program_of_a_page_prints_what_the_page_says(program: Program, tmp_path: Path) -> None:
    """LOG row 116: examples that are run, under -W error."""
    fault = pages.fault(program, tmp_path)

    assert fault is None, fault
