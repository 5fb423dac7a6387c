"""What a type checker makes of a user's program that is right, and of one that is wrong."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorcall
import tensorcall.autograd
import tensorcall.rpc as rpc

FOLDER = Path(__file__).resolve().parents[1] / "typing"
MODULES = {
    "tensorcall": tensorcall,
    "rpc": rpc,
    "api": rpc.api,
    "backend_registry": rpc.backend_registry,
    "internal": rpc.internal,
    "options": rpc.options,
    "dist_autograd": tensorcall.autograd,
}
CONSTANTS = [name for name in vars(rpc.constants) if name.isupper()]


def names_used(file: Path) -> set[tuple[str, str]]:
    """Names of modules in a program, as pairs of module and name."""
    used: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.add((node.value.id, node.attr))
        if isinstance(node, ast.ImportFrom) and node.module == "tensorcall.rpc":
            used.update(("rpc", alias.name) for alias in node.names)
    return used


def test_the_program_touches_every_public_name() -> None:
    public = {(name, each) for name, module in MODULES.items() for each in module.__all__}
    public |= {("constants", name) for name in CONSTANTS}

    assert public - names_used(FOLDER / "user.py") == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_strict_type_checker_accepts_what_is_right_and_finds_each_mistake(tmp_path: Path) -> None:
    """In a folder that is not ours, so that nothing of the project's configuration helps."""
    installed = Path(tensorcall.__file__).parents[1]
    for program in ("user.py", "wrong.py"):
        (tmp_path / program).write_text((FOLDER / program).read_text())

    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "user.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
