"""One test in a process group of its own: started by fork, ended by its result or its limit."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import tempfile
import time
import traceback
import unittest
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import witness

_STACKS_WAIT = 1.0
"""Seconds that a test which ran past its limit gets for writing its stacks, before it is killed."""

_ERROR_LINES = 40


@dataclass(frozen=True)
class Outcome:
    """How one test ended."""

    id: str
    outcome: str
    """`pass`, `fail`, `timeout` or `skip`."""
    seconds: float
    calls: int = 0
    """Calls that tensorcall agents sent in it, over all ranks."""
    agents: list[str] = field(default_factory=list)
    error: str = ""
    """The last lines of what went wrong, or why it was skipped."""


class Case:
    """A test that runs in a forked process, which leads a session of its own."""

    def __init__(self, test_id: str, limit: float, demands: witness.Demands | None) -> None:
        """Starts it; `demands` is what its ranks must give evidence of, if anything."""
        self.id = test_id
        self._demands = demands
        self._folder = Path(tempfile.mkdtemp(prefix="peer-"))
        self._started = time.monotonic()
        self.deadline = self._started + limit
        self._limit = limit
        self.pid = os.fork()
        if self.pid == 0:
            _run_in_child(test_id, self._folder)
        self.pidfd = os.pidfd_open(self.pid)

    def finish(self) -> Outcome:
        """The outcome of a test whose process has ended; clears away what it left."""
        seconds = time.monotonic() - self._started
        status = os.waitpid(self.pid, 0)[1]
        return self._close(self._judge(os.waitstatus_to_exitcode(status)), seconds)

    def expire(self) -> Outcome:
        """Ends a test that ran past its limit: its processes write their stacks and are killed."""
        seconds = time.monotonic() - self._started
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGUSR1)
        end = time.monotonic() + _STACKS_WAIT
        seen = -1
        while time.monotonic() < end and seen != (seen := self._log_size()):
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        text = f"ran past {self._limit:g} s\n{_tail(self._log(), 8 * _ERROR_LINES)}"
        return self._close(("timeout", text), seconds)

    def _judge(self, exit_code: int) -> tuple[str, str]:
        result = self._folder / "result.json"
        if not result.exists():
            return "fail", f"its process ended with {exit_code}\n{_tail(self._log())}"
        outcome, text = json.loads(result.read_text())
        if outcome == "pass" and self._demands is not None:
            objection = witness.verdict(witness.read(self._folder), self._demands)
            if objection is not None:
                return "fail", objection
        return outcome, text

    def _close(self, judged: tuple[str, str], seconds: float) -> Outcome:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.pidfd)
        ranks = witness.read(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        return Outcome(
            self.id,
            judged[0],
            round(seconds, 2),
            witness.calls(ranks),
            witness.agents(ranks),
            judged[1],
        )

    def _log(self) -> str:
        try:
            return (self._folder / "log").read_text(errors="replace")
        except OSError:
            return ""

    def _log_size(self) -> int:
        return len(self._log())


def _run_in_child(test_id: str, folder: Path) -> None:
    """Runs the test in a forked child and ends the process; never returns."""
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["TENSORCALL_PEER_FOLDER"] = str(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        result = _run(test_id)
        (folder / "result.tmp").write_text(json.dumps(result))
        (folder / "result.tmp").rename(folder / "result.json")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _run(test_id: str) -> tuple[str, str]:
    import suites

    suite, _, name = test_id.partition(".")
    result = unittest.TestResult()
    test: Any = suites.build(suite)(name)
    test.run(result)
    bad = [text for _, text in result.errors + result.failures]
    if bad:
        return "fail", _tail("\n".join(bad))
    if result.skipped:
        return "skip", result.skipped[0][1]
    if result.unexpectedSuccesses:
        return "fail", "succeeded, which was not expected"
    return "pass", ""


def _tail(text: str, lines: int = _ERROR_LINES) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])
