"""The programs of this project run: the example, the benchmark and the soak."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str, limit: float = 50) -> str:
    """What a Python program prints, if it ends well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_example_runs_unmodified() -> None:
    """LOG row 1."""
    printed = run("-m", "tensorcall", "run", "examples/parallel_calls.py")

    assert "got torch.bfloat16 [2, 32, 100, 100] on cpu; main thread is in step" in printed
    assert "on cpu; main thread is in shutdown(graceful=True)" in printed
    assert printed.count("exactly tensor.pow(2)") == 2
    assert "on 8 threads of worker1" in printed


@pytest.mark.slow
def test_actors_and_a_learner_hold_references_to_each_other() -> None:
    printed = run("-m", "tensorcall", "run", "examples/actor_learner.py")

    assert printed.startswith("a walk of 5 steps took ")


@pytest.mark.slow
def test_a_parameter_server_is_an_object_that_trainers_refer_to() -> None:
    printed = run("-m", "tensorcall", "run", "examples/parameter_server.py")

    assert printed == "after 60 steps of 3 trainers the weight is [2.0, -1.0, 0.5]\n"


@pytest.mark.slow
def test_the_benchmark_measures_both_engines_in_turn(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    short = ["--rounds", "1", "--calls", "20", "--seconds", "0.05", "--workloads", "L1,C1"]

    printed = run("python/benches/run.py", "--quick", *short, "--json", str(figures))

    assert re.search(r"\| workload +\| metric +\| torch +\| tensorcall +\| ratio", printed)
    trials = {trial["peer"]: trial["figures"] for trial in json.loads(figures.read_text())["trials"]}
    assert list(trials)[:2] == ["torch", "tensorcall"]
    for peer in ("torch", "tensorcall"):
        assert {figure["workload"] for figure in trials[peer]} == {"L1", "C1", "C1 1 KiB"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nothing_grows_over_many_calls() -> None:
    """LOG rows 9 and 62: a short soak, with the bounds of the long one; `cargo xtask soak` is that."""
    short = ["--small", "30000", "--large", "500", "--references", "5000"]

    printed = run("python/benches/soak.py", *short, limit=110)

    assert printed.endswith("nothing grew\n"), printed
