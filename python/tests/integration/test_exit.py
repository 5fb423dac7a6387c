"""Processes that end without shutdown while functions run in them and calls arrive: soon, with the status
that Python would give, saying nothing (EXIT-1).

This file is also the program that ends. `launch` forks the workers of a job from a process that has torch
loaded, and each runs off its end as any program does, which workers of the harness do not. The workers of
a job are one that calls and one for each ending, which end one after another; a few jobs run side by side.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ENDINGS = {
    "return": 0,
    "exit 3": 3,
    "raise": 1,
    "SIGTERM": -signal.SIGTERM,
    "SIGINT": -signal.SIGINT,
    "os._exit": 4,
    "shutdown": 0,
    "fork": 0,
}
"""Ways to end, and the status of each."""
SAID = {"raise": "ValueError: planted", "SIGINT": "KeyboardInterrupt"}
"""The last line of Python's own traceback."""
RARE = ("shutdown", "fork")
JOBS, RARE_JOBS = 50, 5
"""How often each ending is tried."""
AT_ONCE = 2
"""Jobs side by side."""
DEADLINE = 30.0
"""Seconds that one job may take before it counts as hanging."""
SOON = 2.0
"""Seconds from the end of the program to that of the exit handlers; and how much longer the process may take
then than one without an agent, which needs a while to take Python and torch apart."""
BARE_EVERY = 5
"""Jobs from one such process to the next."""

began = threading.Semaphore(0)
turn = threading.Event()
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
        pause()


def pause() -> None:
    """Leaves the processor to those who end."""
    time.sleep(0.0005)


def take_your_turn() -> None:
    turn.set()


def hold() -> None:
    began.release()
    threading.Event().wait()


def send_signal(pid: int, number: int) -> None:
    os.kill(pid, number)
    threading.Event().wait()


RUNNING = (sleep, spin, spin_stubbornly, multiply, wait_for_peer, call_peer)
QUIET = (sleep, spin, sleep, multiply)
"""Those that say nothing when the agent closes under them."""


def running(ending: str, job: int) -> list[Callable[[], None]]:
    """What runs in a worker when it ends: in each job something else."""
    choice = QUIET if ending == "shutdown" else RUNNING
    first = job + list(ENDINGS).index(ending)
    return [choice[first % len(choice)], choice[(first + 2) % len(choice)]]


# The programs.


def note(file: Path) -> None:
    file.write_text(str(time.monotonic()))


def start(name: str, rank: int, folder: Path, endings: list[str]) -> None:
    from torch.distributed import rpc

    # Registered first, so it runs last.
    atexit.register(note, folder / f"{name} is out")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=0)
    rpc.init_rpc(name, rank=rank, world_size=len(endings) + 1, rpc_backend_options=options)


def peer(folder: Path, endings: list[str], job: int) -> None:
    """Has functions running in the other workers, one after the other, and calls each until it is gone."""
    from torch.distributed import rpc

    start("peer", 0, folder, endings)
    for ending in endings:
        leaver = ending_name(ending)
        kept.extend(rpc.rpc_async(leaver, function) for function in running(ending, job))
        try:
            rpc.rpc_sync(leaver, take_your_turn)
            while True:
                rpc.rpc_sync(leaver, max, args=(1, 2))
                pause()
        except RuntimeError:
            pass
    note(folder / "peer ends")
    if job >= RARE_JOBS:
        os._exit(0)


def ending_name(ending: str) -> str:
    """A name that a worker may have."""
    return ending.replace(" ", "-").replace(".", "-")


def leaver(ending: str, folder: Path, endings: list[str], job: int) -> None:
    """Ends while functions run in it, wait in it and keep coming."""
    from torch.distributed import rpc

    start(ending_name(ending), endings.index(ending) + 1, folder, endings)
    assert turn.wait(DEADLINE)
    for _ in running(ending, job):
        assert began.acquire(timeout=DEADLINE)
    if ending == "shutdown":
        rpc.shutdown(graceful=False)
    else:
        threading.Thread(target=keep_calling, daemon=True).start()
    if ending == "fork":
        fork()
    note(folder / f"{ending} ends")
    if ending == "exit 3":
        sys.exit(3)
    if ending == "raise":
        raise ValueError("planted")
    if ending == "os._exit":
        os._exit(4)
    if ending.startswith("SIG"):
        rpc.rpc_sync("peer", send_signal, args=(os.getpid(), int(signal.Signals[ending])))


def bare(folder: Path, endings: list[str], job: int) -> None:
    """Ends without ever having had an agent."""
    note(folder / "bare ends")


def fork() -> None:
    """A child is none of the job's workers: it ends as it likes, and its parent goes on."""
    from torch.distributed import rpc

    # What libraries set up at the first call registers functions for the end of the process, under a lock of
    # the C library's that a fork in that moment would leave held in the child.
    assert rpc.rpc_sync("peer", max, args=(1, 2)) == 2
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert rpc.rpc_sync("peer", max, args=(1, 2)) == 2


def keep_calling() -> None:
    from torch.distributed import rpc

    while True:
        kept.append(rpc.rpc_async("peer", max, args=(1, 2)))
        pause()


def launch(base: Path) -> Callable[[], None] | None:
    """Runs the jobs and prints how they ended; in the workers, returns what they do."""
    import tensorcall

    tensorcall.install()
    import torch.distributed.rpc  # noqa: F401 (once, here)

    # Who runs the tests in the background of a shell has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Whoever ends need not look through all of torch for garbage: two thirds of what ending costs.
    gc.collect()
    gc.freeze()
    ends: list[dict[str, Any]] = []
    running: list[Job] = []
    for number in range(JOBS):
        while len(running) == AT_ONCE:
            ends += watch(running)
        folder = base / str(number)
        folder.mkdir()
        endings = [ending for ending in ENDINGS if number < RARE_JOBS or ending not in RARE]
        programs = {"peer": peer} | {ending: functools.partial(leaver, ending) for ending in endings}
        if number % BARE_EVERY == 0:
            programs["bare"] = bare
        job = Job(folder)
        for name, program in programs.items():
            pid = os.fork()
            if pid == 0:
                log = os.open(folder / f"{name} says", os.O_CREAT | os.O_WRONLY)
                os.dup2(log, 1)
                os.dup2(log, 2)
                return functools.partial(program, folder, endings, number)
            job.workers[os.pidfd_open(pid)] = (name, pid)
        running.append(job)
    while running:
        ends += watch(running)
    print(json.dumps(ends))
    return None


class Job:
    """The workers of a job that have not ended, by a descriptor that becomes readable when they do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deadline = time.monotonic() + DEADLINE
        self.workers: dict[int, tuple[str, int]] = {}


def watch(jobs: list[Job]) -> Iterator[dict[str, Any]]:
    """Waits until something ends, and tells how; forgets the jobs that are over."""
    waiting = select.poll()
    for job in jobs:
        for descriptor in job.workers:
            waiting.register(descriptor, select.POLLIN)
    left = min(job.deadline for job in jobs) - time.monotonic()
    ended = {descriptor for descriptor, _ in waiting.poll(max(0.0, left) * 1000)}
    now = time.monotonic()
    for job in list(jobs):
        late = now >= job.deadline
        for descriptor in list(job.workers):
            if late or descriptor in ended:
                name, pid = job.workers.pop(descriptor)
                if late:
                    os.kill(pid, signal.SIGKILL)
                os.close(descriptor)
                yield end(name, pid, job.folder, now)
        if not job.workers:
            jobs.remove(job)


def end(name: str, pid: int, folder: Path, now: float) -> dict[str, Any]:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    begin, out = folder / f"{name} ends", folder / f"{ending_name(name)} is out"
    began = float(begin.read_text()) if begin.exists() else None
    seconds = (
        [time - began for time in (float(out.read_text()) if out.exists() else now, now)] if began else None
    )
    said = (folder / f"{name} says").read_text()
    return {"name": name, "job": folder.name, "status": status, "seconds": seconds, "said": said}


# The tests.


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TP_SOCKET_IFNAME": "lo"}
    launched = subprocess.run(
        [sys.executable, __file__, tmp_path_factory.mktemp("jobs")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert launched.returncode == 0, launched.stdout + launched.stderr
    found: list[dict[str, Any]] = json.loads(launched.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ending", [*ENDINGS, "peer"])
def test_a_process_ends_soon_and_silently_while_functions_run_in_it(
    ending: str, ends: list[dict[str, Any]]
) -> None:
    """LOG rows 6 and 10: no timing of a shutdown without grace, or of none at all, crashes or hangs."""
    mine = [end for end in ends if end["name"] == ending]

    assert len(mine) == (RARE_JOBS if ending in RARE else JOBS)
    for left in mine:
        assert left["status"] == ENDINGS.get(ending, 0), left
        assert left["seconds"] is not None, left
        assert left["seconds"][0] < SOON, left
        if ending in SAID:
            first, *frames, last = left["said"].splitlines()
            assert (first, last) == ("Traceback (most recent call last):", SAID[ending]), left
            assert all(frame.startswith("  ") for frame in frames), left
        else:
            assert left["said"] == "", left
    bare = [end["seconds"][1] for end in ends if end["name"] == "bare"]
    assert statistics.median(left["seconds"][1] for left in mine) - statistics.median(bare) < SOON


if __name__ == "__main__":
    program = launch(Path(sys.argv[1]))
    if program is not None:
        program()
