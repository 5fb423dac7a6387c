"""The runner of the peer suite catches what it is there to catch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PIDS_VARIABLE = "TENSORCALL_PLANTED_PIDS"
RUNNER = Path(__file__).with_name("run.py")
EMPTIED = "import tensorcall; tensorcall.install = lambda: None"

Run = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the peer suite in a process of its own; gives each test's outcome by its id."""

    def runner(*arguments: str, first: str = "", status: int) -> dict[str, dict[str, Any]]:
        results = tmp_path / "results.jsonl"
        program = f"import runpy, sys\n{first}\nrunpy.run_path({str(RUNNER)!r}, run_name='__main__')"
        command = [sys.executable, "-c", program, *arguments, "--results", str(results)]
        done = subprocess.run(
            command, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == status, done.stdout
        return {o["id"]: o for o in map(json.loads, results.read_text().splitlines())}

    return runner


def test_a_call_passes_and_moves_the_counter_of_our_agent(run: Run) -> None:
    outcomes = run("--filter", r"^TensorPipeRpcTest\.test_add$", status=0)

    outcome = outcomes["TensorPipeRpcTest.test_add"]
    assert outcome["outcome"] == "pass"
    assert outcome["calls"] >= 4
    assert all(agent.startswith("tensorcall.") for agent in outcome["agents"])


def test_a_run_with_an_emptied_install_fails(run: Run) -> None:
    tests = r"^TensorPipeRpcTest\.test_(add|wrong_types)$"

    outcomes = run("--filter", tests, first=EMPTIED, status=1)

    assert outcomes["TensorPipeRpcTest.test_add"]["outcome"] == "fail"
    without_agent = outcomes["TensorPipeRpcTest.test_wrong_types"]
    assert without_agent["outcome"] == "fail"
    assert "init_rpc is not tensorcall's" in without_agent["error"]


def test_torch_agents_cannot_be_made_in_a_test(run: Run) -> None:
    name = "PlantedTest.test_torch_agent_is_refused"

    outcome = run("--module", "planted", "--filter", name, status=1)[name]

    assert "no rank had a tensorcall agent" in outcome["error"]  # so the test itself passed


def test_a_test_without_our_agent_fails_unless_it_is_listed(run: Run) -> None:
    name = "PlantedTest.test_makes_no_agent"

    outcome = run("--module", "planted", "--filter", name, status=1)[name]

    assert "no rank had a tensorcall agent" in outcome["error"]


@pytest.mark.parametrize("engine", ["tensorcall", "torch"])
def test_a_test_that_hangs_shows_its_stacks_and_is_killed_with_its_children(
    run: Run, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PlantedTest.test_hangs_with_a_child"
    pids = tmp_path / "pids"
    monkeypatch.setenv(PIDS_VARIABLE, str(pids))

    limited = ["--limit", "10", "--engine", engine]
    outcome = run("--module", "planted", "--filter", name, *limited, status=1)[name]

    assert outcome["outcome"] == "timeout"
    assert "_wait_for_ever" in outcome["error"]
    assert len(pids.read_text().split()) == 8
    deadline = time.monotonic() + 5  # a killed process may take a moment to be gone
    left = [int(pid) for pid in pids.read_text().split()]
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _runs(pid)]
    assert left == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("test_last_rank_dies", "rank 3 died by signal 9"), ("test_last_rank_fails", "planted")],
)
def test_what_goes_wrong_on_the_last_rank_fails_the_test(run: Run, name: str, text: str) -> None:
    name = f"PlantedTest.{name}"

    outcome = run("--module", "planted", "--filter", name, "--engine", "torch", status=1)[name]

    assert outcome["outcome"] == "fail"
    assert text in outcome["error"]


def test_a_listed_test_that_does_not_exist_fails_the_run(run: Run, tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("TensorPipeRpcTest.test_no_such_test\n")

    outcomes = run("--filter", str(ids), "--engine", "torch", status=1)

    assert [outcome["outcome"] for outcome in outcomes.values()] == ["fail"]


def test_selecting_nothing_is_an_error() -> None:
    command = [sys.executable, str(RUNNER), "--filter", r"^TensorPipeRpcTest\.test_no_such$"]

    done = subprocess.run([*command, "--engine", "torch"], timeout=120, capture_output=True)

    assert done.returncode == 2


def _runs(pid: int) -> bool:
    """Whether a process runs: it exists and is no zombie."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"
