"""The gate: we may not fall below 80 % of what we once were, as a ratio to torch in the same run.

What we once were is in `recorded.json`: for each figure, how many times better than torch we were. Recorded
is the lower quartile of the rounds, so that an ordinary round reaches it.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from figures import Figures, Key
from peers import OURS, TORCH

FILE = Path(__file__).resolve().parent / "recorded.json"
SHARE = 0.8
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

    @property
    def is_good(self) -> bool:
        """Whether it holds."""
        return self.measured is not None and self.measured >= SHARE * self.recorded

    def __str__(self) -> str:
        measured = "nothing" if self.measured is None else f"{self.measured:.2f}x"
        least = SHARE * self.recorded
        state = "good" if self.is_good else "TOO LITTLE"
        return (
            f"{self.key.workload}, {self.key.metric}: {measured} better than torch, at least {least:.2f}x "
            f"({self.recorded:.2f}x were recorded): {state}"
        )


def advantages(figures: Figures, key: Key) -> list[float]:
    """How many times better than torch we were, by round."""
    ratios = figures.ratios(key, OURS, TORCH)
    return ratios if key.higher_is_better else [1 / ratio for ratio in ratios]


def verdicts(figures: Figures) -> list[Verdict]:
    """What the figures say of all that was recorded."""
    found = []
    for entry in json.loads(FILE.read_text())["figures"]:
        key = Key(entry["workload"], entry["metric"])
        measured = sorted(advantages(figures, key))
        middle = measured[len(measured) // 2] if measured else None
        found.append(Verdict(key, entry["times better than torch"], middle))
    return found


def workloads(failed: list[Verdict]) -> tuple[str, ...]:
    """What to run again for these."""
    return tuple(dict.fromkeys(GATED[verdict.key] for verdict in failed))


def record(figures: Figures, about: dict[str, Any]) -> int:
    """Writes the file; how many figures are in it."""
    entries = []
    for key in GATED:
        found = advantages(figures, key)
        if len(found) < 2:
            continue
        value = round(quantiles(found, n=4, method="inclusive")[0], 3)
        entries.append({"workload": key.workload, "metric": key.metric, "times better than torch": value})
    FILE.write_text(json.dumps({"about": about, "figures": entries}, indent=1) + "\n")
    return len(entries)
