"""Packages that are written for torch's RPC work on tensorcall, as they come from PyPI.

Their versions are in pyproject.toml, group `ecosystem`; `cargo xtask test` installs it. Where they are not
installed, these tests skip.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
STARTED_AFRESH = Path(sysconfig.get_path("purelib")) / "tensorcall_install.pth"
LIMIT = 100.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def port() -> str:
    """A port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            number = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", number + 1))
            except (OSError, OverflowError):
                continue
            return str(number)


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a program of this folder on tensorcall."""
    needed = {"graphs.py": "torch_geometric", "experience.py": "torchrl"}[program]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",  # the packages warn of themselves, and of torch
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tensorcall", "run", str(HERE / program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def ends(process: subprocess.Popen[str]) -> str:
    """What a program printed, if it ends well."""
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    finally:
        stop(process)
    assert process.returncode == 0, printed
    return printed


def stop(process: subprocess.Popen[str]) -> None:
    """Leaves nothing of a program behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def trainers(workers: int) -> list[str]:
    """What two trainers print whose loaders have so many worker processes."""
    meeting = port()
    started = [start("graphs.py", str(rank), str(workers), meeting) for rank in range(2)]
    try:
        return [ends(process) for process in started]
    finally:
        for process in started:
            stop(process)


def test_pytorch_geometric_samples_in_the_trainers() -> None:
    for rank, printed in enumerate(trainers(0)):
        assert "4 batches by tensorcall.rpc.api" in printed
        assert f"Shutdown RPC in mp_sampling_worker-{rank} gracefully" in printed
        assert "Traceback" not in printed


def test_pytorch_geometric_samples_in_the_worker_processes_of_loaders() -> None:
    for rank, printed in enumerate(trainers(2)):
        assert "4 batches by tensorcall.rpc.api" in printed
        for worker in (2 * rank, 2 * rank + 1):
            assert f"Shutdown RPC in mp_sampling_worker-{worker} gracefully" in printed
        assert "Traceback" not in printed


@pytest.mark.skipif(
    not STARTED_AFRESH.exists(), reason="processes that are started afresh need the start-up file"
)
@pytest.mark.parametrize("how", ["sync", "async"])
def test_torchrl_collects_frames(how: str) -> None:
    printed = ends(start("experience.py", "collect", how, port()))

    assert "collected 6 batches by tensorcall.rpc.api" in printed


def test_torchrl_keeps_a_replay_buffer_on_another_worker() -> None:
    printed = ends(start("experience.py", "buffer", port()))

    assert "sampled 32 rows by tensorcall.rpc.api" in printed
