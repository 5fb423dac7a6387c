"""torch's own tests that are known to pass on tensorcall, each as a test here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
LISTS = [HERE / "expected" / f"{name}.txt" for name in ("static_calls", "further")]
LINES = [line for file in LISTS for line in file.read_text().splitlines()]
IDS = [line for line in LINES if line and not line.startswith("#")]

pytestmark = [pytest.mark.peer, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All of them, run once, two at a time."""
    results = tmp_path_factory.mktemp("peer") / "results.jsonl"
    command = [sys.executable, str(HERE / "run.py"), "--results", str(results)]
    subprocess.run(command, timeout=1200, check=False)
    return {o["id"]: o for o in map(json.loads, results.read_text().splitlines())}


@pytest.mark.parametrize("test_id", IDS)
def test_peer(test_id: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[test_id]

    assert outcome["outcome"] == "pass", outcome["error"]
