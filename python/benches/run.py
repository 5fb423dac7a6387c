"""Measures torch's own RPC agent and tensorcall side by side, in turn, in one run.

    python run.py --quick                        every workload, three rounds, about two minutes
    python run.py --quick --workloads L1,C1      some of them
    python run.py --quick --engine tensorcall    one engine alone
    python run.py --quick --placement same       both processes on one core (or `split`: one each)

Each round starts two processes with torch's agent, measures, then does the same with tensorcall.
Figures are medians over the rounds; judge by the ratios, since both engines met the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from figures import Figures
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
ENGINES = ("torch", "tensorcall")
PAIR_LIMIT = 180.0
"""Seconds after which a pair of processes is given up."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short workloads, three rounds")
    parser.add_argument("--rounds", type=int, help="times that each engine is measured")
    parser.add_argument("--calls", type=int, help="calls per latency workload")
    parser.add_argument("--seconds", type=float, help="for each of the other workloads")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="L1,L2,C1,B1")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="measure only this one")
    parser.add_argument("--placement", choices=["free", "same", "split"], default="free")
    parser.add_argument("--tcp", action="store_true", help="torch without shared memory")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (3 if options.quick else 5)
    options.calls = options.calls or (1500 if options.quick else 5000)
    options.seconds = options.seconds or (0.8 if options.quick else 2.5)
    options.engine = options.engine or list(ENGINES)
    return options


@contextmanager
def process(role: str, engine: str, init_method: str, options: argparse.Namespace) -> Iterator[Any]:
    """One of the two processes of a run, killed with all it started when the block ends."""
    command = [sys.executable, str(HERE / "workloads.py"), role, "--engine", engine]
    command += ["--init-method", init_method, "--workloads", options.workloads]
    command += ["--calls", str(options.calls), "--seconds", str(options.seconds)]
    command += ["--placement", options.placement]
    if options.tcp and engine == "torch":
        command.append("--tcp")
    environment = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command,
            env=environment | os.environ,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            yield child
            if child.returncode != 0:
                errors.seek(0)
                raise RuntimeError(f"the {role} of {engine} failed:\n{errors.read()[-4000:]}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def measure(engine: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One run of one engine: what its caller printed."""
    init_method = f"tcp://127.0.0.1:{_free_port()}"
    deadline = time.monotonic() + PAIR_LIMIT
    with (
        process("callee", engine, init_method, options) as callee,
        process("caller", engine, init_method, options) as caller,
    ):
        lines, _ = caller.communicate(timeout=deadline - time.monotonic())
        if caller.returncode == 0:
            callee.wait(max(1.0, deadline - time.monotonic()))
        else:
            callee.kill()
    return [json.loads(line) for line in lines.splitlines() if line.startswith("{")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: list[str]) -> int:
    """The command."""
    options = parse(arguments)
    figures = Figures(options.engine)
    began = time.monotonic()
    for number in range(options.rounds):
        for engine in options.engine:
            print(f"round {number + 1} of {options.rounds}: {engine}", file=sys.stderr, flush=True)
            figures.add(engine, measure(engine, options))
    print(figures.table())
    print(
        f"\nmedians of {options.rounds} rounds, placement {options.placement}, "
        f"{len(os.sched_getaffinity(0))} cores, {time.monotonic() - began:.0f} s"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures.as_data(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
