"""The Python in README.md runs, and prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[3] / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs() -> list[tuple[str, str | None]]:
    """Each block of Python with the text that follows as what it prints, if that is the next block."""
    blocks = BLOCK.findall(README.read_text())
    following = [*blocks[1:], ("", "")]
    return [
        (code, text if kind == "text" else None)
        for (language, code), (kind, text) in zip(blocks, following, strict=True)
        if language == "python"
    ]


def test_the_page_has_a_program() -> None:
    assert programs()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("code", "output"), programs())
def test_a_program_of_the_page_prints_what_the_page_says(
    code: str, output: str | None, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)

    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == 0, done.stderr
    assert output is None or done.stdout == output
