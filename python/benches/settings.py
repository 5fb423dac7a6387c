"""What a program that is measured is told: which workloads, how long, and where to run.

The programs in Rust take the same options (`benches/loops/src/settings.rs`).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
PLACEMENTS = ("free", "split", "same")
"""Wherever the kernel puts the two processes; each on a core of its own; both on one core."""


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    workloads: tuple[str, ...]
    calls: int
    """Per latency workload."""
    seconds: float
    """For each of the other workloads."""
    sizes: tuple[str, ...]
    """Of large tensors."""
    placement: str

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        return [
            f"--workloads={','.join(self.workloads)}",
            f"--calls={self.calls}",
            f"--seconds={self.seconds}",
            f"--sizes={','.join(self.sizes)}",
            f"--placement={self.placement}",
        ]


def parser() -> argparse.ArgumentParser:
    """Reads that command line; a program may add options of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", nargs="?", choices=["caller", "callee"], default="caller")
    parser.add_argument("--workloads", default="L1")
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--sizes", default="64K,1M,16M")
    parser.add_argument("--placement", choices=PLACEMENTS, default="free")
    return parser


def settings_of(options: argparse.Namespace) -> Settings:
    """What the options say."""
    workloads, sizes = tuple(options.workloads.split(",")), tuple(options.sizes.split(","))
    return Settings(workloads, options.calls, options.seconds, sizes, options.placement)


def size_of(name: str) -> int:
    """Bytes of a size such as `64K`."""
    return int(name[:-1]) * {"K": KIB, "M": MIB}[name[-1]]


CORES = "BENCH_CORES"


def place(placement: str, role: str) -> None:
    """Binds this process, and all that it starts, to its core."""
    # Those of whoever started first: a process inherits the core that its parent was bound to.
    given = os.environ.setdefault(CORES, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    cores = [int(core) for core in given.split(",")]
    if placement == "same":
        os.sched_setaffinity(0, cores[:1])
    elif placement == "split" and len(cores) > 1:
        os.sched_setaffinity(0, cores[:1] if role == "caller" else cores[1:2])
