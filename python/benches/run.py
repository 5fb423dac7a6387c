"""Measures tensorcall, its peers and the floor, in turn, in one run.

    cargo xtask bench                            all peers, all workloads, three rounds: over 20 minutes
    cargo xtask bench --quick                    torch's agent, a bare socket and ours, under three minutes
    cargo xtask bench --gate                     what CI runs: are we still as far ahead of torch as recorded?
    cargo xtask bench --peers "tensorcall rust,tarpc,tonic" --workloads L1,C1,B1
    cargo xtask bench --page                     all, and write docs/performance.md with its plots
    cargo xtask bench --from FILE --page         the same of a run that is over, from its --json file

Each round goes through the peers, each round in another order; each peer's processes start anew, warm up,
and time themselves. Figures are medians over the rounds. Judge by ratios: both sides met the same machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gate
import machine
import page
from figures import Figures, comparison
from peers import OURS, OURS_TCP, PEERS, RUST, TORCH, TORCH_UV, WORKLOADS, Peer
from schedule import Schedule
from settings import PLACEMENTS, Settings

FULL_SIZES, QUICK_SIZES = ("1K", "64K", "1M", "16M", "256M"), ("1M", "16M", "256M")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="cargo xtask bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(peer.name for peer in PEERS)
    parser.add_argument("--quick", action="store_true", help="the peers and workloads that matter most")
    parser.add_argument("--gate", action="store_true", help="fail if we fell behind what is recorded")
    parser.add_argument("--record", action="store_true", help="record what the gate compares with")
    parser.add_argument("--peers", help=f"some of them, separated by commas: {names}")
    parser.add_argument("--workloads", help=f"some of them, separated by commas: {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="times that each peer is measured")
    parser.add_argument("--calls", type=int, help="per latency workload")
    parser.add_argument("--seconds", type=float, help="for each of the other workloads")
    parser.add_argument("--sizes", help=f"of large tensors, by default {','.join(FULL_SIZES)}")
    parser.add_argument("--workers", help="sizes of the jobs of M1, by default 2,4,8,16")
    parser.add_argument("--placements", help=f"some of {', '.join(PLACEMENTS)}; by default all")
    parser.add_argument("--quiet", action="store_true", help="measure again what others disturbed")
    parser.add_argument(
        "--page", action="store_true", help="write docs/performance.md and the README's table"
    )
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        nargs="+",
        help="such a file: measure nothing (several for --record)",
    )
    parser.add_argument("--rust", type=Path, default=RUST, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    quick = options.quick or options.gate
    options.calls = options.calls or (1000 if quick else 3000)
    options.seconds = options.seconds or (0.3 if quick else 0.4)
    sizes = ("1M", "16M") if options.gate else QUICK_SIZES if quick else FULL_SIZES
    options.sizes = tuple(options.sizes.split(",")) if options.sizes else sizes
    options.workers = tuple(map(int, (options.workers or ("4" if quick else "2,4,8,16")).split(",")))
    placements = options.placements or ("free" if quick else ",".join(PLACEMENTS))
    options.placements = tuple(placements.split(","))
    if unknown := set(options.placements) - set(PLACEMENTS):
        parser.error(f"no such placement: {', '.join(unknown)}")
    return options


def chosen(options: argparse.Namespace) -> list[tuple[Peer, tuple[str, ...]]]:
    """Who is measured, and on what."""
    quick = options.quick or options.gate
    names = {peer.name for peer in PEERS}
    if options.peers:
        names = {name.strip() for name in options.peers.split(",")}
        if unknown := names - {peer.name for peer in PEERS}:
            sys.exit(f"no such peer: {', '.join(sorted(unknown))}")
    elif options.gate:
        names = {TORCH, OURS}
    wanted = set(WORKLOADS)
    if options.workloads:
        wanted = set(options.workloads.split(","))
        if unknown := wanted - set(WORKLOADS):
            sys.exit(f"no such workload: {', '.join(sorted(unknown))}")
    elif options.gate:
        wanted = set(gate.GATED.values())
    found = []
    for peer in (peer for peer in PEERS if peer.name in names):
        offered = peer.workloads if options.peers or options.workloads or not quick else peer.quick
        if not (workloads := tuple(name for name in offered if name in wanted)):
            continue
        if (absence := peer.absence(options.rust)) is None:
            found.append((peer, workloads))
        else:
            print(f"left out: {peer.name}: {absence}", file=sys.stderr)
    return found


def measure(options: argparse.Namespace, peers: list[tuple[Peer, tuple[str, ...]]]) -> list[dict[str, Any]]:
    """All rounds; what is there already is in the file, should this end early."""
    settings = Settings((), options.calls, options.seconds, options.sizes, "free")
    every = options.gate or options.peers or options.workloads
    rare = options.rounds if every else 1 if options.quick else (options.rounds + 1) // 2
    rest = (options.placements, options.workers, options.rust, options.rounds, rare)
    schedule = Schedule(peers, settings, *rest)
    trials: list[dict[str, Any]] = []
    for trial in schedule.run(again=2 if options.quiet else 0):
        trials.append(trial.as_data())
        if options.json:
            data = {"about": machine.describe(), "trials": trials}
            options.json.write_text(json.dumps(data, indent=1) + "\n")
    return trials


def show(figures: Figures) -> None:
    """The two tables that matter most; all others are in the report."""
    for ours, theirs in ((OURS, TORCH), (OURS_TCP, TORCH_UV)):
        if table := comparison(figures, ours, theirs):
            print(table, end="\n\n")


def again(options: argparse.Namespace, workloads: tuple[str, ...]) -> list[dict[str, Any]]:
    """Measures some workloads once more."""
    some = argparse.Namespace(**vars(options) | {"workloads": ",".join(workloads), "json": None})
    return measure(some, chosen(some))


def runs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What was measured before, or is now."""
    if options.source:
        return [json.loads(file.read_text()) for file in options.source]
    return [{"about": machine.describe(), "trials": measure(options, chosen(options))}]


def main(arguments: list[str]) -> int:
    """The command."""
    options = parse(arguments)
    runs = runs_of(options)
    data = runs[0]
    figures = Figures.of(data["trials"])
    failures = [trial for trial in data["trials"] if trial["failure"]]
    if options.page:
        import plots

        pictures = plots.draw(figures, FULL_SIZES, page.PICTURES)
        page.write(page.report(figures, data["about"], data["trials"]), pictures)
        page.write_summary(figures, data["about"], data["trials"])
        summary = "" if page.is_disturbed(data["trials"]) else f", the table in {page.README.name}"
        print(f"written: {page.PAGE}, {', '.join(pictures)}{summary}")
    elif options.quick or options.gate:
        show(figures)
    else:
        print(page.report(figures, data["about"], data["trials"]))
    for trial in failures:
        print(f"failed: {trial['peer']}, round {trial['round']}: {trial['failure']}", file=sys.stderr)
    if options.record:
        count = gate.record([Figures.of(run["trials"]) for run in runs], data["about"])
        print(f"recorded: {count} figures in {gate.FILE}")
    if options.gate:
        return 1 if gate.is_behind(data["trials"], partial(again, options)) else 0
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
