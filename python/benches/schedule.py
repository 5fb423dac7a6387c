"""Who is measured when: rounds, each in another order, and what is shown meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from page import QUIET
from peers import SMALL, Peer
from settings import Settings
from trial import Others, Trial, TrialError, figures_of

JOBS = ("M1", "job")
LIMIT = 60.0
"""Seconds that a run may take beside what its workloads take by themselves."""


class Run(NamedTuple):
    """One run that is to be."""

    peer: Peer
    placement: str
    command: list[str]
    limit: float
    rounds: int
    """How many of the rounds it takes part in."""
    is_job: bool = False
    """Whether it is a job of many workers, or several, instead of two processes."""


class Schedule:
    """All runs of all rounds."""

    def __init__(
        self,
        peers: list[tuple[Peer, tuple[str, ...]]],
        settings: Settings,
        placements: tuple[str, ...],
        workers: tuple[int, ...],
        rust: Path,
        rounds: int,
        rare: int,
    ) -> None:
        self._rounds = rounds
        self._rare = rare
        self._by_peer = [
            [
                *self._pairs(peer, workloads, settings, placements, rust),
                *self._jobs(peer, workloads, workers, rust),
            ]
            for peer, workloads in peers
        ]

    def _pairs(
        self,
        peer: Peer,
        workloads: tuple[str, ...],
        settings: Settings,
        placements: tuple[str, ...],
        rust: Path,
    ) -> Iterator[Run]:
        """Two processes each. Pinned to cores only small calls are measured."""
        rounds = self._rare if peer.is_rare else self._rounds
        for placement in placements:
            pairs = [name for name in workloads if name not in JOBS]
            wanted = [name for name in pairs if placement == "free" or name in SMALL]
            if wanted:
                told = replace(settings, workloads=tuple(wanted), placement=placement)
                loops = (2 * len(settings.sizes) + 16) * settings.seconds
                limit = LIMIT + len(wanted) * 2 * loops
                yield Run(peer, placement, peer.command(told, rust), limit, rounds)

    def _jobs(
        self, peer: Peer, workloads: tuple[str, ...], workers: tuple[int, ...], rust: Path
    ) -> Iterator[Run]:
        if "M1" in workloads:
            limit = LIMIT + 10.0 * sum(workers)
            yield Run(peer, "free", peer.scale_command(workers), limit, self._rare, True)
        if "job" in workloads:
            yield Run(peer, "free", [str(rust / peer.program)], 2 * LIMIT, self._rounds, True)

    def run(self, again: int) -> Iterator[Trial]:
        """Runs all; a run that others disturbed is repeated up to `again` times, the quietest one counts."""
        progress = Progress([run for runs in self._by_peer for run in runs])
        for number in range(self._rounds):
            turn = number % max(1, len(self._by_peer))
            for runs in self._by_peer[turn:] + self._by_peer[:turn]:
                for run in (run for run in runs if number < run.rounds):
                    yield self._run(run, number + 1, progress, again)
        progress.end()

    def _run(self, run: Run, number: int, progress: Progress, again: int) -> Trial:
        progress.begin(run, number)
        tries = [self._try(run, number, progress.see)]
        if tries[0].failure:  # a port that somebody else took meanwhile, for one
            tries = [self._try(run, number, progress.see)]
        while min(trial.others for trial in tries) >= QUIET and len(tries) <= again:
            tries.append(self._try(run, number, progress.see))
        return min(tries, key=lambda trial: (trial.failure is not None, trial.others))

    @staticmethod
    def _try(run: Run, number: int, see: Callable[[str], None]) -> Trial:
        others, began, failure = Others(), time.monotonic(), None
        try:
            figures, daemons = figures_of(run.command, run.limit, see, run.peer.has_daemons)
        except TrialError as error:
            figures, daemons, failure = [], 0.0, str(error)
        took = round(time.monotonic() - began, 2)
        load = others.cores(daemons)
        return Trial(number, run.peer.name, run.placement, figures, took, load, failure)


class Progress:
    """One line for each run; on a terminal also what it is at."""

    def __init__(self, runs: list[Run]) -> None:
        self._left = {id(run): run.rounds for run in runs}
        self._total = sum(self._left.values())
        self._took: dict[int, float] = {}
        self._began = self._since = time.monotonic()
        self._current: int | None = None

    def begin(self, run: Run, number: int) -> None:
        """A run begins."""
        self._finish()
        took = _clock(time.monotonic() - self._began)
        done = self._total - sum(self._left.values())
        left = f", about {_clock(self._expected())} left" if self._took else ""
        kind = "jobs" if run.is_job else run.placement
        self._show(
            f"[{done + 1}/{self._total}] round {number}: {run.peer.name}, {kind} ({took} so far{left})", "\n"
        )
        self._current, self._since = id(run), time.monotonic()
        self._left[id(run)] -= 1

    def _finish(self) -> None:
        if self._current is not None:
            self._took[self._current] = time.monotonic() - self._since

    def _expected(self) -> float:
        """What is left takes as long as it took before, or as long as others did."""
        usual = sum(self._took.values()) / len(self._took)
        return sum(count * self._took.get(run, usual) for run, count in self._left.items())

    def see(self, workload: str) -> None:
        """It has a figure."""
        if sys.stderr.isatty():
            self._show(f"    {workload}", "\r")

    def end(self) -> None:
        """All is done."""
        self._show(f"measured in {_clock(time.monotonic() - self._began)}", "\n")

    @staticmethod
    def _show(text: str, end: str) -> None:
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"
