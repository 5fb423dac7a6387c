"""Processes that end while functions run in them: soon, with their own exit status, saying nothing.

This file is also the program that ends: `launch` forks the two workers of a job from a process that has
torch loaded, and each then runs off its end as any program does, which workers of the harness do not.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOBS = {"return": 10, "exit 3": 10, "raise": 10, "shutdown": 10, "fork": 3}
"""How often each ending is tried."""
DEADLINE = 30.0
"""Seconds that one job may take before it counts as hanging."""
SOON = 2.0
"""Seconds from the end of the program until Python begins to end itself, which takes it a while."""

began = threading.Semaphore(0)
kept: list[Any] = []
"""Futures of calls that fail, which would be logged if nobody had them any more."""


# What other workers have running in the worker that ends.


def sleep() -> None:
    began.release()
    time.sleep(1000)


def spin() -> None:
    began.release()
    while True:
        pass


def spin_stubbornly() -> None:
    began.release()
    while True:
        try:
            while True:
                pass
        except BaseException:  # in vain, but the process has to end all the same
            pass


def multiply() -> None:
    import torch

    began.release()
    matrix = torch.eye(50)
    while True:
        matrix = matrix.matmul(matrix)


def wait_for_peer() -> None:
    from torch.distributed import rpc

    began.release()
    rpc.rpc_sync("peer", hold, timeout=0)


def call_peer() -> None:
    from torch.distributed import rpc

    began.release()
    while True:
        rpc.rpc_sync("peer", max, args=(1, 2))


def hold() -> None:
    began.release()
    threading.Event().wait()


RUNNING = (sleep, spin, spin_stubbornly, multiply, wait_for_peer, call_peer)
QUIET = (sleep, spin, multiply)
"""Those that say nothing when the agent closes under them."""


# The two programs.


def note(file: Path) -> None:
    file.write_text(str(time.monotonic()))


def start(name: str, rank: int, folder: Path) -> None:
    from torch.distributed import rpc

    # Registered first, so it runs last.
    atexit.register(note, folder / f"{name} is out")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=0)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def peer(folder: Path, ending: str) -> None:
    """Has all kinds of functions running in the other worker, and calls it until it is gone."""
    from torch.distributed import rpc

    start("peer", 0, folder)
    running = QUIET if ending == "shutdown" else RUNNING
    kept.extend(rpc.rpc_async("leaver", function) for function in running)
    try:
        while True:
            rpc.rpc_sync("leaver", max, args=(1, 2))
    except RuntimeError:
        pass
    note(folder / "peer ends")


def leaver(folder: Path, ending: str) -> None:
    """Ends while functions run in it, wait in it and keep coming."""
    from torch.distributed import rpc

    start("leaver", 1, folder)
    for _ in QUIET if ending == "shutdown" else RUNNING:
        assert began.acquire(timeout=DEADLINE)
    if ending == "shutdown":
        rpc.shutdown(graceful=False)
    else:
        threading.Thread(target=keep_calling, daemon=True).start()
    if ending == "fork":
        fork()
    note(folder / "leaver ends")
    if ending == "exit 3":
        sys.exit(3)
    if ending == "raise":
        raise ValueError("planted")


def fork() -> None:
    """A child is none of the job's workers: it ends as it likes, and its parent goes on."""
    from torch.distributed import rpc

    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert rpc.rpc_sync("peer", max, args=(1, 2)) == 2


def keep_calling() -> None:
    from torch.distributed import rpc

    while True:
        rpc.rpc_async("peer", max, args=(1, 2))


def launch(ending: str, base: Path) -> Callable[[], None] | None:
    """Runs the jobs and prints how they ended; in the workers, returns what they do."""
    import tensorcall

    tensorcall.install()
    import torch.distributed.rpc  # noqa: F401 (once, here)

    ends = []
    for job in range(JOBS[ending]):
        folder = base / str(job)
        folder.mkdir()
        workers = {}
        for program in (peer, leaver):
            pid = os.fork()
            if pid == 0:
                log = os.open(folder / f"{program.__name__} says", os.O_CREAT | os.O_WRONLY)
                os.dup2(log, 1)
                os.dup2(log, 2)
                return functools.partial(program, folder, ending)
            workers[program.__name__] = pid
        ends.append(watch(workers, folder))
    print(json.dumps(ends))
    return None


def watch(workers: dict[str, int], folder: Path) -> dict[str, Any]:
    """How each worker ended: status, seconds that leaving took, what it wrote."""
    deadline = time.monotonic() + DEADLINE
    waiting = select.poll()
    running = {os.pidfd_open(pid): name for name, pid in workers.items()}
    for descriptor in running:
        waiting.register(descriptor, select.POLLIN)
    while running and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in waiting.poll(left * 1000):
            waiting.unregister(descriptor)
            os.close(descriptor)
            del running[descriptor]
    for name in running.values():
        os.kill(workers[name], signal.SIGKILL)
    return {name: end(name, pid, folder) for name, pid in workers.items()}


def end(name: str, pid: int, folder: Path) -> dict[str, Any]:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    begin, out = folder / f"{name} ends", folder / f"{name} is out"
    seconds = float(out.read_text()) - float(begin.read_text()) if out.exists() else None
    return {"status": status, "seconds": seconds, "said": (folder / f"{name} says").read_text()}


# The test.


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ending", JOBS)
def test_a_process_ends_soon_and_silently_while_functions_run_in_it(ending: str, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TP_SOCKET_IFNAME": "lo"}

    launched = subprocess.run(
        [sys.executable, __file__, ending, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )

    assert launched.returncode == 0, launched.stdout + launched.stderr
    ends = json.loads(launched.stdout)
    assert len(ends) == JOBS[ending]
    for job in ends:
        left = job["leaver"]
        assert left["status"] == {"exit 3": 3, "raise": 1}.get(ending, 0), job
        if ending == "raise":
            first, *frames, last = left["said"].splitlines()
            assert (first, last) == ("Traceback (most recent call last):", "ValueError: planted"), left
            assert all(frame.startswith("  ") for frame in frames), left
        else:
            assert left["said"] == "", left
        assert (job["peer"]["status"], job["peer"]["said"]) == (0, ""), job
        assert max(left["seconds"], job["peer"]["seconds"]) < SOON, job


if __name__ == "__main__":
    program = launch(sys.argv[1], Path(sys.argv[2]))
    if program is not None:
        program()
