"""The plots: latency over size, throughput over size, cost over workers, and a job of many workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import jobs
import matplotlib
from figures import Figures, Key
from peers import OURS, OURS_JOB, OURS_TCP, PEERS, TORCH, TORCH_UV
from settings import size_of

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

matplotlib.rcParams |= {"svg.hashsalt": "tensorcall", "svg.fonttype": "none", "font.size": 9}
SMALLEST = 8
"""Where a trivial call is drawn."""
WORKERS = (2, 4, 8, 16)
DASHES = ((0, (1, 1)), (0, (1, 3)), (0, (4, 2)), (0, (4, 2, 1, 2)), (0, (8, 2)))
"""For the floors, which have one colour."""
COSTS = ("init ms", "first call us", "added resident MiB", "added threads", "shutdown ms")
BOLD = {OURS: "#c2410c", OURS_TCP: "#fb923c", TORCH: "#1d4ed8", TORCH_UV: "#60a5fa"}


def draw(figures: Figures, sizes: Iterable[str], folder: Path) -> list[str]:
    """Draws what there are figures for; the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(sizes)
    plots: dict[str, Callable[[], Any]] = {
        "latency.svg": lambda: latency(figures, names),
        "throughput.svg": lambda: throughput(figures, names),
        "workers.svg": lambda: workers(figures),
        "job.svg": lambda: job(figures),
    }
    made = []
    for name, plot in plots.items():
        if (figure := plot()) is not None:
            # No date in it: the same figures make the same file.
            figure.savefig(folder / name, bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
            made.append(name)
    return made


def latency(figures: Figures, sizes: list[str]) -> Any:
    """What one call takes, over the size of the tensor that it carries."""

    def points(peer: str) -> list[tuple[float, float, float, float]]:
        found = [_point(figures, Key("L1", "p50 us"), peer, SMALLEST)]
        found += [_point(figures, Key(f"B1 {size} x1", "p50 us"), peer, size_of(size)) for size in sizes]
        return [point for point in found if point is not None]

    return _over_size(points, sizes, "one call, p50 (µs)", "Latency of a call, by the size of its tensor")


def throughput(figures: Figures, sizes: list[str]) -> Any:
    """Bytes per second one way with four in flight, over the size of a tensor."""

    def points(peer: str) -> list[tuple[float, float, float, float]]:
        in_flight = 1 if peer.startswith("floor") else 4
        keys = [(Key(f"B1 {size} x{in_flight}", "GB/s"), size_of(size)) for size in sizes]
        found = [_point(figures, key, peer, size) for key, size in keys]
        return [point for point in found if point is not None]

    return _over_size(
        points, sizes, "GB/s", "Throughput one way, four calls in flight, by the size of a tensor"
    )


def workers(figures: Figures) -> Any:
    """What a job costs, over the number of its workers."""
    plot, axes = plt.subplots(1, len(COSTS), figsize=(3 * len(COSTS), 3))
    drawn = False
    for axis, metric in zip(axes, COSTS, strict=True):
        for peer in BOLD:
            known = {n: figures.median(Key(f"M1 {n} workers", metric), peer) for n in WORKERS}
            points = {n: value for n, value in known.items() if value is not None}
            if points:
                axis.plot(list(points), list(points.values()), marker="o", color=BOLD[peer], label=peer)
                drawn = True
        axis.set(title=metric, xlabel="workers", xscale="log", yscale="log")
        _ticks(axis, list(WORKERS), list(map(str, WORKERS)))
    axes[0].legend()
    if not drawn:
        plt.close(plot)
        return None
    plot.tight_layout()
    return plot


def job(figures: Figures) -> Any:
    """What a job of many workers takes: messages and operations of each, and the time of all."""
    if not (sizes := jobs.sizes(figures)):
        return None
    panels = {
        "messages, by worker": [(phase, jobs.MESSAGES) for phase in jobs.PHASES],
        "operations on the store, by worker": [("init", jobs.OPERATIONS)],
        "time of the whole job (ms)": [(phase, jobs.TIME) for phase in jobs.PHASES],
    }
    plot, axes = plt.subplots(1, len(panels), figsize=(12, 3.5))
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for phase, metric in lines:
            known = {n: figures.median(jobs.key(phase, n, metric), OURS_JOB) for n in sizes}
            points = {n: value for n, value in known.items() if value is not None}
            color = f"C{jobs.PHASES.index(phase)}"
            axis.plot(list(points), list(points.values()), marker="o", color=color, label=phase)
        is_time = lines[0][1] == jobs.TIME
        axis.set(title=title, xlabel="workers", xscale="log", yscale="log" if is_time else "linear")
        if is_time:
            _ticks(axis, sizes, list(map(str, sizes)))
        else:
            axis.set_xticks(sizes, list(map(str, sizes)))
            axis.set_xticks([], minor=True)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axis.legend()
    plot.tight_layout()
    return plot


def _over_size(points: Callable[[str], list[Any]], sizes: list[str], label: str, title: str) -> Any:
    plot, axis = plt.subplots(figsize=(9, 5.5))
    dashes, drawn = iter(DASHES), False
    for peer in (peer.name for peer in PEERS):
        if not (found := points(peer)):
            continue
        at, middle, least, most = zip(*found, strict=True)
        style: dict[str, Any] = {"linewidth": 1, "alpha": 0.8}
        if peer in BOLD:
            style = {"color": BOLD[peer], "linewidth": 2.2}
        elif peer.startswith("floor"):
            style |= {"linestyle": next(dashes), "color": "black"}
        (line,) = axis.plot(at, middle, marker=".", label=peer, **style)
        axis.fill_between(at, least, most, alpha=0.1, color=line.get_color(), linewidth=0)
        drawn = True
    if not drawn:
        plt.close(plot)
        return None
    axis.set(title=title, xlabel="size", ylabel=label, xscale="log", yscale="log")
    _ticks(axis, [SMALLEST, *map(size_of, sizes)], ["none", *(f"{size[:-1]} {size[-1]}iB" for size in sizes)])
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return plot


def _ticks(axis: Any, places: list[int], names: list[str]) -> None:
    """Names what was measured, and plain numbers at the side."""
    axis.set_xticks(places, names)
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3)


def _point(figures: Figures, key: Key, peer: str, size: int) -> tuple[float, float, float, float] | None:
    values = figures.values(key, peer)
    return (size, median(values), min(values), max(values)) if values else None
