"""The programs in the documents: each block of Python, and what it prints if the page says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LIMIT = 100.0


class Program(NamedTuple):
    """One block of Python of a page."""

    page: str
    number: int
    code: str
    output: str | None
    """The block that follows, if it is one of text."""

    def __str__(self) -> str:
        return f"{self.page}, program {self.number}"


def with_programs() -> list[Path]:
    """Every page that has a block of Python."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(page for page in pages if "\n```python" in page.read_text())


def programs(page: Path) -> list[Program]:
    """The programs of a page."""
    text = page.read_text()
    blocks = list(_BLOCK.finditer(text))
    following = [*blocks[1:], None]
    name = str(page.relative_to(ROOT))
    found: list[Program] = []
    for block, after in zip(blocks, following, strict=True):
        if block[1] == "python":
            output = after[2] if after is not None and after[1] == "text" else None
            found.append(Program(name, len(found) + 1, block[2], output))
    return found


def fault(program: Program, folder: Path) -> str | None:
    """Run a program as a file in `folder`; what is wrong, if anything is."""
    file = folder / "program.py"
    file.write_text(program.code)
    done = subprocess.run(
        [sys.executable, "-W", "error", file],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    if done.returncode != 0:
        return f"{program} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    if done.stderr:
        return f"{program} wrote to stderr\n{done.stderr}"
    if program.output is not None and done.stdout != program.output:
        return f"{program} printed\n{done.stdout}and not\n{program.output}"
    return None
