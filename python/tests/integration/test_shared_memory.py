"""Large tensors within a host: copied once, into memory that both workers have mapped, and nobody else."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

MIB = 1 << 20
LIMIT = 15.0
"""Seconds in which something has to show."""

kept: list[torch.Tensor] = []


def segments() -> list[tuple[int, int]]:
    """Address ranges of shared memory of ours in this process."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "memfd:tensorcall" in line]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def shared_bytes() -> int:
    return sum(end - start for start, end in segments())


def is_shared(tensor: torch.Tensor) -> bool:
    return any(start <= tensor.data_ptr() < end for start, end in segments())


def shm_files() -> set[str]:
    """Files of shared memory on this host, without those that multiprocessing and torch make for anybody."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "psm_", "torch_"))}


def descriptors() -> list[str]:
    """What this process has open, without what /proc needs for that."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
        except OSError:
            continue
    return sorted(name for name in found if not name.startswith("/proc"))


def eventually(condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit, f"{shared_bytes()} bytes shared"
        time.sleep(0.01)


# The functions that workers call.


def numbers(seed: int, size: int = MIB) -> torch.Tensor:
    """A tensor of `size` bytes that differs with the seed."""
    return torch.arange(size // 4, dtype=torch.int32) * 31 + seed


def look_and_change(tensor: torch.Tensor) -> tuple[bool, int, torch.Tensor]:
    """Whether a tensor lies in shared memory, its sum, and itself, changed in place."""
    total = int(tensor.sum())
    return is_shared(tensor), total, tensor.add_(1)


def keep(tensor: torch.Tensor) -> bool:
    kept.append(tensor)
    return is_shared(tensor)


def take_kept() -> list[bool]:
    """Whether each kept tensor is what it was; they are dropped."""
    right = [bool(torch.equal(tensor, numbers(seed, tensor.nbytes))) for seed, tensor in enumerate(kept)]
    kept.clear()
    gc.collect()
    return right


def warm(peer: str, size: int = MIB) -> None:
    """Sends tensors until they go through shared memory, there and back."""

    def both_ways() -> bool:
        there, _, back = rpc.rpc_sync(peer, look_and_change, args=(numbers(0, size),))
        return there and is_shared(back)

    eventually(both_ways)


# A tensor that arrives is the receiver's.


def send_and_compare(worker: Worker) -> tuple[list[bool], int, int]:
    with worker.joined():
        warm("w1")
        good, there = [], 0
        for seed in range(50):
            sent = numbers(seed)
            shared, total, back = rpc.rpc_sync("w1", look_and_change, args=(sent,))
            there += shared
            good.append(total == int(numbers(seed).sum()))
            good.append(bool(torch.equal(sent, numbers(seed)) and torch.equal(back, sent + 1)))
            kept.append(back)
        # Sent on, and still there after all of that.
        third = rpc.rpc_sync("w1", look_and_change, args=(kept[0],))[2]
        good.append(bool(torch.equal(third, numbers(2))))
        good += [bool(torch.equal(back, numbers(seed + 1))) for seed, back in enumerate(kept)]
        return good, there, sum(map(is_shared, kept))


def test_what_arrives_is_the_receivers_own(group: Group) -> None:
    good, there, back = group.run(send_and_compare, serve)[0]

    assert all(good)
    # A block may still be on its way back, or a further segment on its way here.
    assert there > 25
    assert back > 25


# A receiver that keeps everything.


def fill(worker: Worker, count: int, cap: int) -> tuple[list[bool], int, list[bool]]:
    size = 4 * MIB
    with worker.joined(timeout=60):
        warm("w1", size)
        shared, most = [], 0
        for seed in range(count):
            shared.append(rpc.rpc_sync("w1", keep, args=(numbers(seed, size),)))
            most = max(most, shared_bytes())
        right = rpc.rpc_sync("w1", take_kept)
        warm("w1", size)
    return shared, most, right


def test_a_replay_buffer_neither_stalls_nor_grows_its_sender(group: Group) -> None:
    cap, count = 64 * MIB, 200
    group.environment["TENSORCALL_MAX_SHARED_MEMORY"] = str(cap)

    shared, most, right = group.run(fill, serve, arguments=(count, cap))[0]

    assert right == [True] * count
    assert 0 < sum(shared) <= cap // (4 * MIB)
    # What it lends, and what the echo lent to it.
    assert most <= 2 * cap


# Killed workers.


def outlive_a_victim(files: set[str], before: list[str]) -> set[str]:
    """Waits until nothing of a killed worker is left; returns the files that are, and goes on with `w2`."""
    eventually(lambda: not segments())
    # The victim had connections of its own from the start.
    eventually(lambda: not set(descriptors()) - set(before) and len(descriptors()) <= len(before))
    warm("w2")
    rpc.shutdown()
    return shm_files() - files


def lend_to_a_victim(worker: Worker) -> dict[str, Any]:
    files = shm_files()
    worker.start()
    rpc.rpc_sync("w2", max, args=(1, 2))
    before = descriptors()
    warm("w1")
    for seed in range(8):
        rpc.rpc_sync("w1", keep, args=(numbers(seed),))
    # What it has from the victim outlives it.
    held = rpc.rpc_sync("w1", look_and_change, args=(numbers(5),))[2]
    assert is_shared(held)
    worker.tell("lent")
    worker.hear()
    eventually(lambda: len(segments()) <= 1)
    right = bool(torch.equal(held, numbers(6)))
    held.add_(1)
    right = right and bool(torch.equal(held, numbers(7)))
    del held
    gc.collect()
    return {"right": right, "new files": outlive_a_victim(files, before)}


def test_killed_workers_leave_nothing_on_the_other_side(group: Group) -> None:
    group.start(lend_to_a_victim, serve, serve)
    assert group.hear(0) == "lent"
    group.kill(1)
    group.tell(0, "killed")

    seen = group.finish(expect_killed=(1,))[0].value

    assert seen == {"right": True, "new files": set()}


def lend_until_killed(worker: Worker) -> None:
    worker.start()
    worker.hear()
    warm("w0")
    for seed in range(8):
        rpc.rpc_sync("w0", keep, args=(numbers(seed),))
    # The survivor has lent something, too.
    held = [rpc.rpc_sync("w0", look_and_change, args=(numbers(seed),))[2] for seed in range(4)]
    assert any(is_shared(tensor) for tensor in held)
    worker.tell("lent")
    worker.hear()


def hold_from_a_victim(worker: Worker) -> dict[str, Any]:
    files = shm_files()
    worker.start()
    rpc.rpc_sync("w2", max, args=(1, 2))
    before = descriptors()
    worker.tell("ready")
    worker.hear()
    victims = {place for tensor in kept for place in segments() if place[0] <= tensor.data_ptr() < place[1]}
    assert victims
    # It has lent to the victim as well.
    assert set(segments()) - victims
    worker.tell("seen")
    worker.hear()
    eventually(lambda: set(segments()) <= victims)
    assert set(segments()) == victims
    # Writable still.
    kept[0].zero_()
    kept[0] += numbers(0)
    right = take_kept()
    return {"right": right, "new files": outlive_a_victim(files, before)}


def test_what_a_killed_worker_had_lent_outlives_it(group: Group) -> None:
    group.start(hold_from_a_victim, lend_until_killed, serve)
    assert group.hear(0) == "ready"
    group.tell(1, "go")
    assert group.hear(1) == "lent"
    group.tell(0, "lent")
    assert group.hear(0) == "seen"
    group.kill(1)
    group.tell(0, "killed")

    seen = group.finish(expect_killed=(1,))[0].value

    assert seen == {"right": [True] * 8, "new files": set()}


# A worker that is out of descriptors.


def take_no_more_descriptors() -> None:
    """From now on this process gets no descriptor."""
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def change(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    return int(tensor.sum()), tensor.add_(1)


def send_to_the_poor(worker: Worker) -> tuple[list[bool], bool]:
    with worker.joined():
        # Now there are all connections, and a segment for each direction.
        warm("w1")
        rpc.rpc_sync("w1", take_no_more_descriptors)
        right = []
        for _ in range(4):
            for size in (3 * MIB, 5 * MIB, 7 * MIB, MIB):
                total, back = rpc.rpc_sync("w1", change, args=(numbers(0, size),))
                right.append(total == int(numbers(0, size).sum()))
                right.append(bool(torch.equal(back, numbers(1, size))))
        return right, is_shared(back)


def test_who_can_take_no_descriptor_gets_large_tensors_all_the_same(group: Group) -> None:
    right, shared = group.run(send_to_the_poor, serve)[0]

    assert all(right)
    # By what was there before.
    assert shared


# The end of a tensor, wherever that is.


def outlive(worker: Worker) -> list[bool]:
    worker.start()
    warm("w1")
    held = [rpc.rpc_sync("w1", look_and_change, args=(numbers(seed),))[2] for seed in range(4)]
    good = [is_shared(tensor) for tensor in held]
    other = threading.Thread(target=held.pop)
    other.start()
    other.join()
    rpc.shutdown()
    good += [bool(torch.equal(tensor, numbers(seed + 1))) for seed, tensor in enumerate(held)]
    last = threading.Thread(target=held.clear)
    last.start()
    last.join()
    gc.collect()
    return [*good, not segments()]


def test_a_tensor_may_end_on_any_thread_and_after_shutdown(group: Group) -> None:
    assert all(group.run(outlive, serve)[0])


# Forked children.


def fork_with_tensors(worker: Worker) -> dict[str, Any]:
    worker.start()
    warm("w1")
    held = [rpc.rpc_sync("w1", look_and_change, args=(numbers(seed),))[2] for seed in range(3)]
    assert all(is_shared(tensor) for tensor in held)
    to_child, from_child = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(to_child[1])
        held[0].zero_()
        os.read(to_child[0], 1)
        right = [bool(torch.equal(held[seed], numbers(seed + 1))) for seed in (1, 2)]
        said = {"right": right, "zeroed": int(held[0].abs().sum()) == 0}
        held.clear()
        gc.collect()
        os.write(from_child[1], pickle.dumps(said))
        os._exit(0)
    os.close(to_child[0])
    os.close(from_child[1])
    seen: dict[str, Any] = {"mine": bool(torch.equal(held[0], numbers(1)))}
    held.clear()
    gc.collect()
    # The blocks are free, and new tensors come.
    for seed in range(100, 150):
        back = rpc.rpc_sync("w1", look_and_change, args=(numbers(seed),))[2]
        assert torch.equal(back, numbers(seed + 1))
    os.write(to_child[1], b"x")
    with os.fdopen(from_child[0], "rb") as pipe:
        seen["child"] = pickle.loads(pipe.read())
    seen["status"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    warm("w1")
    rpc.shutdown()
    return seen


def test_a_forked_child_keeps_its_tensors_and_gives_nothing_back(group: Group) -> None:
    seen = group.run(fork_with_tensors, serve)[0]

    assert seen == {"mine": True, "child": {"right": [True, True], "zeroed": True}, "status": 0}
