"""The gate: we may not fall below 80 % of what we once were, as a ratio to torch in the same run.

What we once were is in `recorded.json`: for each figure, how many times better than torch we were, in the
worst of some runs, so that every ordinary run reaches it. A figure that falls short is measured again; it
fails if it falls short each time, although others left the machine alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import machine
from figures import Figures, Key
from page import QUIET
from peers import OURS, TORCH

FILE = Path(__file__).resolve().parent / "recorded.json"
SHARE = 0.8
ELSEWHERE = 1.0
"""Asked for on a machine of another kind than the figures were recorded on: to be no worse than torch."""
ATTEMPTS = 4
"""Times that a figure is measured before it may fail."""
LAST_CALL = 75.0
"""Seconds of measuring again after which no further attempt begins: all has to stay under three minutes."""
PAUSE = 4.0
"""Seconds between attempts, for whatever disturbs to pass; each pause is longer by as much."""
GATED = {
    Key("L1", "p50 us"): "L1",
    Key("L1", "CPU us"): "L1",
    Key("L2 function", "p50 us"): "L2",
    Key("C1", "calls/s"): "C1",
    Key("C1 1 KiB", "calls/s"): "C1",
    Key("B1 1M x1", "GB/s"): "B1",
    Key("B1 16M x1", "GB/s"): "B1",
    Key("remote().to_here()", "p50 us"): "refs",
    Key("RRef method", "p50 us"): "refs",
}
"""What is watched, and the workload to run for it."""


class Verdict(NamedTuple):
    """What became of a figure."""

    key: Key
    recorded: float
    measured: float | None
    least: float
    """That is enough."""

    @property
    def is_good(self) -> bool:
        """Whether it holds."""
        return self.measured is not None and self.measured >= self.least

    def __str__(self) -> str:
        measured = "nothing" if self.measured is None else f"{self.measured:.2f}x"
        state = "good" if self.is_good else "TOO LITTLE"
        return (
            f"{self.key.workload}, {self.key.metric}: {measured} better than torch, "
            f"at least {self.least:.2f}x ({self.recorded:.2f}x were recorded): {state}"
        )


def advantages(figures: Figures, key: Key) -> list[float]:
    """How many times better than torch we were, by round."""
    ratios = figures.ratios(key, OURS, TORCH)
    return ratios if key.higher_is_better else [1 / ratio for ratio in ratios]


def verdicts(figures: Figures) -> list[Verdict]:
    """What the figures say of all that was recorded."""
    recorded = json.loads(FILE.read_text())
    at_home = machine.is_like(recorded["about"])
    found = []
    for entry in recorded["figures"]:
        key = Key(entry["workload"], entry["metric"])
        measured = advantages(figures, key)
        middle = median(measured) if measured else None
        times = entry["times better than torch"]
        found.append(Verdict(key, times, middle, SHARE * times if at_home else min(ELSEWHERE, SHARE * times)))
    return found


def workloads(failed: list[Verdict]) -> tuple[str, ...]:
    """What to run again for these."""
    return tuple(dict.fromkeys(GATED[verdict.key] for verdict in failed))


Trials = list[dict[str, Any]]


def is_behind(
    trials: Trials,
    again: Callable[[tuple[str, ...]], Trials],
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether we fell behind what is recorded; `again` measures some workloads once more."""
    began, failed, calm = time.monotonic(), verdicts(Figures.of(trials)), 0
    for attempt in range(1, ATTEMPTS + 1):
        keys = {verdict.key for verdict in failed}
        failed = [verdict for verdict in verdicts(Figures.of(trials)) if verdict.key in keys]
        print("\n".join(map(str, failed)))
        failed = [verdict for verdict in failed if not verdict.is_good]
        if not failed:
            return False
        others = median(trial["others"] for trial in trials)
        calm += others < QUIET
        print(f"other processes used {others:.2f} cores")
        if attempt == ATTEMPTS or time.monotonic() - began > LAST_CALL:
            break
        print(f"once more: {', '.join(workloads(failed))}", file=sys.stderr)
        wait(attempt * PAUSE)
        trials = again(workloads(failed))
    if calm < 2:
        print("not judged: others used the machine, so this says nothing about us")
    return calm >= 2


def record(runs: list[Figures], about: dict[str, Any]) -> int:
    """Writes the file, from the worst of some runs; how many figures are in it."""
    entries = []
    for key in GATED:
        if found := [median(ratios) for run in runs if (ratios := advantages(run, key))]:
            value = round(min(found), 2)
            entries.append({"workload": key.workload, "metric": key.metric, "times better than torch": value})
    FILE.write_text(json.dumps({"about": about, "figures": entries}, indent=1) + "\n")
    return len(entries)
