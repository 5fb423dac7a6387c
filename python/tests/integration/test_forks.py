"""Forked children of a worker: harmless to it and its peers, and able to join a group themselves (FORK-1)."""

from __future__ import annotations

import ast
import asyncio
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

LIMIT = 20.0
"""Seconds after which a child counts as hanging."""
AT_ONCE = 1.0
"""Seconds, on a busy machine, in which something that waits for nothing is done."""
LOST = 2.0
"""Seconds in which the loss of a worker must show."""


def fork(act: Callable[[], Any]) -> Callable[[], tuple[Any, int]]:
    """Run `act` in a forked child; returns a function that gives what it returned and the exit status."""
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(near)
        with os.fdopen(far, "wb") as pipe:
            try:
                said: Any = act()
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            pipe.write(pickle.dumps(said))
        os._exit(0)
    os.close(far)

    def result() -> tuple[Any, int]:
        with os.fdopen(near, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], LIMIT)
            if not ready:
                os.kill(pid, 9)
            said = pipe.read() if ready else pickle.dumps("the child hung")
        return pickle.loads(said or pickle.dumps("the child died")), os.waitstatus_to_exitcode(
            os.waitpid(pid, 0)[1]
        )

    return result


def in_child(act: Callable[[], Any]) -> Any:
    said, status = fork(act)()
    assert status == 0, said
    return said


def error_and_seconds(act: Callable[[], Any]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        said = repr(act())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began


def descriptors() -> set[str]:
    """What this process has open of the kinds that an agent uses."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(("socket:", "anon_inode:")):
            found.add(f"{number} {target}")
    return found


# The functions that workers call.


def wait_a_second() -> str:
    time.sleep(1)
    return "waited"


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


# A child has nothing of its parent's.


def look_for_descriptors(worker: Worker, folder: str) -> tuple[set[str], set[str], set[str]]:
    worker.init_method = f"file://{folder}/store"
    before = descriptors()
    worker.start()
    peer = f"w{1 - worker.rank}"
    assert rpc.rpc_sync(peer, max, args=(1, 2)) == 2
    rpc.rpc_sync(peer, torch.numel, args=(torch.ones(1 << 20),))  # large: over a link of its own
    ours = descriptors() - before
    left = in_child(descriptors)
    # Closed, and not shut down: the parent goes on.
    assert rpc.rpc_sync(peer, max, args=(1, 2)) == 2
    rpc.shutdown()
    return before, ours, left


def test_a_child_has_no_descriptor_of_its_parents_agent(group: Group, tmp_path: Path) -> None:
    for before, ours, left in group.run(
        look_for_descriptors, look_for_descriptors, arguments=(str(tmp_path),)
    ):
        assert len(ours) >= 6  # epoll, eventfd, two that listen, two links
        assert not left - before


def use_what_is_inherited() -> dict[str, tuple[str, float]]:
    tries: dict[str, Callable[[], Any]] = {
        "call": lambda: rpc.rpc_sync("w1", max, args=(1, 2)),
        "start a call": lambda: rpc.rpc_async("w1", max, args=(1, 2)),
        "wait": kept["pending"].wait,
        "wait for what follows": kept["follows"].wait,
        "await": lambda: asyncio.run(awaited(kept["pending"])),
        "ask": lambda: rpc.get_worker_info("w1"),
        "shut down": rpc.shutdown,
        "shut the agent down": kept["agent"].shutdown,
        "join": lambda: kept["agent"].join(shutdown=True),
        "call by the agent": lambda: kept["agent"]._native.call(1, "builtins:max", (1, 2), {}, 1.0),
    }
    return {what: error_and_seconds(act) for what, act in tries.items()}


async def awaited(future: Any) -> Any:
    return await future


kept: dict[str, Any] = {}


def let_a_child_use_what_it_inherits(worker: Worker) -> tuple[dict[str, tuple[str, float]], str, str]:
    worker.start()
    done = rpc.rpc_async("w1", max, args=(1, 2))
    done.wait()
    kept["agent"] = rpc.api._get_current_rpc_agent()
    kept["pending"] = rpc.rpc_async("w1", wait_a_second)
    kept["follows"] = kept["pending"].then(lambda future: future.value() + " and followed")
    said = in_child(use_what_is_inherited)
    assert in_child(done.wait) == 2  # an outcome that was there is there
    outcomes = kept["pending"].wait(), kept["follows"].wait()
    rpc.shutdown()
    return said, *outcomes


def test_in_a_child_calls_fail_at_once_and_say_why(group: Group) -> None:
    said, *outcomes = group.run(let_a_child_use_what_it_inherits, serve)[0]

    assert outcomes == ["waited", "waited and followed"]
    for what, (text, seconds) in said.items():
        assert seconds < AT_ONCE, what
        if what == "shut the agent down":
            assert text == "None"
        else:
            assert "this process was forked from" in text.replace("This", "this"), (what, text)
            assert text.startswith("RuntimeError"), (what, text)
    assert "worker 'w0'" in said["call"][0]


ENDS = {"exit": 3, "collect and exit": 3, "raise": 1, "os._exit": 3}

PROGRAM = """
import gc, os, sys, time
import tensorcall.rpc as rpc, torch

def wait_a_second():
    time.sleep(1)
    return "waited"

options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1])
rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
held = {
    "tensor": rpc.rpc_sync("w0", torch.ones, args=([1 << 20],)),
    "future": rpc.rpc_async("w0", wait_a_second),
    "store": rpc.api._get_current_rpc_agent().store,
}
failing = rpc.rpc_async("w0", wait_a_second, timeout=0.001)
then = failing.then(lambda future: future.value())
ends = []
for way in sys.argv[3:]:
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ends.append((status, time.monotonic() - began))
else:
    for future in (failing, then):
        try:
            future.wait()
        except RuntimeError:
            pass
    assert held["future"].wait() == "waited"
    held["store"].set("a", "b")
    assert held["store"].check(["a"])
    rpc.shutdown()
    print(ends)
    sys.exit()
os.dup2(os.open(f"{sys.argv[2]}/{way}", os.O_CREAT | os.O_WRONLY), 2)
if way == "os._exit":
    os._exit(3)
if way == "raise":
    raise ValueError("planted")
if way == "collect and exit":
    del held, failing, then
    gc.collect()
sys.exit(3)
"""


def test_a_child_ends_by_its_own_status_and_harms_nobody(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # The store's server is a thread of the parent.
    meeting = f"tcp://127.0.0.1:{port}"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", program, meeting, tmp_path, *ENDS]

    result = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (result.returncode, result.stderr) == (0, "")
    ends = ast.literal_eval(result.stdout)
    assert [status for status, _ in ends] == list(ENDS.values())
    # It takes Python a while to take itself and torch apart, on a busy machine.
    assert max(seconds for _, seconds in ends) < LIMIT
    said = {way: (tmp_path / way).read_text() for way in ENDS}
    assert said.pop("raise").splitlines()[-1] == "ValueError: planted"
    assert not any(said.values()), said


# A child that joins.


def join_a_group(name: str, rank: int, init_method: str) -> tuple[str, int, str]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=LIMIT)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    other = rpc.rpc_sync(1 - rank, rpc.get_worker_info)
    total = rpc.rpc_sync(1 - rank, ones, args=(1 << 18,)).sum().item()
    future = rpc.rpc_async(1 - rank, max, args=(1, 2)).then(lambda future: future.value() + 1)
    assert future.wait() == 3
    rpc.shutdown()
    return other.name, int(total), str(rpc.api._is_current_rpc_agent_set())


def have_children_that_join(worker: Worker, folder: str) -> list[Any]:
    """On the store of their parents, then on one of their own; the second child of each has a child too."""
    worker.start()
    peer = f"w{1 - worker.rank}"
    child = fork(
        lambda: join_a_group(f"child of {worker.name}".replace(" ", "-"), worker.rank, worker.init_method)
    )
    assert rpc.rpc_sync(peer, max, args=(1, 2)) == 2
    first = child()
    second = fork(
        lambda: in_child(
            lambda: join_a_group(f"grandchild-{worker.rank}", 1 - worker.rank, f"file://{folder}/other")
        )
    )()
    assert rpc.rpc_sync(peer, max, args=(1, 2)) == 2
    rpc.shutdown()
    return [first, second]


def test_a_child_joins_a_group_under_a_name_of_its_own(group: Group, tmp_path: Path) -> None:
    seen = group.run(have_children_that_join, have_children_that_join, arguments=(str(tmp_path),))

    for rank, (first, second) in enumerate(seen):
        assert first == ((f"child-of-w{1 - rank}", 1 << 18, "False"), 0)
        assert second == ((f"grandchild-{1 - rank}", 1 << 18, "False"), 0)


def join_beside_a_new_process(worker: Worker, folder: str) -> Any:
    """Rank 0 joins alone, and its forked child then joins a process that has never joined before."""
    if worker.rank == 1:
        return join_a_group("new", 1, f"file://{folder}/store")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/alone")
    rpc.init_rpc("parent", rank=0, world_size=1, rpc_backend_options=options)
    said = in_child(lambda: join_a_group("child", 0, f"file://{folder}/store"))
    rpc.shutdown()
    return said


def test_a_child_joins_a_process_that_has_joined_less_often(group: Group, tmp_path: Path) -> None:
    child, new = group.run(join_beside_a_new_process, join_beside_a_new_process, arguments=(str(tmp_path),))

    assert (child[0], new[0]) == ("new", "child")


# A parent that dies.


def die_with_a_child(worker: Worker) -> None:
    worker.start()
    pid = os.fork()
    if pid == 0:
        worker._pipe.close()
        threading.Event().wait(60)
        os._exit(0)
    worker.tell(pid)
    rpc.shutdown()


def miss_the_parent(worker: Worker) -> tuple[str, float]:
    worker.start()
    pending = rpc.rpc_async("w1", time.sleep, args=(60,))
    rpc.rpc_sync("w1", max, args=(1, 2))
    worker.tell("call is under way")
    began = worker.hear()
    with pytest.raises(RuntimeError) as raised:
        pending.wait()
    rpc.shutdown(graceful=False)
    return str(raised.value), time.monotonic() - began


def test_a_killed_worker_is_lost_soon_though_it_has_a_live_child(group: Group) -> None:
    """LOG row 33: pending calls fail within seconds and name the peer."""
    group.start(miss_the_parent, die_with_a_child)
    group.hear(0)
    child = group.hear(1)
    group.kill(1)
    group.tell(0, time.monotonic())

    text, seconds = group.finish(expect_killed=(1,))[0].value

    assert "w1" in text
    assert seconds < LOST
    os.kill(child, 0)  # is there; the harness ends it with its session


# Forking at bad moments.


def fork_beside_threads(worker: Worker) -> list[Any]:
    """Forks again and again while threads of all kinds are in the middle of calls."""
    worker.start(threads=4)
    peer = f"w{1 - worker.rank}"
    over = threading.Event()
    counts = [0] * 4

    def call(place: int) -> None:
        tensor = torch.ones(1 << 16)
        while not over.is_set():
            if place % 2:
                assert rpc.rpc_sync(peer, torch.add, args=(tensor, tensor))[0] == 2
            else:
                futures = [rpc.rpc_async(peer, max, args=(1, 2)) for _ in range(20)]
                assert [future.wait() for future in futures] == [2] * 20
            counts[place] += 1

    threads = [threading.Thread(target=call, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    results = [in_child(partial(live_a_little, number)) for number in range(20)]
    before = list(counts)
    deadline = time.monotonic() + LIMIT
    while not all(map(int.__gt__, counts, before)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(map(int.__gt__, counts, before)), "the parent's threads stand still"
    over.set()
    for thread in threads:
        thread.join(LIMIT)
    rpc.shutdown()
    return results


def live_a_little(number: int) -> tuple[bool, int]:
    """A call in vain, and in every fourth child a life as a worker."""
    text, _ = error_and_seconds(lambda: rpc.rpc_sync("w0", max, args=(1, 2)))
    if number % 4:
        return "forked" in text, 2
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tempfile.mkdtemp()}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    futures = [rpc.rpc_async("alone", max, args=(1, 2)) for _ in range(50)]
    found = {future.wait() for future in futures}
    rpc.shutdown()
    return "forked" in text, found.pop()


def test_forks_while_threads_are_in_calls_harm_neither_side(group: Group) -> None:
    for results in group.run(fork_beside_threads, fork_beside_threads):
        assert results == [(True, 2)] * 20


def fork_inside_a_function(how: str) -> tuple[Any, int]:
    """Called by another worker: forks on the pool thread that runs it."""
    if how == "child works":
        return fork(lambda: live_a_little(0))()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        if how == "child exits":
            sys.exit(4)
        if how == "child raises":
            raise ValueError("planted")
        return "from the child", 0
    return how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def have_functions_fork(worker: Worker) -> list[Any]:
    worker.start()
    ways = ("child works", "child exits", "child raises", "child returns")
    said = [rpc.rpc_sync("w1", fork_inside_a_function, args=(way,), timeout=LIMIT) for way in ways]
    assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2
    rpc.shutdown()
    return said


def test_a_function_that_forks_answers_once_and_its_child_ends(group: Group) -> None:
    said = group.run(have_functions_fork, serve)[0]

    assert said == [((True, 2), 0), ("child exits", 4), ("child raises", 1), ("child returns", 0)]
