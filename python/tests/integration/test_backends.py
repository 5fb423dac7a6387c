"""Programs that know nothing of process groups, on one: by an option of the command, over gloo and MPI."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 100
MPIRUN = Path(sys.executable).with_name("mpirun")
RUN = ("-m", "tensorcall", "run", "--backend", "process_group")
TRAINING = ("parameter_server", "pipeline", "rnn", "rl")
TESTS = ROOT / "python/tests"

over_mpi = pytest.mark.skipif(
    not MPIRUN.exists() or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an MPI beside this Python: pip install mpi4py mpich",
)


def printed(*command: str | Path, **variables: str) -> str:
    """What a command prints, if it ends well."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def mpirun(count: int, *arguments: str | Path) -> tuple[str | Path, ...]:
    """A command that runs Python with `arguments` on `count` ranks."""
    return MPIRUN, "-n", str(count), sys.executable, *arguments


def steps(text: str) -> list[str]:
    """The lines that show progress."""
    return re.findall(r"^step +\d+ .* \d+\.\d+$", text, re.MULTILINE)


def content(text: str) -> int:
    """How many workers say that all is well; lines of several may run into each other."""
    return len(set(re.findall(r"(?:rank |worker)\d+ is content", text)))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_the_example_runs_on_gloo() -> None:
    text = printed(sys.executable, *RUN, "examples/parallel_calls.py")

    assert text.count("exactly tensor.pow(2)") == 2
    assert "on 8 threads of worker1" in text


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("program", TRAINING)
def test_examples_that_train_run_on_gloo(program: str) -> None:
    assert len(steps(printed(sys.executable, *RUN, f"examples/train_{program}.py", "--steps", "2"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@over_mpi
def test_mpi_keeps_what_the_transport_relies_on() -> None:
    text = printed(*mpirun(3, TESTS / "programs/mpi_group.py"))

    assert content(text) == 3


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@over_mpi
def test_the_example_runs_on_mpi() -> None:
    """It has two workers, and two that are left over."""
    text = printed(*mpirun(4, *RUN, "examples/parallel_calls.py"))

    assert text.count("exactly tensor.pow(2)") == 2
    assert "on 8 threads of worker1" in text


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@over_mpi
@pytest.mark.parametrize("program", TRAINING)
def test_examples_that_train_run_on_mpi(program: str) -> None:
    command = mpirun(4, *RUN, f"examples/train_{program}.py", "--steps", "2")

    # No address to meet at: if they met by gloo, they would ask for one.
    assert len(steps(printed(*command))) == 2


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@over_mpi
def test_calls_of_all_kinds_reach_all_workers_of_mpi() -> None:
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))

    text = printed(*mpirun(4, TESTS / "programs/mpi_calls.py"), PYTHONPATH=path)

    assert content(text) == 4


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@over_mpi
def test_an_mpi_that_allows_one_thread_at_a_time_is_enough() -> None:
    text = printed(*mpirun(2, TESTS / "programs/mpi_levels.py"), MPI4PY_RC_THREAD_LEVEL="serialized")

    assert content(text) == 2


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@over_mpi
def test_an_mpi_for_its_first_thread_only_is_refused() -> None:
    text = printed(*mpirun(2, TESTS / "programs/mpi_levels.py"), MPI4PY_RC_THREAD_LEVEL="funneled")

    assert text.count("MPI was initialized for one thread only: initialize it with MPI_THREAD_MULTIPLE") == 2


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_a_program_for_the_agent_of_old_runs_unmodified() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

    text = printed(
        sys.executable, *torchrun, "-m", "tensorcall", "run", TESTS / "programs/of_old.py", LOGLEVEL="ERROR"
    )

    assert content(text) == 2
