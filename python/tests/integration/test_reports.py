"""What users of tensor RPC reported and no other file tests; `unit/test_log_coverage.py` lists all."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

MIB = 1 << 20

hold = threading.Event()
started = threading.Semaphore(0)


def identity(value: Any) -> Any:
    return value


def block(seconds: float = 20) -> str:
    started.release()
    hold.wait(seconds)
    return "done"


def let_go() -> None:
    hold.set()


def await_started(count: int) -> None:
    for _ in range(count):
        assert started.acquire(timeout=20)


def work_on(seconds: float) -> str:
    time.sleep(seconds)
    return "finished"


def leave_early(worker: Worker) -> Any:
    worker.start()
    future = rpc.rpc_async("w1", work_on, (6.0,))
    rpc.shutdown()
    return future.value()


@pytest.mark.slow
def test_graceful_shutdown_waits_for_work_as_long_as_it_takes(group: Group) -> None:
    """LOG row 2: longer than the five seconds that others had built in."""
    assert group.run(leave_early, serve)[0] == "finished"


def storm_and_leave(worker: Worker, moments: list[float]) -> int:
    other = f"w{1 - worker.rank}"
    tensor = torch.ones(1 << 16)
    for life, moment in enumerate(moments):
        worker.init_method = worker.init_method.rpartition("/life")[0] + f"/life-{life}"
        worker.start()
        end = time.monotonic() + moment * (1 + worker.rank)
        futures = []
        while time.monotonic() < end:
            futures.append(rpc.rpc_async(other, identity, (tensor,)))
            futures.append(rpc.rpc_async(other, identity, (len(futures),)).then(lambda done: done.wait()))
        rpc.shutdown(graceful=False)
        for future in futures:
            with suppress(RuntimeError):
                future.wait()
        worker.tell(life)
        worker.hear()
    return len(moments)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_leaving_at_any_moment_of_a_storm_crashes_nobody(group: Group, tmp_path: Any) -> None:
    """LOG row 6: two workers leave without grace, one earlier than the other, with calls both ways."""
    group.deadline = time.monotonic() + 100
    chance = random.Random(6)
    moments = [chance.choice([0, 0.001, 0.01, 0.05]) * chance.random() * 4 for _ in range(15)]
    for rank in range(2):
        group.add(storm_and_leave_in_files, rank, 2, (str(tmp_path), moments))
    for life in range(len(moments)):
        assert [group.hear(index) for index in range(2)] == [life, life]
        for index in range(2):
            group.tell(index, "next")

    assert [outcome.value for outcome in group.finish()] == [15, 15]


def storm_and_leave_in_files(worker: Worker, folder: str, moments: list[float]) -> int:
    worker.init_method = f"file://{folder}/life"
    return storm_and_leave(worker, moments)


class Pipeline:
    """A user of the agent: a thread that keeps two calls under way, until this object goes."""

    def __init__(self, to: str) -> None:
        self.results: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=run_pipeline, args=(to, self._stop, self.results))
        self._thread.start()

    def __del__(self) -> None:
        self._stop.set()
        self._thread.join()


def run_pipeline(to: str, stop: threading.Event, results: list[int]) -> None:
    while not stop.is_set():
        pair = [rpc.rpc_async(to, identity, (len(results),)) for _ in range(2)]
        results += torch.futures.wait_all(pair)


def run_pipelines(worker: Worker) -> bool:
    with worker.joined(threads=1):
        pipelines = [Pipeline("w1") for _ in range(2)]
        while not all(len(pipeline.results) > 5 for pipeline in pipelines):
            time.sleep(0.001)
        del pipelines[0]
        gc.collect()
        seen = len(pipelines[0].results)
        while len(pipelines[0].results) < seen + 5:
            time.sleep(0.001)
        pipelines.clear()
    return True


def test_one_of_two_pipelines_can_be_torn_down_alone(group: Group) -> None:
    """LOG row 7: also by a destructor."""
    assert group.run(run_pipelines, serve)[0]


def be_left(worker: Worker) -> list[str]:
    worker.start()
    rpc.rpc_sync("w0", identity, (1,))
    worker.tell("connected")
    worker.hear()
    said = []
    for wait in (lambda: rpc.rpc_sync("w0", identity, (1,)), rpc.rpc_async("w0", identity, (1,)).wait):
        with pytest.raises(RuntimeError) as raised:
            wait()
        said.append(str(raised.value))
    rpc.shutdown()
    return said


def leave_first(worker: Worker) -> None:
    worker.start()
    worker.hear()
    rpc.shutdown(graceful=False)
    worker.tell("left")


def test_who_stays_is_told_that_the_other_has_left(group: Group) -> None:
    """LOG row 10: an early leaver is a clean error, and leaving oneself still works."""
    group.start(leave_first, be_left)
    group.hear(1)
    group.tell(0, "leave")
    group.hear(0)
    group.tell(1, "go on")

    for said in group.finish()[1].value:
        assert "worker 'w0' (rank 0) has shut down and left the group" in said


def call_everybody(worker: Worker) -> list[int]:
    if worker.rank == 2:
        worker.hear()
    worker.start(threads=1, timeout=10)
    got = [rpc.rpc_sync(f"w{rank}", identity, (rank,), timeout=5) for rank in range(worker.world_size)]
    rpc.shutdown()
    return got


def test_when_init_returns_everybody_can_be_called(group: Group) -> None:
    """LOG rows 13 and 18: also those who came late, with limits that are short for a start."""
    group.start(*[call_everybody] * 4)
    time.sleep(2)  # so that it is late; nothing depends on how long
    group.tell(2, "come")

    assert [outcome.value for outcome in group.finish()] == [[0, 1, 2, 3]] * 4


def use_one_address_for_both(worker: Worker) -> tuple[float, int]:
    port = worker.init_method.rpartition(":")[2]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(worker.rank))
    dist.init_process_group("gloo")
    rpc.init_rpc(worker.name, rank=worker.rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    got = rpc.rpc_sync(f"w{1 - worker.rank}", identity, (5,))
    rpc.shutdown()
    dist.destroy_process_group()
    return total.item(), got


def test_a_process_group_and_rpc_meet_at_one_address(group: Group) -> None:
    """LOG row 43: as under torchrun, where both take the address from the environment."""
    assert group.run(use_one_address_for_both, use_one_address_for_both) == [(2, 5), (2, 5)]


def call_the_next(worker: Worker) -> int:
    with worker.joined(threads=1):
        return int(rpc.rpc_sync((worker.rank + 1) % worker.world_size, identity, (worker.rank,)))


@pytest.mark.slow
def test_two_dozen_workers_of_one_thread_each_meet_and_leave(group: Group) -> None:
    """LOG rows 46 and 52: how many there are does not depend on how many threads one has."""
    group.deadline = time.monotonic() + 50

    assert group.run(*[call_the_next] * 24) == list(range(24))


def threads_here() -> int:
    return len(os.listdir("/proc/self/task"))


def send_many(worker: Worker) -> tuple[int, int]:
    with worker.joined(threads=4):
        before = rpc.rpc_sync("w1", threads_here)
        waiting = [rpc.rpc_async("w1", block) for _ in range(200)]
        rpc.rpc_sync("w2", identity, (1,))
        worker.tell("all sent")
        worker.hear()
        torch.futures.wait_all(waiting)
    return before, len(waiting)


def serve_few(worker: Worker) -> int:
    with worker.joined(threads=4):
        if worker.rank == 1:
            await_started(4)
            worker.hear()
            count = threads_here()
            worker.tell("counted")
            let_go()
            return count
    return 0


def test_two_hundred_calls_at_once_run_on_the_few_threads_there_are(group: Group) -> None:
    """LOG row 63: what a worker needs does not grow with the calls that wait for it."""
    group.start(send_many, serve_few, serve_few)
    group.hear(0)
    group.tell(1, "count")
    group.hear(1)
    group.tell(0, "go on")

    outcomes = group.finish()

    before, _ = outcomes[0].value
    assert outcomes[1].value <= before + 4


def peak() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def receive_much(worker: Worker) -> tuple[int, bool]:
    with worker.joined():
        rpc.rpc_sync("w1", torch.ones, ((1,),))
        ctypes.CDLL(None).malloc_trim(0)
        forget_peak()
        before = peak()
        got = rpc.rpc_sync("w1", torch.ones, ((32 * MIB,),), timeout=30)
        needed = peak() - before
        return needed, bool((got[:: MIB // 4] == 1).all())


def test_a_large_result_is_received_into_its_final_memory(group: Group) -> None:
    """LOG row 65: 128 MiB need 128 MiB."""
    needed, is_right = group.run(receive_much, serve)[0]

    assert is_right
    assert needed < 150 * MIB


def send_a_hidden_view(worker: Worker) -> list[int]:
    whole = torch.arange(MIB)
    with worker.joined():
        got = [
            rpc.rpc_sync("w1", identity, ({"deep": [Holder(whole[5:8])]},))["deep"][0].tensor,
            rpc.rpc_sync("w1", identity, (whole[: MIB - 8],)),
        ]
        assert got[0].tolist() == [5, 6, 7]
    return [tensor.untyped_storage().nbytes() for tensor in got]


class Holder:
    """An object that only pickle can send."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_view_inside_an_object_travels_without_its_storage(group: Group) -> None:
    """LOG rows 69 and 71: nor does a view of nearly everything bring the rest along."""
    small, large = group.run(send_a_hidden_view, serve)[0]

    assert small <= 64
    assert large <= 8 * (MIB - 8) + 64


def count_while_waiting(worker: Worker) -> list[int]:
    counts = []
    with worker.joined():
        for wait in (
            lambda: rpc.rpc_async("w1", block, (0.3,)).wait(),
            lambda: rpc.rpc_async("w1", block, (0.3,)).then(lambda done: done.wait()).wait(),
            lambda: torch.futures.wait_all([rpc.rpc_async("w1", block, (0.3,))]),
            lambda: rpc.rpc_sync("w1", block, (0.3,)),
        ):
            counts.append(turns_during(wait))
    return counts


def turns_during(wait: Callable[[], Any]) -> int:
    """How often another thread got its turn while this one waited."""
    turns, stop = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not stop.wait(0.001):
            turns += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        wait()
    finally:
        stop.set()
        thread.join()
    return turns


def test_other_threads_run_during_every_wait(group: Group) -> None:
    """LOG row 87: the interpreter is free while one of its threads waits for another worker."""
    for turns in group.run(count_while_waiting, serve)[0]:
        assert turns > 20


def be_idle(worker: Worker) -> tuple[float, float]:
    worker.start()
    rpc.rpc_sync(f"w{1 - worker.rank}", identity, (1,))
    worker.tell("connected")
    before = time.process_time()
    worker.hear()
    used = time.process_time() - before
    began = time.monotonic()
    rpc.rpc_sync(f"w{1 - worker.rank}", identity, (1,))
    seconds = time.monotonic() - began
    rpc.shutdown()
    return used, seconds


def test_idle_workers_use_no_processor_and_are_awake_at_once(group: Group) -> None:
    """LOG rows 14 and 89: connected and idle is healthy, and costs nothing."""
    group.environment["TENSORCALL_SILENCE_LIMIT"] = "1"
    group.start(be_idle, be_idle)
    for index in range(2):
        group.hear(index)
    time.sleep(2.5)  # the time over which it is measured, longer than the limit
    for index in range(2):
        group.tell(index, "enough")

    for outcome in group.finish():
        used, seconds = outcome.value
        assert used < 0.1
        assert seconds < 2
