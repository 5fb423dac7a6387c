"""One worker of a job whose launcher put rank and size into the environment."""

import os

import torch
from torch.distributed import rpc


def double(tensor):
    return f"{(tensor * 2).tolist()} by {rpc.rpc_sync.__module__}"


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
    for other in range(size):
        got = rpc.rpc_sync(f"w{other}", double, args=(torch.ones(2),))
        os.write(1, f"w{rank} got {got}\n".encode())
    rpc.shutdown()


if __name__ == "__main__":
    main()
