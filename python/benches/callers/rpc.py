"""`torch.distributed.rpc`: torch's own agent, and tensorcall in its place."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import both
import functions
import settings as bench
import workloads
from loops import Timer, emit_times
from settings import MIB, Settings

warnings.simplefilter("ignore")  # torch tells programs that its RPC is unmaintained

ENGINES = ("torch", "torch-tcp", "tensorcall", "tensorcall-tcp", "tensorcall-gloo")
NAMES = ("caller", "callee")
TO = "callee"
WIDTH = 256
HELD = 32


def install(engine: str) -> None:
    """Puts tensorcall in the place of torch's RPC, unless torch's own is to be measured."""
    if engine.startswith("tensorcall"):
        if engine == "tensorcall-tcp":
            os.environ["TENSORCALL_TCP_ONLY"] = "1"
        import tensorcall

        tensorcall.install()


def join(engine: str, rank: int, port: int, names: tuple[str, ...] = NAMES) -> None:
    """Joins the job; all options are the defaults."""
    from torch.distributed import rpc

    meeting = {"init_method": f"tcp://127.0.0.1:{port}", "rpc_timeout": 60}
    if engine == "tensorcall-gloo":
        backend = rpc.BackendType.PROCESS_GROUP
        options = rpc.ProcessGroupRpcBackendOptions(**meeting)
    else:
        backend = rpc.BackendType.TENSORPIPE
        tcp = {"_transports": ["uv"], "_channels": ["basic"]} if engine == "torch-tcp" else {}
        options = rpc.TensorPipeRpcBackendOptions(**meeting, **tcp)
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), backend=backend, rpc_backend_options=options)
    agent = type(rpc.api._get_current_rpc_agent())
    if agent.__module__.startswith("tensorcall") != engine.startswith("tensorcall"):
        sys.exit(f"the agent is {agent.__module__}.{agent.__qualname__}, which is not one of {engine}")


class RpcClient(workloads.Client):
    """Calls through `torch.distributed.rpc`, whosever it is."""

    def __init__(self) -> None:
        import torch
        from torch.distributed import rpc

        self.rpc, self.torch = rpc, torch
        self._pair = torch.ones(2, 2), torch.ones(2, 2)

    def trivial(self) -> Any:
        return self.rpc.rpc_sync(TO, functions.trivial)

    def add(self) -> Any:
        return self.rpc.rpc_sync(TO, functions.add, args=self._pair)

    def add_operator(self) -> Any:
        return self.rpc.rpc_sync(TO, self.torch.add, args=self._pair)

    def start(self, function: str, tensor: Any = None) -> Any:
        arguments = () if tensor is None else (tensor,)
        return self.rpc.rpc_async(TO, getattr(functions, function), args=arguments)

    def wait(self, handle: Any) -> Any:
        return handle.wait()

    def tensor(self, size: int) -> Any:
        return self.torch.ones(size // 4)


def run_l2(client: RpcClient, timer: Timer, settings: Settings) -> None:
    """A Python function, and an operator of torch."""
    workloads.run_l2(client, timer, settings)
    timer.latency("L2 torch.add", client.add_operator)


class RemoteCounter:
    """Calls a method of an object that is on the callee."""

    def __init__(self, rref: Any) -> None:
        self._rref = rref

    def count(self) -> Any:
        return self._rref.rpc_sync().count()


def run_references(client: RpcClient, timer: Timer, _: Settings) -> None:
    """The other ways to call: `remote`, a method of a remote object, and oneself."""
    rpc = client.rpc
    timer.latency("remote().to_here()", lambda: rpc.remote(TO, functions.trivial).to_here(), 0.5)
    timer.latency("RRef method", RemoteCounter(rpc.remote(TO, functions.Counter)).count, 0.5)
    timer.latency("self call", lambda: rpc.rpc_sync(NAMES[0], functions.trivial), 0.5)


def run_variants(client: RpcClient, timer: Timer, settings: Settings) -> None:
    """B1 with what programs do: the receiver reads every byte; each tensor is new, and kept for a while."""
    for name in (name for name in settings.sizes if MIB <= bench.size_of(name) <= 16 * MIB):
        size = bench.size_of(name)
        tensor = client.tensor(size)
        reads: Callable[[], Any] = lambda tensor=tensor: client.start("total", tensor)  # noqa: E731
        timer.bulk(f"B1 {name} x1, all read", reads, client.wait, size, 1)
        new: Callable[[], Any] = lambda size=size: client.start("hold", client.tensor(size))  # noqa: E731
        for _ in range(HELD):
            client.wait(new())
        timer.bulk(f"B1 {name} x1, new and held", new, client.wait, size, 1)
        client.rpc.rpc_sync(TO, functions.release)


def run_overtaking(client: RpcClient, timer: Timer, settings: Settings) -> None:
    """Trivial calls while the largest tensors are on their way, two at a time, all the time."""
    name = max(settings.sizes, key=bench.size_of)
    tensor = client.tensor(bench.size_of(name))
    over = threading.Event()

    def stream() -> None:
        waiting = deque(client.start("swallow", tensor) for _ in range(2))
        while waiting:
            waiting.popleft().wait()
            if not over.is_set():
                waiting.append(client.start("swallow", tensor))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        timer.latency(f"L1 beside {name}", client.trivial, 0.5)
    finally:
        over.set()
        thread.join()


def run_backward(client: RpcClient, timer: Timer, settings: Settings) -> None:
    """A model of two layers, one on each worker: forward and backward, and backward alone."""
    import torch
    from torch.distributed import autograd

    client.rpc.rpc_sync(TO, functions.make_layer, args=(WIDTH,))
    first = torch.nn.Linear(WIDTH, WIDTH)
    batch = torch.ones(32, WIDTH)
    times: list[int] = []

    def step() -> None:
        with autograd.context() as context:
            loss = client.rpc.rpc_sync(TO, functions.layer, args=(first(batch),)).sum()
            began = time.perf_counter_ns()
            autograd.backward(context, [loss])
            times.append(time.perf_counter_ns() - began)

    timer.latency("forward and backward", step, 0.2)
    emit_times("backward", times[len(times) // 5 :])
    gc.collect()


WORKLOADS: Mapping[str, workloads.Workload] = workloads.COMMON | {
    "L2": run_l2,
    "refs": run_references,
    "variants": run_variants,
    "overtaking": run_overtaking,
    "backward": run_backward,
}


def free_port() -> int:
    """A port for the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Joins, and calls or is called."""
    parser = bench.parser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    bench.place(options.placement, options.role)
    install(options.engine)
    from torch.distributed import rpc

    if options.role == "callee":
        join(options.engine, 1, options.port)
        rpc.shutdown()
        return
    port = free_port()
    with both.callee(f"--port={port}"):
        join(options.engine, 0, port)
        workloads.run(RpcClient(), bench.settings_of(options), WORKLOADS)
        rpc.shutdown()


if __name__ == "__main__":
    main()
