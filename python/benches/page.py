"""The latest figures in `docs/performance.md` and the README, between two marks; the rest is by hand."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import aims
import jobs
from figures import Figures, Key, cell, comparison, markdown
from peers import OURS, OURS_GLOO, OURS_RUST, OURS_TCP, PEERS, TORCH, TORCH_UV

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"
README = Path(__file__).resolve().parents[2] / "README.md"
PICTURES = PAGE.parent / "performance"
MARKS = "<!-- bench -->", "<!-- /bench -->"
SMALL = ("L1", "L2 function", "L2 torch.add", "C1", "C1 1 KiB")
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
    if table := jobs.table(figures):
        parts += ["### A simulated job", jobs.INTRO, table]
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
    middle = loads[len(loads) // 2] if loads else 0.0
    most = loads[-1] if loads else 0.0
    quiet = f"- other processes used {middle:.2f} cores in the middle run, {most:.2f} at most"
    if is_disturbed(trials):
        noisy = sum(load >= QUIET for load in loads)
        quiet += (
            f". **Measured under load**: in {noisy} of {len(loads)} runs others used {QUIET} cores or more, "
            "so these figures show the form of the report and not what the machine can do"
        )
    return "\n".join([*lines, quiet])


def is_disturbed(trials: list[dict[str, Any]]) -> bool:
    """Whether others used the machine in more than a tenth of the runs."""
    return 10 * sum(trial["others"] >= QUIET for trial in trials) > len(trials)


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
    _between_marks(PAGE, f"{text}\n\n{shown}")


def write_summary(figures: Figures, about: dict[str, str], trials: list[dict[str, Any]]) -> None:
    """Puts the rows that say most into the README, unless others disturbed."""
    if is_disturbed(trials):
        return
    keys = [key for key in figures.keys if key.placement == "free" and _says_much(key)]
    if not (table := comparison(figures, OURS, TORCH, keys)):
        return
    rounds = len({trial["round"] for trial in trials})
    versions = f"{about['cores']} cores, torch {about.get('torch', '?')}, medians of {rounds} rounds"
    intro = (
        f"{versions} (least and most in brackets). [docs/performance.md](docs/performance.md) has the "
        "conditions, the other workloads, Ray, gRPC, MPI, bare sockets, tarpc, tonic and the machine's floor."
    )
    _between_marks(README, f"{fill(intro, 112)}\n\n{table}")


def _says_much(key: Key) -> bool:
    small = key.workload in SMALL or key.workload in ("remote().to_here()", "RRef method")
    if small or key.workload in ("backward", "self call"):
        return key.metric != "p99 us" or key.workload == "L1"
    return key.metric == "GB/s" and key.workload.startswith(("B1", "B2")) and key.workload.endswith("x1")


def _between_marks(file: Path, text: str) -> None:
    before, _, rest = file.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    file.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}")
