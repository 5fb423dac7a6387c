"""Frames gathered by TorchRL's collector over RPC, and a replay buffer on another worker.

Arguments are `collect sync PORT`, `collect async PORT` or `buffer PORT`.
"""

import logging
import multiprocessing
import sys

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.distributed import rpc
from torchrl.collectors.distributed import RPCCollector
from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer
from torchrl.testing.mocking_classes import CountingEnv

logging.getLogger("torchrl").setLevel(logging.ERROR)

FRAMES = 20


class Constant(torch.nn.Module):
    """A policy whose action is its one weight."""

    def __init__(self):
        super().__init__()
        self.action = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return self.action.expand(observation.shape).round().to(torch.int32)


def collect(how, port):
    """Environments count as the policy says: not at all, and up once it was given another weight."""
    policy = TensorDictModule(Constant(), in_keys=["observation"], out_keys=["action"])
    collector = RPCCollector(
        [CountingEnv] * (2 if how == "sync" else 1),
        policy,
        frames_per_batch=FRAMES,
        total_frames=6 * FRAMES,
        sync=how == "sync",
        launcher="mp",
        tcp_port=port,
    )
    assert all(isinstance(rref, torch._C._distributed_rpc.PyRRef) for rref in collector.collector_rrefs)
    assert all(not rref.is_owner() for rref in collector.collector_rrefs)
    counts = []
    for batch in collector:
        assert batch.numel() == FRAMES
        counts.append(int(batch["observation"].max()))
        if len(counts) == 2:
            policy.module.action.data.fill_(1)
            collector.update_policy_weights_()
    assert counts[0] == 0, counts
    assert counts[-1] > 0, counts
    collector.shutdown()
    print(f"collected {len(counts)} batches by {rpc.rpc_sync.__module__}", flush=True)


def keep(rank, port):
    """The owner of a buffer, or its user: who is given the reference for the buffer calls its methods too."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=["uv"], rpc_timeout=30
    )
    rpc.init_rpc(("user", "owner")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        buffer = rpc.remote("owner", make_buffer)
        owner = buffer.owner()
        rows = TensorDict({"row": torch.arange(8)}, batch_size=[8])
        assert buffer.rpc_sync().extend(rows).tolist() == list(range(8))
        rpc.rpc_sync(owner, RemoteTensorDictReplayBuffer.extend, args=(buffer, rows + 8))
        sample = rpc.remote(owner, RemoteTensorDictReplayBuffer.sample, args=(buffer, 32)).to_here()
        assert set(sample["row"].tolist()) <= set(range(16))
        print(f"sampled {len(sample)} rows by {rpc.rpc_sync.__module__}", flush=True)
    rpc.shutdown()


def make_buffer():
    """A buffer on the worker that runs this."""
    return RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=32)


def main():
    what, port = sys.argv[1], int(sys.argv[-1])
    torch.set_num_threads(1)
    if what == "collect":
        collect(sys.argv[2], port)
        return
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=keep, args=(rank, port)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    main()
