"""Measures the ways that messages can go, in turn, in one run; prints the table of docs/transports.md.

    python transports.py                 five rounds, about a minute
    python transports.py --rounds 1

Each round starts two workers on this host for each way and measures a trivial `rpc_sync`, trivial calls with
64 in flight, and tensors of 16 MiB one way, one after the other. Figures are medians over the rounds. MPI is
measured if mpi4py and an mpirun are beside this Python; torch's own agent over TCP is, to compare.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MPIRUN = Path(sys.executable).with_name("mpirun")
MPI, TORCH = "MPI (MPICH)", "torch's TensorPipe over TCP"
WAYS = {
    "Unix sockets": {},
    "TCP": {"TENSORCALL_TCP_ONLY": "1"},
    "gloo": {"TENSORCALL_BACKEND": "process_group"},
    MPI: {"TENSORCALL_BACKEND": "process_group"},
    TORCH: {"TP_SOCKET_IFNAME": "lo"},
}
LIMIT = 60.0
"""Seconds for the two workers of one way in one round."""
SECONDS = 0.7
"""For each rate."""
CALLS = 500
LARGE = 16 << 20


def nothing(*_: Any) -> None:
    """What the caller calls."""


def work(rank: int, init_method: str, module: str) -> None:
    """One of two workers; the first measures."""
    rpc = importlib.import_module(module)
    tcp = {"_transports": ["uv"], "_channels": ["basic"]} if module.startswith("torch") else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, **tcp)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        print(json.dumps(measure(rpc)), flush=True)
    rpc.shutdown()


def measure(rpc: Any) -> list[float]:
    """Microseconds for a call, thousands of calls per second, GB per second."""
    import torch

    times = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        rpc.rpc_sync("w1", nothing)
        times.append(time.perf_counter() - begun)
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    calls = rate(lambda: rpc.rpc_async("w1", nothing), 64)
    large = rate(lambda: rpc.rpc_async("w1", nothing, args=(tensor,)), 1)
    return [1e6 * statistics.median(times), calls / 1e3, large * LARGE / 1e9]


def rate(start: Callable[[], Any], in_flight: int) -> float:
    """How many calls per second are answered with so many under way."""
    futures = collections.deque(start() for _ in range(in_flight))
    answered, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + SECONDS:
        futures.popleft().wait()
        futures.append(start())
        answered += 1
    seconds = time.perf_counter() - begun
    for future in futures:
        future.wait()
    return answered / seconds


def run(way: str, variables: dict[str, str]) -> list[float]:
    """One way in one round."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", f"file://{folder}/store"]
        if way == TORCH:
            command += ["--module", "torch.distributed.rpc"]
        if way == MPI:
            # As under `python -m tensorcall run`, which would replace this program by itself.
            command = [str(MPIRUN), "-n", "2", *command, "--mpi"]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        raise RuntimeError(f"{way} failed:\n{done.stdout}{done.stderr}")
    found: list[float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Runs all ways, or is a worker of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--mpi", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--module", default="tensorcall.rpc", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi:
        from tensorcall import _launcher

        _launcher.claim()
        return work(int(os.environ["RANK"]), options.store, options.module)
    if options.store:
        rank = 0 if os.fork() else 1
        return work(rank, options.store, options.module)
    ways = dict(WAYS)
    if not MPIRUN.exists() or importlib.util.find_spec("mpi4py") is None:
        del ways[MPI]
    figures: dict[str, list[list[float]]] = collections.defaultdict(list)
    for _ in range(options.rounds):
        for way, variables in ways.items():
            figures[way].append(run(way, variables))
    print("| way | a trivial call | 64 in flight | 16 MiB one way |\n|---|---|---|---|")
    for way, rounds in figures.items():
        call, calls, large = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"| {way} | {call:.0f} µs | {calls:.1f} thousand/s | {large:.2f} GB/s |")
    return None


if __name__ == "__main__":
    main()
