"""The figures of several rounds: medians, ratios, a table."""

from __future__ import annotations

from statistics import median
from typing import Any

_HIGHER_IS_BETTER = {"calls/s", "GB/s"}


class Figures:
    """Every value that was measured, by workload, metric and engine."""

    def __init__(self, engines: list[str]) -> None:
        self._engines = engines
        self._values: dict[tuple[str, str], dict[str, list[float]]] = {}

    def add(self, engine: str, lines: list[dict[str, Any]]) -> None:
        """Takes what one run of `engine` measured."""
        for line in lines:
            by_engine = self._values.setdefault((line["workload"], line["metric"]), {})
            by_engine.setdefault(engine, []).append(float(line["value"]))

    def ratio(self, key: tuple[str, str]) -> float | None:
        """The second engine's median by the first's, if both were measured."""
        values = self._values[key]
        if len(self._engines) < 2 or any(engine not in values for engine in self._engines):
            return None
        return median(values[self._engines[1]]) / median(values[self._engines[0]])

    def table(self) -> str:
        """Markdown: medians with the range in brackets, and the ratio."""
        compare = len(self._engines) > 1
        head = ["workload", "metric", *self._engines]
        head += [f"{self._engines[1]} / {self._engines[0]}", "better"] if compare else []
        rows = [head]
        for key, values in self._values.items():
            row = [*key, *(_cell(values.get(engine, [])) for engine in self._engines)]
            if compare:
                ratio = self.ratio(key)
                row.append("-" if ratio is None else f"{ratio:.2f}x")
                row.append("higher" if key[1] in _HIGHER_IS_BETTER else "lower")
            rows.append(row)
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join(lines)

    def as_data(self) -> list[dict[str, Any]]:
        """One entry per workload and metric, for a file."""
        return [
            {"workload": key[0], "metric": key[1], "values": values, "ratio": self.ratio(key)}
            for key, values in self._values.items()
        ]


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{_short(median(values))} ({_short(min(values))}-{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
