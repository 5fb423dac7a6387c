"""A program as they were written for torch 1.5 to 1.10: it names the process group agent and its options.

A launcher that sets RANK and WORLD_SIZE, as torchrun, starts its two workers.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef, rpc_sync

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Counter:
    def __init__(self, start):
        self.total = start

    def add(self, x):
        self.total += x
        return self.total


def _call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def _remote_method(method, rref, *args):
    return rpc_sync(rref.owner(), _call_method, args=[method, rref, *args])


def live(options):
    other = f"worker{1 - RANK}"
    rpc.init_rpc(
        f"worker{RANK}",
        backend=rpc.backend_registry.BackendType.PROCESS_GROUP,
        rank=RANK,
        world_size=SIZE,
        rpc_backend_options=options,
    )
    assert isinstance(rpc.api._get_current_rpc_agent(), rpc.ProcessGroupAgent)
    counter = rpc.remote(other, Counter, args=(torch.zeros(2),))
    assert isinstance(counter, RRef)
    for _ in range(3):
        total = _remote_method(Counter.add, counter, torch.ones(2))
    assert total.tolist() == [3, 3]
    future = rpc.rpc_async(rpc.get_worker_info(other), torch.add, args=(torch.ones(2), 1))
    assert future.wait().tolist() == [2, 2]
    rpc.api._get_current_rpc_agent().sync()
    rpc.shutdown()


def main():
    live(rpc.ProcessGroupRpcBackendOptions(8, timedelta(seconds=30), "env://"))
    options = rpc.ProcessGroupRpcBackendOptions(rpc_timeout=30)
    options.num_send_recv_threads = 16
    options.init_method = "env://"
    live(options)
    dist.init_process_group("gloo")
    live(
        rpc.backend_registry.construct_rpc_backend_options(
            rpc.backend_registry.BackendType.PROCESS_GROUP, rpc_timeout=30, num_send_recv_threads=4
        )
    )
    dist.destroy_process_group()
    os.write(1, f"worker{RANK} is content\n".encode())


if __name__ == "__main__":
    main()
