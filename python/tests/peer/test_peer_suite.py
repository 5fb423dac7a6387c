"""torch's own tests that are known to pass on tensorcall, each as a test here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def ids(*lists: str) -> list[str]:
    """What stands in lists of `expected`."""
    files = [HERE / "expected" / f"{name}.txt" for name in lists]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


pytestmark = [pytest.mark.peer, pytest.mark.timeout(1200)]


def run(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Runs tests, two at a time; the outcomes by id."""
    results = folder / "results.jsonl"
    command = [sys.executable, str(HERE / "run.py"), *arguments, "--results", str(results)]
    subprocess.run(command, timeout=1200, check=False)
    return {o["id"]: o for o in map(json.loads, results.read_text().splitlines())}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All of them, run once."""
    return run(tmp_path_factory.mktemp("peer"))


@pytest.mark.parametrize("test_id", ids("static_calls", "further"))
def test_peer(test_id: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[test_id]

    assert outcome["outcome"] == "pass", outcome["error"]


@pytest.fixture(scope="module")
def outcomes_on_a_group(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A part of them, through a process group; `cargo xtask peer-suite --backend process_group` runs all."""
    arguments = ("--backend", "process_group", "--list", "process_group")
    return run(tmp_path_factory.mktemp("peer"), *arguments)


@pytest.mark.parametrize("test_id", ids("process_group"))
def test_peer_on_a_process_group(test_id: str, outcomes_on_a_group: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes_on_a_group[test_id]

    assert outcome["outcome"] == "pass", outcome["error"]
