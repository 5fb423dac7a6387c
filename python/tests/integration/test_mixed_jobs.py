"""Python and Rust workers in one job: calls, references, errors, losses and shutdown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from rust_program import ROOT, built

PROGRAM = ROOT / "python/tests/programs/mixed.py"
DYNAMIC = ROOT / "python/tests/programs/mixed_dynamic.py"
LIMIT = 60.0


@pytest.fixture(scope="module")
def worker() -> str:
    """The program of Rust workers."""
    return built("mixed_worker")


@contextmanager
def started(
    command: list[str], environment: dict[str, str], **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, of which nothing is left in the end."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.timeout(3 * LIMIT)
def test_two_workers_of_each_language_meet_where_torchrun_says(worker: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "4"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]

    with started([*torchrun, str(PROGRAM), worker, "2,3"], {}) as job:
        said, _ = job.communicate(timeout=LIMIT)

    assert job.returncode == 0, said
    for part in ("calls", "errors", "cancellations", "references", "losses"):
        assert f"{part} done in" in said
    # The other workers were lost, on purpose.
    assert "py0 left" in said


@pytest.mark.timeout(3 * LIMIT)
def test_two_workers_of_each_language_meet_where_rust_hosts_the_store(worker: str) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    command = [sys.executable, str(PROGRAM), worker, "0,1"]

    said, jobs = {}, []
    with (
        started(command, {**place, "RANK": "0"}) as first,
        started(command, {**place, "RANK": "1"}) as second,
        started(command, {**place, "RANK": "2"}) as third,
        started(command, {**place, "RANK": "3"}) as fourth,
    ):
        jobs = [first, second, third, fourth]
        for rank in (2, 3, 0, 1):
            said[rank], _ = jobs[rank].communicate(timeout=LIMIT)

    assert [job.returncode for job in jobs] == [0, 0, 0, 0], said
    assert "losses done in" in said[2]
    assert "py2 left" in said[2]


@pytest.mark.timeout(3 * LIMIT)
def test_workers_of_both_languages_join_and_leave_a_dynamic_group(worker: str) -> None:
    place = f"tcp://127.0.0.1:{free_port()}"

    with started([sys.executable, str(DYNAMIC), worker, "0", place], {}) as job:
        said, _ = job.communicate(timeout=LIMIT)

    assert job.returncode == 0, said
    assert "all have joined and left" in said


@pytest.mark.timeout(3 * LIMIT)
def test_the_example_of_a_mixed_job_ends_by_itself_and_says_what_it_did() -> None:
    program = built("mixed_job")

    with started([program], {"PYTHON": sys.executable}) as job:
        said, _ = job.communicate(timeout=LIMIT)

    assert job.returncode == 0, said
    assert "words: all right" in said
    assert "model: has left together with words" in said
