"""Measures a step of the examples that train, on torch's own agent and on tensorcall, in turn, in one run.

    python steps.py                                     three rounds, about a minute
    python steps.py --rounds 5 --steps 300
    python steps.py --workloads pipeline                one of them

A step is all of it: making a batch, forward, backward, optimizer. Each round starts the workers of an example
with torch's agent, trains, and does the same with tensorcall. For each run the median of its steps counts,
and the table has the medians over the rounds; judge by the ratios, since both engines met the same machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from figures import Figures, cell, comparison, markdown

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENGINES = ("torch", "tensorcall")
LIMIT = 120.0
"""Seconds after which a run is given up."""


def timed(step: Callable[[], Any], count: int) -> list[float]:
    """What each step takes, in milliseconds; a fifth more of them come first, to warm up."""
    times = []
    for number in range(count + count // 5):
        began = time.perf_counter()
        step()
        if number >= count // 5:
            times.append(1e3 * (time.perf_counter() - began))
    return times


def pipeline(module: Any, steps: int) -> list[float]:
    """The master's steps."""
    return timed(module.Pipeline().step, steps)


def one_trainer(module: Any, steps: int) -> list[float]:
    """The steps of a trainer that has the server for itself."""
    return trainers(module, steps, 1)


def all_trainers(module: Any, steps: int) -> list[float]:
    """The steps of trainers that share the server."""
    return trainers(module, steps, len(module.NAMES) - 1)


def trainers(module: Any, steps: int, count: int) -> list[float]:
    """The steps of some trainers at once."""
    import torch
    from torch.distributed import rpc

    server = rpc.RRef(module.Server())
    runs = [
        rpc.rpc_async(name, train, args=(server, seed, steps), timeout=0)
        for seed, name in enumerate(module.NAMES[1 : 1 + count])
    ]
    return [step for run in torch.futures.wait_all(runs) for step in run]


def train(server: Any, seed: int, steps: int) -> list[float]:
    """Runs on a trainer."""
    module = importlib.import_module("train_parameter_server")
    return timed(module.Trainer(server, seed).step, steps)


def rnn(module: Any, steps: int) -> list[float]:
    """The trainer's steps."""
    losses = module.Network().train(steps + steps // 5)
    return timed(lambda: next(losses), steps)


class Workload(NamedTuple):
    """An example, and what of it is measured."""

    program: str
    run: Callable[[Any, int], list[float]]


WORKLOADS = {
    "pipeline": Workload("train_pipeline", pipeline),
    "parameter server, one trainer": Workload("train_parameter_server", one_trainer),
    "parameter server, three trainers": Workload("train_parameter_server", all_trainers),
    "RNN": Workload("train_rnn", rnn),
}


def work(options: argparse.Namespace) -> None:
    """One worker of a run; the first one prints the median of the steps."""
    warnings.simplefilter("ignore")
    if options.engine == ["tensorcall"]:
        import tensorcall

        tensorcall.install()
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    torch.manual_seed(options.rank)
    sys.path.append(str(EXAMPLES))
    workload = WORKLOADS[options.workloads]
    module = importlib.import_module(workload.program)
    backend = rpc.TensorPipeRpcBackendOptions(init_method=options.init_method, rpc_timeout=60)
    name, size = module.NAMES[options.rank], len(module.NAMES)
    rpc.init_rpc(name, rank=options.rank, world_size=size, rpc_backend_options=backend)
    if options.rank == 0:
        agent = type(rpc.api._get_current_rpc_agent()).__module__
        if agent.startswith("tensorcall") != (options.engine == ["tensorcall"]):
            sys.exit(f"the agent is one of {agent}")
        times = workload.run(module, options.steps)
        print(json.dumps({"value": median(times)}), flush=True)
    rpc.shutdown()


def measure(engine: str, name: str, steps: int) -> float:
    """One run; the median of its steps, in milliseconds."""
    sys.path.append(str(EXAMPLES))
    names = importlib.import_module(WORKLOADS[name].program).NAMES
    command = [sys.executable, str(Path(__file__)), "--engine", engine, "--workloads", name]
    command += ["--steps", str(steps), "--init-method", f"tcp://127.0.0.1:{_free_port()}"]
    environment = os.environ | {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(len(names))
    ]
    try:
        printed, _ = workers[0].communicate(timeout=LIMIT)
        for worker in workers[1:]:
            worker.wait(LIMIT)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{name} on {engine} came to nothing: {[w.returncode for w in workers]}")
    return float(json.loads(lines[-1])["value"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(figures: Figures, engines: list[str]) -> str:
    """Both side by side, or the one that was asked for."""
    if len(engines) > 1:
        return comparison(figures, engines[1], engines[0])
    rows = [[key.workload, cell(figures.values(key, engines[0]))] for key in figures.keys]
    return markdown(["workload", f"{engines[0]}, ms a step"], rows)


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="steps", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that each engine is measured")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--workloads", help="one of: " + "; ".join(WORKLOADS))
    parser.add_argument("--engine", choices=ENGINES, action="append", help="measure only this one")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--init-method", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        work(options)
        return 0
    engines = options.engine or list(ENGINES)
    figures = Figures()
    for number in range(options.rounds):
        for name in [options.workloads] if options.workloads else WORKLOADS:
            for engine in engines:
                print(
                    f"round {number + 1} of {options.rounds}: {name}, {engine}", file=sys.stderr, flush=True
                )
                value = measure(engine, name, options.steps)
                line = {"workload": name, "metric": "ms a step", "value": value}
                figures.add(number, "free", engine, [line])
    print(table(figures, engines))
    print(
        f"\nmedians of {options.rounds} rounds of {options.steps} steps, {len(os.sched_getaffinity(0))} cores"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
