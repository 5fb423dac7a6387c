"""Workers over a communicator that the program gives, while the program uses it too: a program for mpirun."""

from __future__ import annotations

import threading

import tensorcall.rpc as rpc
import torch
from mpi4py import MPI
from sockets import listening

WORLD = MPI.COMM_WORLD


def kind() -> str:
    return type(rpc.api._get_current_rpc_agent()).__name__


def nested(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, torch.add, args=(x, 1))


def live(color: int) -> None:
    """One life of a worker, in the half of the ranks that has its color."""
    half = WORLD.Split(color, WORLD.rank)
    name = f"w{half.rank}"
    options = rpc.ProcessGroupRpcBackendOptions(process_group=half, rpc_timeout=30)
    before = listening()
    rpc.init_rpc(name, backend=rpc.BackendType.PROCESS_GROUP, rpc_backend_options=options)
    assert listening() == before
    assert rpc.get_worker_info().id == half.rank
    thread = threading.Thread(target=reduce, args=(half,))
    thread.start()
    small, large = torch.arange(3), torch.arange(2 << 20)
    for other in (f"w{rank}" for rank in range(half.size)):
        assert rpc.rpc_sync(other, kind) == "ProcessGroupAgent"
        for x in (small, large):
            assert torch.equal(rpc.rpc_sync(other, nested, args=(name, x)), x + 1)
        futures = [rpc.rpc_async(other, torch.add, args=(small, number)) for number in range(64)]
        assert all(torch.equal(future.wait(), small + number) for number, future in enumerate(futures))
    thread.join()
    rpc.shutdown()
    half.Free()


def reduce(communicator: MPI.Intracomm) -> None:
    """The user's own messages, on the very communicator that was given."""
    for number in range(20):
        assert communicator.allreduce(number) == number * communicator.size


def main() -> None:
    for color in (0, WORLD.rank % 2):
        live(color)
    print(f"rank {WORLD.rank} is content", flush=True)


if __name__ == "__main__":
    main()
