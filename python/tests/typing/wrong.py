"""What a type checker must find in a user's program; see `unit/test_typing.py`.

Each mistake is marked with the error that it is. `mypy --strict` complains about a mark that is not
needed, so the stubs cannot become too lenient without this file telling.
"""

from __future__ import annotations

import tensorcall
import tensorcall.rpc as rpc
import torch

tensorcall.no_such_name()  # type: ignore[attr-defined]
tensorcall.install("torch")  # type: ignore[call-arg]
rpc.no_such_name()  # type: ignore[attr-defined]

rpc.init_rpc()  # type: ignore[call-arg]
rpc.init_rpc("worker0", rank="0", world_size=2)  # type: ignore[arg-type]
rpc.init_rpc("worker0", rpc_backend_options={"rpc_timeout": 1})  # type: ignore[arg-type]

rpc.rpc_sync("worker1")  # type: ignore[call-arg]
rpc.rpc_sync(1.5, pow, args=(2, 3))  # type: ignore[arg-type]
rpc.rpc_sync("worker1", 3, args=(2, 3))  # type: ignore[arg-type]
rpc.function(3)  # type: ignore[call-overload]
rpc.rpc_async("worker1", pow, kwargs=[("a", 1)])  # type: ignore[arg-type]
rpc.rpc_async("worker1", pow, timeout="1 s")  # type: ignore[arg-type]
rpc.rpc_async("worker1", pow, timeouts=1)  # type: ignore[call-arg]
rpc.rpc_async("worker1", pow).wait(timeout="1 s")  # type: ignore[arg-type]
rpc.rpc_async("worker1", pow).result()  # type: ignore[attr-defined]

number: int = rpc.rpc_async("worker1", pow, args=(2, 3))  # type: ignore[assignment]
info: rpc.WorkerInfo = rpc.get_worker_info().name  # type: ignore[assignment]
rpc.get_worker_info().name = "worker2"  # type: ignore[misc]
rpc.get_rpc_timeout() + "s"  # type: ignore[operator]

rpc.TensorPipeRpcBackendOptions(16)  # type: ignore[call-arg]
rpc.TensorPipeRpcBackendOptions(num_worker_threads="all")  # type: ignore[arg-type]
rpc.TensorPipeRpcBackendOptions(threads=16)  # type: ignore[call-arg]
rpc.TensorPipeRpcBackendOptions(devices=torch.device("cuda:0"))  # type: ignore[arg-type]
rpc.TensorPipeRpcBackendOptions().set_device_map("worker1", [(0, 1)])  # type: ignore[arg-type]
rpc.functions.async_execution(3)  # type: ignore[arg-type]
rpc.internal.deserialize("text", [])  # type: ignore[arg-type]

rpc.shutdown(wait=True)  # type: ignore[call-arg]
