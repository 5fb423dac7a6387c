"""Agents come and go in one process, and leave nothing behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from harness import Group, Worker, serve

ROUNDS = 50
SOON = 20.0


def things() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def live(folder: Path, graceful: bool) -> None:
    """One life of a worker that is alone."""
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store-{time.monotonic_ns()}", num_worker_threads=4
    )
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    futures = [rpc.rpc_async("w0", max, args=(number, 1)) for number in range(20)]
    assert [future.wait() for future in futures] == [max(number, 1) for number in range(20)]
    rpc.shutdown(graceful=graceful)


def live_often(worker: Worker, folder: str) -> tuple[tuple[int, int], tuple[int, int]]:
    live(Path(folder), True)
    before = things()
    for number in range(ROUNDS):
        live(Path(folder), number % 2 == 0)
    deadline = time.monotonic() + SOON
    while things() > before and time.monotonic() < deadline:
        time.sleep(0)
    return before, things()


@pytest.mark.slow
def test_fifty_agents_in_one_process_leave_no_thread_and_no_file(group: Group, tmp_path: Path) -> None:
    [(before, after)] = group.run(live_often, arguments=(str(tmp_path),))

    assert after <= before


def close_twice(worker: Worker) -> str:
    from torch.distributed import rpc

    worker.start()
    agent = rpc.api._get_current_rpc_agent()
    rpc.shutdown()
    agent.shutdown()
    agent._native.close(False)
    try:
        agent._native.call(1, "builtins.max", (1, 2), {}, 1.0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_agent_may_be_closed_again_and_makes_no_calls_then(group: Group) -> None:
    """LOG row 10."""
    said, _ = group.run(close_twice, serve)

    assert "shut down" in said


left = threading.Event()


def leave() -> None:
    from torch.distributed import rpc

    rpc.shutdown(graceful=False)
    left.set()


def ask_to_leave(worker: Worker) -> str:
    from torch.distributed import rpc

    worker.start()
    try:
        rpc.rpc_sync("w1", leave)
    except RuntimeError as error:
        return str(error)
    finally:
        rpc.shutdown(graceful=False)
    return ""


def be_asked(worker: Worker) -> str:
    from torch.distributed import rpc

    worker.start()
    assert left.wait(SOON)
    try:
        rpc.shutdown()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_function_may_close_the_agent_that_runs_it(group: Group) -> None:
    said_there, said_here = group.run(ask_to_leave, be_asked)

    assert "w1" in said_there
    assert "has not been initialized" in said_here
