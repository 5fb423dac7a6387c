"""A user's program that touches every public name, for `mypy --strict`; see `unit/test_typing.py`.

Nothing here is run. What a name gives is bound to a variable of the type that a user would expect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import tensorcall
import tensorcall.autograd as dist_autograd
import tensorcall.rpc as rpc
import torch
from tensorcall.nn import RemoteModule
from tensorcall.optim import DistributedOptimizer
from tensorcall.rpc import (
    ProcessGroupAgent,
    ProcessGroupRpcBackendOptions,
    PyRRef,
    RpcAgent,
    RpcBackendOptions,
    RRef,
    TensorPipeAgent,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
)


def add(a: torch.Tensor, b: int) -> torch.Tensor:
    return a + b


async def double(a: int) -> int:
    await asyncio.sleep(0)
    return 2 * a


@functions.async_execution
def add_elsewhere(to: str, a: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    def times_two(future: torch.futures.Future[Any]) -> torch.Tensor:
        result: torch.Tensor = future.wait()
        return 2 * result

    return rpc.rpc_async(to, add, args=(a, 1)).then(times_two)


def installs() -> str:
    tensorcall.install()
    tensorcall.uninstall()
    version: str = tensorcall.__version__
    return version if tensorcall.rpc is rpc and rpc.is_available() else ""


def joins(rank: int, url: str) -> None:
    chosen = TensorPipeRpcBackendOptions(
        num_worker_threads=4,
        rpc_timeout=10,
        init_method=url,
        device_maps={"worker1": {0: 1, "cuda:1": torch.device("cuda:0")}},
        devices=[0, "cuda:1"],
    )
    chosen.set_device_map("worker1", {2: 2})
    chosen.set_devices(["cuda:0"])
    chosen.rpc_timeout = 2.5
    maps: dict[str, dict[torch.device, torch.device]] = chosen.device_maps
    devices: list[torch.device] = chosen.devices
    threads: int = chosen.num_worker_threads
    base: RpcBackendOptions = chosen
    where: str = base.init_method
    same: type[TensorPipeRpcBackendOptions] = options.TensorPipeRpcBackendOptions
    on_group = ProcessGroupRpcBackendOptions(num_send_recv_threads=8, process_group=None)
    pieces: int = on_group.num_send_recv_threads + constants.DEFAULT_NUM_SEND_RECV_THREADS
    also: type[ProcessGroupRpcBackendOptions] = options.ProcessGroupRpcBackendOptions
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=same(init_method=where))
    print(maps, devices, threads, pieces, also)


@rpc.function
def halve(x: float) -> float:
    return x / 2


@rpc.function("tests.halve")
def halve_again(x: float) -> float:
    return halve(x) / 2


def calls(other: WorkerInfo) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("worker1", add, args=(torch.ones(2), 1), timeout=3)
    future: torch.futures.Future[torch.Tensor] = rpc.rpc_async(other, add, (result,), {"b": 2})
    doubled = future.then(lambda done: 2 * done.wait())
    doubled.add_done_callback(lambda done: print(done.value()))
    number: int = rpc.rpc_sync(1, double, args=(3,))
    named: torch.Tensor = rpc.rpc_sync("rust", "matmul", args=(result, result))
    rpc.remote("rust", "new_counter").rpc_sync().add(named.numel())
    limited: torch.Tensor = rpc.rpc_async(1, add_elsewhere, ("worker0", result)).wait(timeout=1.5)
    if not rpc.rpc_async("worker1", double, (4,)).cancel():
        print(number, future.done())
    torch.futures.wait_all([rpc.rpc_async("worker1", pow, args=(n, 2)) for n in range(5)])
    return limited + doubled.wait()


async def awaits() -> int:
    first: int = await rpc.rpc_async("worker1", double, args=(1,))
    rest: list[int] = await asyncio.gather(*(asked(number) for number in range(3)))
    return first + sum(rest)


async def asked(number: int) -> int:
    answer: int = await api.rpc_async("worker1", double, args=(number,))
    return answer


def knows(agent: RpcAgent) -> tuple[str, int]:
    me: WorkerInfo = rpc.get_worker_info()
    other = api.get_worker_info("worker1")
    everybody: list[WorkerInfo] = agent.get_worker_infos()
    figures: dict[str, str] = agent.get_metrics() | agent.get_debug_info()
    if isinstance(agent, TensorPipeAgent):
        lost: set[int] = agent.lost_workers()
        print(lost, agent.rpc_timeout, agent.is_static_group, isinstance(agent, ProcessGroupAgent))
    agent.sync()
    agent.join(shutdown=True, timeout=1)
    agent.shutdown()
    limit: float = rpc.get_rpc_timeout()
    print(everybody, figures, limit, me == other, {me: 1})
    return other.name, other.id


def refers() -> PyRRef:
    local: RRef[torch.Tensor] = RRef(torch.ones(2))
    distant: PyRRef = rpc.remote("worker1", add, args=(torch.ones(2), 1), timeout=5)
    value: torch.Tensor = distant.to_here(timeout=3)
    owner: WorkerInfo = distant.owner()
    same: torch.Tensor = local.local_value() if local.is_owner() and local.confirmed_by_owner() else value
    total: torch.Tensor = distant.rpc_sync(timeout=2).sum()
    later = distant.rpc_async().sum()
    print(owner, distant.owner_name(), same, total, later, distant.remote().sum())
    print(local, api.remote, api.RRef)
    return distant


def learns(loss: torch.Tensor) -> Any:
    if not dist_autograd.is_available():
        return None
    with dist_autograd.context() as context_id:
        number: int = context_id
        dist_autograd.backward(number, [loss], retain_graph=True)
        module = RemoteModule("worker1/cpu", torch.nn.Linear, args=(2, 2), kwargs={"bias": False})
        output: torch.Tensor = module.forward(loss)
        optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
        optimizer.step(number)
        gradients: dict[torch.Tensor, torch.Tensor] = dist_autograd.get_gradients(number)
        print(output, module.get_module_rref().owner(), module.train(False).forward_async(loss).wait())
        return gradients


def chooses(make: Callable[..., Any]) -> None:
    backend = rpc.BackendType.TENSORPIPE
    if not rpc.backend_registered("MINE"):
        backend = rpc.register_backend("MINE", make, make)
    value: rpc.BackendValue = backend.value
    made = rpc.construct_rpc_backend_options(backend, rpc_timeout=1.0, init_method="env://")
    rpc.init_backend(backend, store=None, name="me", rank=0, world_size=1, rpc_backend_options=made)
    print(value.init_backend_handler, value.construct_rpc_backend_options_handler)
    print(backend_registry.BackendType, backend_registry.BackendValue, backend_registry.init_backend)
    print(backend_registry.backend_registered, backend_registry.register_backend)
    print(backend_registry.construct_rpc_backend_options)


def packs() -> Any:
    payload, tensors = internal.serialize([torch.ones(2), {"a": 1}])
    table: list[torch.Tensor] = tensors
    content: bytes = payload
    call = internal.PythonUDF(add, (table[0], 1), {})
    error = internal.RemoteException("text", ValueError)
    mode: internal.RPCExecMode = internal.RPCExecMode.SYNC
    print(call.func, call.args, call.kwargs, error.msg, error.exception_type, mode.value)
    return internal.deserialize(content, table)


def leaves() -> None:
    rpc.enable_gil_profiling(True)
    limits: tuple[float, float, float] = (
        constants.DEFAULT_RPC_TIMEOUT_SEC,
        constants.DEFAULT_SHUTDOWN_TIMEOUT,
        constants.UNSET_RPC_TIMEOUT,
    )
    longest: timedelta = constants.DEFAULT_PROCESS_GROUP_TIMEOUT
    print(limits, longest, constants.DEFAULT_INIT_METHOD, constants.DEFAULT_NUM_WORKER_THREADS)
    api.shutdown(graceful=False)
    api.rpc_sync("worker1", add)
    rpc.shutdown(timeout=10)
