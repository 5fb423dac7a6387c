"""All that was measured, by workload, metric and peer: medians, spread, ratios."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

HIGHER_IS_BETTER = frozenset({"calls/s", "GB/s"})


class Key(NamedTuple):
    """What a figure is of."""

    workload: str
    metric: str
    placement: str = "free"

    @property
    def higher_is_better(self) -> bool:
        """Else lower is."""
        return self.metric in HIGHER_IS_BETTER

    @property
    def title(self) -> str:
        """For a row of a table."""
        return self.workload if self.placement == "free" else f"{self.workload}, {PLACED[self.placement]}"


PLACED = {"split": "a core each", "same": "one core"}


class Figures:
    """The values of some rounds."""

    def __init__(self) -> None:
        self._values: dict[Key, dict[str, dict[int, float]]] = {}

    @classmethod
    def of(cls, trials: Iterable[dict[str, Any]]) -> Figures:
        """What some runs came to."""
        figures = cls()
        for trial in trials:
            figures.add(trial["round"], trial["placement"], trial["peer"], trial["figures"])
        return figures

    def add(self, number: int, placement: str, peer: str, lines: Iterable[dict[str, Any]]) -> None:
        """Takes what one run of a peer measured, in round `number`."""
        for line in lines:
            key = Key(line["workload"], line["metric"], placement)
            self._values.setdefault(key, {}).setdefault(peer, {})[number] = float(line["value"])

    @property
    def keys(self) -> list[Key]:
        """What was measured, in the order in which it came."""
        return list(self._values)

    @property
    def peers(self) -> list[str]:
        """Those of whom there is anything."""
        return list(dict.fromkeys(peer for by_peer in self._values.values() for peer in by_peer))

    def values(self, key: Key, peer: str) -> list[float]:
        """One per round."""
        return list(self._values.get(key, {}).get(peer, {}).values())

    def median(self, key: Key, peer: str) -> float | None:
        """Over the rounds."""
        values = self.values(key, peer)
        return median(values) if values else None

    def best(self, key: Key, peers: Iterable[str]) -> str | None:
        """Who of these is ahead."""
        known = {peer: value for peer in peers if (value := self.median(key, peer)) is not None}
        order = sorted(known, key=lambda peer: known[peer], reverse=key.higher_is_better)
        return order[0] if order else None

    def ratios(self, key: Key, ours: str, theirs: str) -> list[float]:
        """Ours by theirs, of each round in which both were measured."""
        by_peer = self._values.get(key, {})
        mine, other = by_peer.get(ours, {}), by_peer.get(theirs, {})
        return [mine[number] / other[number] for number in mine if other.get(number)]

    def ratio(self, key: Key, ours: str, theirs: str) -> float | None:
        """The median of those."""
        ratios = self.ratios(key, ours, theirs)
        return median(ratios) if ratios else None


def cell(values: list[float], spread: bool = True) -> str:
    """Median, with least and most in brackets."""
    if not values:
        return "-"
    text = short(median(values))
    return f"{text} ({short(min(values))}-{short(max(values))})" if spread and len(values) > 1 else text


def short(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(ratio: float | None) -> str:
    """A ratio."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table whose columns are in line."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in [head, *rows]
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def comparison(figures: Figures, ours: str, theirs: str, among: Iterable[Key] | None = None) -> str:
    """Two peers side by side."""
    rows = []
    for key in among or figures.keys:
        values = [figures.values(key, peer) for peer in (theirs, ours)]
        if all(values):
            ratio = times(figures.ratio(key, ours, theirs))
            better = "higher" if key.higher_is_better else "lower"
            rows.append([key.title, key.metric, *map(cell, values), ratio, better])
    return markdown(["workload", "metric", theirs, ours, "ratio", "better"], rows) if rows else ""
