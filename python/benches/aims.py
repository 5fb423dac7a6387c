"""What we aim at: ratios to a peer, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

from figures import Figures, Key, markdown, times
from peers import OURS, OURS_GLOO, OURS_RUST, OURS_TCP, TORCH, TORCH_UV

RUST = ("tarpc", "tonic")


@dataclass(frozen=True)
class Aim:
    """A ratio to reach: at most so much where less is better, else at least."""

    key: Key
    ours: str
    theirs: tuple[str, ...]
    """The best of these counts."""
    bound: float

    def against(self, figures: Figures) -> str:
        """Whom it is measured against."""
        return figures.best(self.key, self.theirs) or self.theirs[0]

    def ratio(self, figures: Figures) -> float | None:
        """What was measured."""
        return figures.ratio(self.key, self.ours, self.against(figures))

    def is_reached(self, ratio: float) -> bool:
        """Whether that is enough."""
        return self.room(ratio) >= 1

    def room(self, ratio: float) -> float:
        """How many times better than aimed at that is."""
        return ratio / self.bound if self.key.higher_is_better else self.bound / ratio


def _aims(ours: str, theirs: str | tuple[str, ...], bounds: dict[tuple[str, str], float]) -> list[Aim]:
    others = (theirs,) if isinstance(theirs, str) else theirs
    return [Aim(Key(workload, metric), ours, others, bound) for (workload, metric), bound in bounds.items()]


AIMS = [
    *_aims(
        OURS,
        TORCH,
        {
            ("L1", "p50 us"): 0.25,
            ("L1", "p99 us"): 0.25,
            ("L1", "CPU us"): 0.15,
            ("L2 function", "p50 us"): 0.2,
            ("C1", "calls/s"): 9,
            ("C1 1 KiB", "calls/s"): 6,
            ("B1 64K x1", "GB/s"): 4,
            ("B1 1M x1", "GB/s"): 2.5,
            ("B1 16M x1", "GB/s"): 2,
            ("B1 256M x1", "GB/s"): 3,
            ("B1 1M x1, all read", "GB/s"): 1.5,
            ("B1 16M x1, all read", "GB/s"): 1.5,
            ("B1 1M x1, new and held", "GB/s"): 1.5,
            ("B1 16M x1, new and held", "GB/s"): 1.5,
            ("B2 16M x1", "GB/s"): 2,
            ("B2 256M x1", "GB/s"): 2,
            ("remote().to_here()", "p50 us"): 0.25,
            ("RRef method", "p50 us"): 0.25,
            ("M1 16 workers", "init ms"): 0.5,
            ("M1 16 workers", "first call us"): 0.1,
            ("M1 16 workers", "added resident MiB"): 0.1,
            ("M1 16 workers", "added threads"): 0.3,
        },
    ),
    *_aims(OURS, TORCH_UV, {("L1", "p50 us"): 0.15, ("L1", "p99 us"): 0.15}),
    *_aims(OURS, "socket tcp", {("L1", "p50 us"): 0.8, ("L1", "p99 us"): 0.8}),
    *_aims(OURS, "ray", {("B1 256M x1", "GB/s"): 1}),
    *_aims(OURS_TCP, TORCH_UV, {("B1 16M x1", "GB/s"): 2, ("B1 256M x1", "GB/s"): 1.5}),
    *_aims(
        OURS_RUST,
        RUST,
        {
            ("L1", "p50 us"): 0.8,
            ("C1", "calls/s"): 1.5,
            ("B1 1M x1", "GB/s"): 2,
            ("B1 16M x1", "GB/s"): 2,
        },
    ),
    *_aims(OURS_GLOO, TORCH_UV, {("C1", "calls/s"): 1, ("B1 16M x1", "GB/s"): 1}),
]


def table(figures: Figures) -> str:
    """Each aim that something was measured for, and whether it is reached."""
    rows = []
    for aim in AIMS:
        if (ratio := aim.ratio(figures)) is None:
            continue
        most = "at least" if aim.key.higher_is_better else "at most"
        rows.append(
            [
                aim.key.title,
                aim.key.metric,
                aim.ours,
                aim.against(figures),
                f"{most} {aim.bound:g}x",
                times(ratio),
                times(aim.room(ratio)),
                "yes" if aim.is_reached(ratio) else "**no**",
            ]
        )
    head = ["workload", "metric", "ours", "against", "aim", "measured", "room", "reached"]
    return markdown(head, rows) if rows else ""
