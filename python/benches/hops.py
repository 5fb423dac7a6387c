"""Where the CPU time of a call goes: a profile of both processes, by what the code is for.

    python python/benches/hops.py                  L1, C1 and B1 with 16 MiB, as tables in Markdown
    python python/benches/hops.py L1 --placement same

Needs `perf`. A share is that of the samples in all threads of both processes; microseconds are that share of
the CPU time of a call, which the same run measured.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from figures import markdown
from loops import descendants
from peers import CALLERS
from settings import PLACEMENTS
from trial import lines_of, started

BEFORE, FOR = 5.5, 4
"""Seconds until the profile begins, when both processes have warmed up, and for how long it goes."""
LIMIT = 60.0
WORKLOADS = {
    "L1": ("L1", ("--calls=1000000", "--seconds=2")),
    "C1": ("C1", ("--seconds=8",)),
    "B1": ("B1 16M x1", ("--seconds=16", "--sizes=16M")),
}
"""What of it is measured, and for how long: its first loop outlasts the profile."""

KERNEL = (
    ("kernel: copying", r"copy|rep_mov|get_user|put_user|memcpy|__check_object"),
    (
        "kernel: page faults and memory",
        r"fault|page|folio|pte|pmd|vma|mmap|zap|lruvec|clear_|memcg|k?malloc|slab|free",
    ),
    (
        "kernel: sleeping, waking, switching",
        r"futex|sched|wak|ttwu|switch|queue|pick_|entity|curr|timer|rseq|poll|idle"
        r"|spin|rcu|load_avg|cpu|task|tick|clock|irq",
    ),
    ("kernel: sockets", r"unix_|sock|skb|tcp|scm|msg|iov|net|ip_|datagram|fd|file"),
    ("kernel: entry and exit", r"entry|syscall|return|exit|x64_sys|do_sys"),
)
RUST = (
    ("messages: encoding, decoding, tables", r"tensorcall_proto|postcard|serde|hashbrown"),
    (
        "transport: reading, writing, reactor",
        r"transport|rustix|tensorcall::shared|tensorcall::buffer|tensorcall::body",
    ),
    ("agent: calls, pool, futures", r"tensorcall::|parking_lot|crossbeam"),
    ("between Python and Rust", r"_tensorcall|pyo3|Py"),
)


def purpose(library: str, symbol: str) -> str:
    """What a function is for."""
    if "kernel" in library:
        return next((name for name, pattern in KERNEL if re.search(pattern, symbol)), "kernel: other")
    if "_tensorcall" in library:
        return next((name for name, pattern in RUST if re.search(pattern, symbol)), "Rust: other")
    if "vdso" in library:
        return "reading the clock"
    if re.search(r"libc[.-]|ld-linux|pthread", library):
        return (
            "C library: copying"
            if re.search(r"memcpy|memmove|memset", symbol)
            else "C library: allocating, locks"
        )
    return "torch" if re.search(r"torch|c10", library) else "Python interpreter"


def profile(workload: str, placement: str) -> tuple[float, Counter[str]]:
    """CPU time of a call in microseconds, and the share of each purpose."""
    row, options = WORKLOADS[workload]
    command = [sys.executable, str(CALLERS / "rpc.py"), "--engine=tensorcall", f"--workloads={workload}"]
    command += [f"--placement={placement}", *options]
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "perf.data"))
        with started(command) as (process, _):
            time.sleep(BEFORE)
            processes = ",".join(map(str, [process.pid, *descendants(process.pid)]))
            record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "4999", "-o", data, "-p", processes]
            subprocess.run([*record, "--", "sleep", str(FOR)], check=True)
            lines = (json.loads(line) for line in lines_of(process, LIMIT) if line.startswith("{"))
            found = (line for line in lines if (line["workload"], line["metric"]) == (row, "CPU us"))
            cpu = float(next(found)["value"])
        fields = ["-F", "overhead,dso,symbol", "-s", "dso,symbol", "-t", "|"]
        report = ["perf", "report", "-i", data, "--stdio", "--no-children", "-g", "none", *fields]
        told = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    shares: Counter[str] = Counter()
    for line in told.splitlines():
        if len(parts := line.split("|", 2)) == 3 and "%" in parts[0]:
            shares[purpose(parts[1], parts[2])] += float(parts[0].strip().rstrip("%"))
    return cpu, shares


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="hops", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], default=[])
    parser.add_argument("--placement", choices=PLACEMENTS, default="free")
    options = parser.parse_args()
    found = {workload: profile(workload, options.placement) for workload in options.workloads or WORKLOADS}
    total: Counter[str] = sum((shares for _, shares in found.values()), Counter())
    head, rows = ["what for"], [[name] for name, _ in total.most_common()]
    for workload, (cpu, shares) in found.items():
        head.append(f"{WORKLOADS[workload][0]}: {cpu:.1f} us")
        whole = sum(shares.values())
        for row in rows:
            share = shares[row[0]] / whole
            row.append(f"{share * cpu:.1f} ({100 * share:.0f} %)")
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
