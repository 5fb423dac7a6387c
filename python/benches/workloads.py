"""One of the two processes of one benchmark run; started by `run.py`.

The names are those of the project's baseline: L1 is the latency of a trivial call, L2 of one with
two small tensors, C1 the rate with 64 calls in flight, B1 the bandwidth one way. The caller prints
one line of JSON per figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
SIZES = {"64K": 64 << 10, "1M": MIB, "16M": 16 * MIB, "256M": 256 * MIB}
IN_FLIGHT = (1, 4)
TO = "callee"

Start = Callable[[], Any]


def emit(workload: str, metric: str, value: float) -> None:
    """Prints one figure."""
    print(json.dumps({"workload": workload, "metric": metric, "value": value}), flush=True)


def latency(workload: str, call: Start, options: argparse.Namespace) -> None:
    """Times single calls, one after another: p50 and p99 in microseconds, and CPU time per call.

    As many as asked for, unless that takes more than four times the seconds of the other workloads.
    """
    import functions
    from torch.distributed import rpc

    for _ in range(options.calls // 4):
        call()
    gc.collect()
    theirs, ours = rpc.rpc_sync(TO, functions.cpu_seconds), functions.cpu_seconds()
    times: list[int] = []
    end = time.perf_counter() + 4 * options.seconds
    while len(times) < options.calls and time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    ours = functions.cpu_seconds() - ours
    theirs = rpc.rpc_sync(TO, functions.cpu_seconds) - theirs
    times.sort()
    emit(workload, "p50 us", times[len(times) // 2] / 1e3)
    emit(workload, "p99 us", times[len(times) * 99 // 100] / 1e3)
    emit(workload, "CPU us", (ours + theirs) / len(times) * 1e6)


def rate(start: Start, in_flight: int, seconds: float, at_least: int = 0) -> float:
    """Calls per second with `in_flight` under way all the time."""
    waiting = deque(start() for _ in range(in_flight))
    for _ in range(in_flight):  # a round to warm up
        waiting.popleft().wait()
        waiting.append(start())
    calls, began = 0, time.perf_counter()
    end = began + seconds
    while calls < at_least or time.perf_counter() < end:
        waiting.popleft().wait()
        waiting.append(start())
        calls += 1
    result = calls / (time.perf_counter() - began)
    for future in waiting:
        future.wait()
    return result


def run_l1(options: argparse.Namespace) -> None:
    """A trivial `rpc_sync`."""
    import functions
    from torch.distributed import rpc

    latency("L1", lambda: rpc.rpc_sync(TO, functions.trivial), options)


def run_l2(options: argparse.Namespace) -> None:
    """Two 2 x 2 tensors: a Python function, and the operator `torch.add`."""
    import functions
    import torch
    from torch.distributed import rpc

    pair = torch.ones(2, 2), torch.ones(2, 2)
    latency("L2 function", lambda: rpc.rpc_sync(TO, functions.add, args=pair), options)
    latency("L2 torch.add", lambda: rpc.rpc_sync(TO, torch.add, args=pair), options)


def run_c1(options: argparse.Namespace) -> None:
    """64 trivial calls in flight, without and with a tensor of 1 KiB."""
    import functions
    import torch
    from torch.distributed import rpc

    kib = torch.ones(256)
    for workload, arguments in (("C1", ()), ("C1 1 KiB", (kib,))):
        start = _starter(rpc, functions.trivial, arguments)
        rate(start, 64, options.seconds / 4)
        gc.collect()
        emit(workload, "calls/s", rate(start, 64, options.seconds))


def run_b1(options: argparse.Namespace) -> None:
    """Tensors of several sizes one way, one and four in flight."""
    import functions
    import torch
    from torch.distributed import rpc

    for size, count in SIZES.items():
        start = _starter(rpc, functions.swallow, (torch.ones(count // 4),))
        for in_flight in IN_FLIGHT:
            gc.collect()
            calls = rate(start, in_flight, options.seconds / 2, at_least=2 * in_flight)
            emit(f"B1 {size} x{in_flight}", "GB/s", calls * count / 1e9)


def _starter(rpc: Any, function: Any, arguments: tuple[Any, ...]) -> Start:
    return lambda: rpc.rpc_async(TO, function, args=arguments)


WORKLOADS = {"L1": run_l1, "L2": run_l2, "C1": run_c1, "B1": run_b1}


def place(placement: str, role: str) -> None:
    """Binds this process to a core: both to the same one, or each to its own."""
    cores = sorted(os.sched_getaffinity(0))
    if placement == "same":
        os.sched_setaffinity(0, cores[:1])
    elif placement == "split" and len(cores) > 1:
        os.sched_setaffinity(0, cores[:1] if role == "caller" else cores[1:2])


def main() -> None:
    """Joins, and calls or is called."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["caller", "callee"])
    parser.add_argument("--engine", choices=["torch", "tensorcall"], required=True)
    parser.add_argument("--init-method", required=True)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=0.8)
    parser.add_argument("--placement", choices=["free", "same", "split"], default="free")
    parser.add_argument("--tcp", action="store_true", help="torch: no shared memory, TCP only")
    options = parser.parse_args()
    place(options.placement, options.role)
    if options.engine == "tensorcall":
        import tensorcall

        tensorcall.install()
    from torch.distributed import rpc

    tcp = {"_transports": ["uv"], "_channels": ["basic"]} if options.tcp else {}
    rpc.init_rpc(
        options.role,
        rank=0 if options.role == "caller" else 1,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=options.init_method, rpc_timeout=60, **tcp
        ),
    )
    if options.role == "caller":
        agent = rpc.api._get_current_rpc_agent()
        kind = f"{type(agent).__module__}.{type(agent).__qualname__}"
        if kind.startswith("tensorcall") != (options.engine == "tensorcall"):
            sys.exit(f"the agent is {kind}, which is not {options.engine}'s")
        for name in options.workloads.split(","):
            WORKLOADS[name](options)
    rpc.shutdown()


if __name__ == "__main__":
    main()
