"""Programs in Rust that tests start: built once, driven by lines, never left behind."""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0
"""Seconds in which a program answers."""


@functools.cache
def built(example: str) -> str:
    """The executable of an example of the crate; the test is skipped where there is nothing to build it with."""
    cargo = shutil.which("cargo")
    if cargo is None or not (ROOT / "Cargo.toml").exists():
        pytest.skip("no cargo to build a Rust program with")
    command = [cargo, "build", "--package", "tensorcall", "--example", example, "--message-format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return str(next(each["executable"] for each in said if each.get("executable")))


class RustProgram:
    """A process that answers each line of its input by a line; killed when the block ends."""

    def __init__(self, example: str, *arguments: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [built(example), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | environment,
        )
        self._pending = b""

    def say(self, order: str) -> None:
        """Gives an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(order.encode() + b"\n")

    def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        end = time.monotonic() + LIMIT
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self.process.stdout], [], [], max(end - time.monotonic(), 0))
            assert ready, f"it said nothing more than {self._pending!r}"
            more = os.read(self.process.stdout.fileno(), 65536)
            assert more, f"it ended with {self.process.wait(LIMIT)}"
            self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def ask(self, order: str) -> str:
        """What it answers to an order."""
        self.say(order)
        return self.hear()

    def end(self) -> None:
        """Lets it end, and makes sure that it ends well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(LIMIT) == 0

    def kill(self) -> None:
        """Ends it as `kill -9` does."""
        self.process.kill()
        self.process.wait(LIMIT)

    def __enter__(self) -> RustProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
