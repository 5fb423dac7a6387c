"""The first of two workers: what it sends and gets are objects and functions of the RPC module itself."""

import sys

from torch.distributed.rpc import (
    TensorPipeRpcBackendOptions,
    WorkerInfo,
    get_worker_info,
    init_rpc,
    rpc_async,
    shutdown,
)


def main():
    options = TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}", rpc_timeout=30)
    init_rpc("first", rank=0, world_size=2, rpc_backend_options=options)
    other = rpc_async("second", get_worker_info).wait()
    same = rpc_async(other, WorkerInfo, args=("second", 1)).wait()
    print(other == same, type(other) is WorkerInfo, WorkerInfo.__module__)
    shutdown()


if __name__ == "__main__":
    main()
