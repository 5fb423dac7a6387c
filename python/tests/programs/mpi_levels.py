"""Workers over an MPI that allows fewer threads than any: a program for mpirun.

MPI4PY_RC_THREAD_LEVEL says how many: `serialized`, one at a time; `funneled`, the first one only.
"""

from __future__ import annotations

import os

import tensorcall.rpc as rpc
import torch
from mpi4py import MPI

LEVELS = {"serialized": MPI.THREAD_SERIALIZED, "funneled": MPI.THREAD_FUNNELED}


def main() -> None:
    assert MPI.Query_thread() == LEVELS[os.environ["MPI4PY_RC_THREAD_LEVEL"]]
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    options = rpc.ProcessGroupRpcBackendOptions(process_group=MPI.COMM_WORLD, rpc_timeout=30)
    try:
        rpc.init_rpc(f"w{rank}", backend=rpc.BackendType.PROCESS_GROUP, rpc_backend_options=options)
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
        return
    for other in range(size):
        futures = [rpc.rpc_async(f"w{other}", torch.add, args=(torch.ones(2), n)) for n in range(64)]
        assert all(bool((future.wait() == 1 + n).all()) for n, future in enumerate(futures))
    rpc.shutdown()
    print(f"rank {rank} is content", flush=True)


if __name__ == "__main__":
    main()
