"""One run of one peer: its processes, what they printed, and who else used the machine meanwhile."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loops import CpuClock

ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Trial:
    """What came of a run."""

    round: int
    peer: str
    placement: str
    figures: list[dict[str, Any]]
    seconds: float
    others: float
    """Cores that other processes used, on average."""
    failure: str | None = None

    def as_data(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


class TrialError(RuntimeError):
    """The processes failed, or took too long."""


def environment() -> dict[str, str]:
    """What the processes find: loopback to meet on, and this checkout's package."""
    local = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    path = f"{ROOT / 'python'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return local | os.environ | {"PYTHONPATH": path}


@contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The caller, killed with all it started when the block ends."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            yield process, errors
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def figures_of(
    command: list[str], limit: float, see: Callable[[str], None], has_daemons: bool = False
) -> tuple[list[dict[str, Any]], float]:
    """Runs a command; the figures that it prints, and the CPU time of its daemons.

    Raises:
        TrialError: it failed, or took more than `limit` seconds.
    """
    figures: list[dict[str, Any]] = []
    used = 0.0
    with started(command) as (process, errors):
        for line in lines_of(process, limit):
            if line.startswith("{"):
                figures.append(json.loads(line))
                see(figures[-1]["workload"])
                used = max(used, CpuClock(process.pid).used() if has_daemons else 0.0)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        if process.returncode != 0:
            errors.seek(0)
            how = f"ended with {process.returncode}" if process.returncode else "took too long"
            raise TrialError(f"{' '.join(command[-6:])} {how}\n{errors.read()[-3000:].strip()}")
    return figures, used


def lines_of(process: subprocess.Popen[str], limit: float) -> Iterator[str]:
    """What a process prints, until it ends or time is up."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    end = time.monotonic() + limit
    with suppress(queue.Empty):
        while (line := lines.get(timeout=max(0.0, end - time.monotonic()))) is not None:
            yield line


class Others:
    """What the rest of the machine does while something runs."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy, self._own = _busy(), _own()

    def cores(self, uncounted: float) -> float:
        """Cores that others used on average; `uncounted` is CPU time of ours that the kernel did not add."""
        took = time.monotonic() - self._began
        own = max(_own() - self._own, uncounted)
        return max(0.0, round((_busy() - self._busy - own) / took, 2))


def _busy() -> float:
    """CPU time of all processes."""
    fields = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, fields)
    return (user + nice + system + irq + soft + steal) / TICKS


def _own() -> float:
    """CPU time of this process and of what it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
