"""M1, the cost of a job: some workers start, each calls each, and they shut down gracefully.

Prints the worker in the middle for each figure: times, and what a worker came to hold that it did not before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO, Any

import both  # noqa: F401 (finds the modules beside this folder)
import functions
import rpc as caller
from loops import emit

PHASES = ("ready", "joined", "called")
AGAIN = 5


def held() -> dict[str, float]:
    """What this process holds now."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    return {
        "resident MiB": int(fields["VmRSS"].split()[0]) / 1024,
        "private MiB": private / 1024,
        "threads": int(fields["Threads"]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def await_word(phase: str) -> None:
    """Tells that this worker has come so far, and waits until all have."""
    print(phase, flush=True)
    if not sys.stdin.readline():
        sys.exit("the others are gone")


def work(engine: str, rank: int, count: int, port: int) -> None:
    """One worker."""
    caller.install(engine)
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    torch.ones(2).add(1)
    names = tuple(f"worker{number}" for number in range(count))
    await_word("ready")
    before = held()
    began = time.perf_counter()
    caller.join(engine, rank, port, names)
    figures = {"init ms": 1e3 * (time.perf_counter() - began)}
    await_word("joined")
    others = [name for name in names if name != names[rank]]
    for metric, rounds in (("first call us", 1), ("next call us", AGAIN)):
        began = time.perf_counter()
        for name in others * rounds:
            rpc.rpc_sync(name, functions.trivial)
        figures[metric] = 1e6 * (time.perf_counter() - began) / len(others) / rounds
    for what, now in held().items():
        figures[f"added {what}"] = now - before[what]
    await_word("called")
    began = time.perf_counter()
    rpc.shutdown()
    figures["shutdown ms"] = 1e3 * (time.perf_counter() - began)
    print(json.dumps(figures), flush=True)


def line_of(worker: subprocess.Popen[str]) -> str:
    """The next line of a worker."""
    output: IO[str] | Any = worker.stdout
    if not (line := output.readline()):
        raise RuntimeError("a worker ended early")
    return str(line).strip()


def run(engine: str, count: int) -> None:
    """Starts the workers, leads them from phase to phase, and prints what they measured."""
    port = caller.free_port()
    with ExitStack() as ending:
        workers = []
        for rank in range(count):
            command = [sys.executable, __file__, "--engine", engine, "--worker", str(rank)]
            command += ["--sizes", str(count), "--port", str(port)]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            workers.append(worker)
            ending.callback(worker.wait)
            ending.callback(worker.kill)
        for phase in PHASES:
            for worker in workers:
                if (said := line_of(worker)) != phase:
                    raise RuntimeError(f"a worker says {said!r} instead of {phase!r}")
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
        results = [json.loads(line_of(worker)) for worker in workers]
        for worker in workers:
            worker.wait()
    for metric in results[0]:
        emit(f"M1 {count} workers", metric, median(result[metric] for result in results))


def main() -> None:
    """Runs one job after another, or is a worker of one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=caller.ENGINES, required=True)
    parser.add_argument("--sizes", default="2,4,8,16", help="how many workers, separated by commas")
    parser.add_argument("--worker", type=int)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    counts = [int(size) for size in options.sizes.split(",")]
    if options.worker is not None:
        return work(options.engine, options.worker, counts[0], options.port)
    for count in counts:
        run(options.engine, count)
    return None


if __name__ == "__main__":
    main()
