"""Calls with CUDA tensors: where do they go, and how do they come back?

worker0 maps its device cuda:0 to cuda:0 of worker1, so that arguments on the one arrive on the other
and results come back the same way. A tensor for which there is no map is refused at the call.

This is an ordinary program for `torch.distributed.rpc`:

    python -m tensorcall run examples/cuda_calls.py    # on tensorcall
    python examples/cuda_calls.py                      # on torch's own agent

Without a CUDA device it says so and ends.
"""

import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

NAMES = ["worker0", "worker1"]


def square(x):
    """Runs on worker1."""
    return x.pow(2)


def where(x):
    """Runs on worker1."""
    return str(x.device)


def work(rank, init_method):
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    if rank == 0:
        options.set_device_map("worker1", {"cuda:0": "cuda:0"})
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)
    if rank == 0:
        call()
    rpc.shutdown()


def call():
    x = torch.randn(2, 32, 100, 100, dtype=torch.bfloat16, device="cuda:0")
    print("an argument on", x.device, "is on", rpc.rpc_sync("worker1", where, args=(x,)), "of worker1")
    futures = [rpc.rpc_async("worker1", square, args=(x + i,)) for i in range(8)]
    for i, future in enumerate(futures):
        result = future.wait()
        assert result.device == x.device
        assert torch.equal(result, (x + i).pow(2))
    print("8 results are back on", x.device, "and right")
    rref = rpc.remote("worker1", square, args=(x,))
    assert torch.equal(rref.to_here(), x.pow(2))
    print("so is one that was left on worker1 and fetched")


def main():
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing to try")
        return 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{Path(folder) / 'store'}"
        workers = [context.Process(target=work, args=(rank, init_method)) for rank in range(len(NAMES))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return max(abs(worker.exitcode or 0) for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
