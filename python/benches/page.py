"""`docs/performance.md`: the latest figures, between two marks; the rest of the page is written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aims
from figures import Figures, cell, comparison, markdown
from peers import OURS, OURS_GLOO, OURS_RUST, OURS_TCP, PEERS, TORCH, TORCH_UV

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"
PICTURES = PAGE.parent / "performance"
MARKS = "<!-- bench -->", "<!-- /bench -->"
QUIET = 0.25
"""Cores that others may use in a run that counts as undisturbed."""
SIDE_BY_SIDE = (
    ("Beside torch, default options", OURS, TORCH),
    ("Beside torch, TCP only", OURS_TCP, TORCH_UV),
    ("Over a process group of gloo, beside torch over TCP", OURS_GLOO, TORCH_UV),
    ("From Rust, beside tarpc", OURS_RUST, "tarpc"),
    ("From Rust, beside tonic", OURS_RUST, "tonic"),
)


def report(figures: Figures, about: dict[str, str], trials: list[dict[str, Any]]) -> str:
    """All tables."""
    parts = [conditions(about, trials)]
    if table := aims.table(figures):
        parts += ["### What we aim at", table]
    for title, ours, theirs in SIDE_BY_SIDE:
        if table := comparison(figures, ours, theirs):
            parts += [f"### {title}", table]
    parts += ["### Everybody, medians", everybody(figures)]
    if table := cpu(figures):
        parts += ["### CPU time of a call on both sides, microseconds, medians", table]
    parts += ["Who is who:", "\n".join(f"- **{p.name}**: {p.what}" for p in PEERS if p.name in figures.peers)]
    return "\n\n".join(parts)


def conditions(about: dict[str, str], trials: list[dict[str, Any]]) -> str:
    """What was measured on, and whether it was quiet."""
    lines = [f"- {name}: {text}" for name, text in about.items() if name != "command"]
    lines.append(f"- command: `{about['command']}`")
    rounds = len({trial["round"] for trial in trials})
    minutes = sum(trial["seconds"] for trial in trials) / 60
    lines.append(f"- {rounds} rounds, {minutes:.0f} minutes; medians, with least and most in brackets")
    loads = sorted(trial["others"] for trial in trials)
    noisy = sum(load >= QUIET for load in loads)
    middle = loads[len(loads) // 2] if loads else 0.0
    most = loads[-1] if loads else 0.0
    quiet = f"- other processes used {middle:.2f} cores in the middle run, {most:.2f} at most"
    if noisy > len(loads) / 10:
        quiet += (
            f". **Measured under load**: in {noisy} of {len(loads)} runs others used {QUIET} cores or more, "
            "so these figures show the form of the report and not what the machine can do"
        )
    return "\n".join([*lines, quiet])


def everybody(figures: Figures) -> str:
    """A column for each peer; what less than three of them can do is in the other tables."""
    names = [peer.name for peer in PEERS if peer.name in figures.peers]
    rows = []
    for key in figures.keys:
        cells = [cell(figures.values(key, name), spread=False) for name in names]
        if sum(text != "-" for text in cells) >= min(3, len(names)) and key.metric != "CPU us":
            rows.append([key.title, key.metric, *cells])
    return markdown(["workload", "metric", *names], rows) if rows else "Nothing was measured."


def cpu(figures: Figures) -> str:
    """CPU time of a call on both sides, by peer."""
    names = [peer.name for peer in PEERS if peer.name in figures.peers]
    keys = [key for key in figures.keys if key.metric == "CPU us"]
    rows = [[key.title, *(cell(figures.values(key, name), spread=False) for name in names)] for key in keys]
    return markdown(["workload", *names], rows) if rows else ""


def write(text: str, pictures: list[str]) -> None:
    """Puts a report into the page."""
    shown = "\n\n".join(f"![{name}]({PICTURES.name}/{name})" for name in pictures)
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{shown}\n\n{MARKS[1]}{after}")
