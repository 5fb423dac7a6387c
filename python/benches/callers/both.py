"""The other process of a pair: this program once more, as the callee."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BENCHES = Path(__file__).resolve().parent.parent
if str(BENCHES) not in sys.path:
    sys.path.insert(0, str(BENCHES))

PATIENCE = 20.0
"""Seconds that a callee may take to end once there is nothing left to do."""


@contextmanager
def callee(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the callee with the arguments of this process, and more."""
    command = [sys.executable, sys.argv[0], "callee", *sys.argv[1:], *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()


def greeting(process: subprocess.Popen[str]) -> str:
    """The first line that the callee prints: where it is to be found."""
    assert process.stdout is not None
    if not (line := process.stdout.readline().strip()):
        raise RuntimeError("the callee did not start")
    return line
