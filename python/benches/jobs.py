"""The simulated job: what a worker takes part in as the job grows."""

from __future__ import annotations

from figures import Figures, Key, cell, markdown
from peers import OURS_JOB

PHASES = ("init", "ring", "star", "shutdown")
MESSAGES, OPERATIONS, TIME = "messages each", "store operations each", "ms"
INTRO = (
    "Native workers of one process that meet in a store, call through memory, each the next one (ring) and "
    "all the first one (star), and leave gracefully. Messages and operations are those of all workers, by "
    "their number: they stay what they are in a job of any size. Times are those of the whole job; those of "
    "init and shutdown grow faster than the job, for each worker reads a list of all."
)


def key(phase: str, workers: int, metric: str) -> Key:
    """What `bench-job` calls a figure."""
    return Key(f"{phase} of {workers}", metric)


def sizes(figures: Figures) -> list[int]:
    """How many workers there were."""
    found = (each.workload for each in figures.keys if figures.values(each, OURS_JOB))
    return sorted({int(workload.rpartition(" ")[2]) for workload in found})


def table(figures: Figures) -> str:
    """A row for each size."""
    columns = [("init", OPERATIONS), *((phase, metric) for phase in PHASES for metric in (MESSAGES, TIME))]
    rows = []
    for workers in sizes(figures):
        values = [figures.values(key(phase, workers, metric), OURS_JOB) for phase, metric in columns]
        rows.append([str(workers), *(cell(value, spread=False) for value in values)])
    head = ["workers", *(f"{phase}: {metric}" for phase, metric in columns)]
    return markdown(head, rows) if rows else ""
