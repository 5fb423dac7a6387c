"""Two workers, started in the way that the argument names; each calls a function of this file on the other.

Everything here is torch's: which RPC serves is what the tests ask.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import rpc_sync


def double(tensor):
    return f"{(tensor * 2).tolist()} by {rpc_sync.__module__}, {rpc.rpc_sync.__module__}"


def work(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=30)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    got = rpc_sync(f"w{1 - rank}", double, args=(torch.ones(2),))
    os.write(1, f"w{rank} got {got}\n".encode())
    rpc.shutdown()


def start_by_subprocess(store):
    command = [sys.executable, os.path.abspath(__file__), "work"]
    children = [subprocess.Popen([*command, str(rank), store]) for rank in range(2)]
    return [child.wait() for child in children]


def start_by_multiprocessing(method, store):
    context = multiprocessing.get_context(method)
    children = [context.Process(target=work, args=(rank, store)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [child.exitcode for child in children]


def main():
    how = sys.argv[1]
    if how == "work":
        work(int(sys.argv[2]), sys.argv[3])
        return
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        by_module = how != "subprocess"
        codes = start_by_multiprocessing(how, store) if by_module else start_by_subprocess(store)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
