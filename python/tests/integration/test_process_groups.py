"""Workers whose messages travel through a process group."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from harness import ENGINE_VARIABLE, Group, Worker
from sockets import listening

pytestmark = pytest.mark.skipif(
    os.environ.get(ENGINE_VARIABLE, "tensorcall") != "tensorcall", reason="torch has no such backend any more"
)

WAYS = {
    "unix sockets": {},
    "tcp": {"TENSORCALL_TCP_ONLY": "1"},
    "process group": {"TENSORCALL_BACKEND": "process_group"},
}
"""The ways for messages between workers, and how the environment chooses them."""


def start(worker: Worker, **options: Any) -> None:
    """Joins on a group; without a given one, or a default one, at the init method."""
    options = {"init_method": worker.init_method, "rpc_timeout": 20} | options
    rpc.init_rpc(
        worker.name,
        backend=rpc.BackendType.PROCESS_GROUP,
        rank=worker.rank,
        world_size=worker.world_size,
        rpc_backend_options=rpc.ProcessGroupRpcBackendOptions(**options),
    )


@contextmanager
def joined(worker: Worker, **options: Any) -> Any:
    start(worker, **options)
    yield
    rpc.shutdown()


@contextmanager
def users_group(worker: Worker, backend: str = "gloo") -> Any:
    """A group of the user's own."""
    host, _, port = worker.init_method.removeprefix("tcp://").partition(":")
    store = dist.TCPStore(host, int(port), worker.world_size, worker.rank == 0)
    dist.init_process_group(backend, store=store, rank=worker.rank, world_size=worker.world_size)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def serve(worker: Worker, *_: Any) -> None:
    with joined(worker):
        pass


def serve_on_users_group(worker: Worker, *_: Any) -> None:
    with users_group(worker), joined(worker):
        pass


def kind() -> str:
    return type(rpc.api._get_current_rpc_agent()).__name__


def nested(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, torch.add, args=(x, 1))


def fails() -> None:
    raise ValueError("as it was")


def calls(worker: Worker) -> None:
    with joined(worker):
        agent = rpc.api._get_current_rpc_agent()
        assert [rpc.get_worker_info(f"w{rank}").id for rank in range(3)] == [0, 1, 2]
        assert [agent.get_worker_info(rank).name for rank in range(3)] == ["w0", "w1", "w2"]
        assert rpc.get_worker_info().name == worker.name
        small, large = torch.arange(3), torch.arange(4 << 20)
        for other in ("w0", "w1", "w2"):
            assert rpc.rpc_sync(other, kind) == "ProcessGroupAgent"
            assert torch.equal(rpc.rpc_sync(other, torch.add, args=(small, 1)), small + 1)
            assert torch.equal(rpc.rpc_sync(other, torch.add, args=(large, 1)), large + 1)
            assert torch.equal(rpc.rpc_sync(other, nested, args=(worker.name, small)), small + 1)
            assert torch.equal(rpc.remote(other, torch.add, args=(small, 2)).to_here(), small + 2)
            with pytest.raises(ValueError, match="as it was"):
                rpc.rpc_sync(other, fails)


def test_calls_of_all_kinds_reach_all_workers_the_caller_included(group: Group) -> None:
    group.run(calls, calls, calls)


def alone(worker: Worker, folder: str) -> tuple[list[str], int]:
    with joined(worker, init_method=f"file://{folder}/store"):
        assert rpc.rpc_sync("w0", nested, args=("w0", torch.ones(2))).tolist() == [2, 2]
        return listening(), len(rpc.api._get_current_rpc_agent().get_worker_infos())


def test_a_group_of_one_worker_works_and_listens_nowhere(group: Group, tmp_path: Path) -> None:
    assert group.run(alone, arguments=(str(tmp_path),)) == [([], 1)]


def listens(worker: Worker) -> tuple[int, int]:
    """How many sockets a group of the user's own makes this process listen at, and joining after that."""
    before = len(listening())
    with users_group(worker):
        dist.barrier()  # gloo's listener is there by now
        users = len(listening())
        with joined(worker):
            return users - before, len(listening()) - users


def test_a_worker_listens_at_no_socket_but_that_of_its_gloo_group(group: Group) -> None:
    on_rank_0, on_rank_1 = group.run(listens, listens)

    assert on_rank_1 == (1, 1)
    assert on_rank_0 == (2, 1)  # this one has the store of the user's group


def given(worker: Worker) -> list[Any]:
    """w1 and w3 form a group of the user's own, in which they have other ranks; the others one too."""
    with users_group(worker):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = groups[worker.rank % 2]
        options = rpc.ProcessGroupRpcBackendOptions(process_group=mine, rpc_timeout=20)
        rpc.init_rpc(worker.name, rpc_backend_options=options, backend=rpc.BackendType.PROCESS_GROUP)
        infos = [(info.name, info.id) for info in rpc.api._get_current_rpc_agent().get_worker_infos()]
        other = f"w{(worker.rank + 2) % 4}"
        got = rpc.rpc_sync(other, torch.add, args=(torch.ones(2), 1)).tolist()
        rpc.shutdown()
        return [infos, got]


def test_a_group_that_is_given_says_who_the_workers_are(group: Group) -> None:
    even, odd = [("w0", 0), ("w2", 1)], [("w1", 0), ("w3", 1)]

    assert group.run(given, given, given, given) == [[even, [2, 2]], [odd, [2, 2]]] * 2


def silent(worker: Worker) -> list[list[float]]:
    """The user's groups deliver nothing to anybody: whatever were sent on one would never arrive."""
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg is not None  # its import is what registers the backend
    got = []
    with users_group(worker, "fake"):
        for given in (None, dist.new_group(backend="fake")):
            with joined(worker, process_group=given):
                got.append(rpc.rpc_sync(f"w{1 - worker.rank}", torch.add, args=(torch.ones(2), 1)).tolist())
    return got


def test_no_message_of_ours_travels_on_the_users_group(group: Group) -> None:
    assert group.run(silent, silent) == [[[2, 2], [2, 2]]] * 2


def destroys(worker: Worker) -> float:
    with users_group(worker):
        start(worker)
        dist.barrier()
        dist.destroy_process_group()
        other = f"w{1 - worker.rank}"
        got = rpc.rpc_sync(other, torch.add, args=(torch.ones(1 << 20), 1))
        rpc.shutdown()
        return float(got.sum()) / (1 << 20)


def test_calls_go_on_when_the_users_group_is_destroyed_first(group: Group) -> None:
    assert group.run(destroys, destroys) == [2, 2]


def collective(worker: Worker) -> bool:
    """An `all_reduce` loop of the user beside 64 calls in flight."""
    with users_group(worker), joined(worker):
        over = threading.Event()
        wrong = []

        def reduce() -> None:
            for number in range(100):
                tensor = torch.full((1000,), float(worker.rank + number))
                dist.all_reduce(tensor)
                if not bool((tensor == 1 + 2 * number).all()):
                    wrong.append(number)
            over.set()

        thread = threading.Thread(target=reduce)
        thread.start()
        other, x = f"w{1 - worker.rank}", torch.ones(1000)
        while not over.is_set():
            futures = [rpc.rpc_async(other, torch.add, args=(x, number)) for number in range(64)]
            for number, future in enumerate(futures):
                assert bool((future.wait() == 1 + number).all())
        thread.join()
        return not wrong


def test_collectives_of_the_user_run_beside_64_calls_in_flight(group: Group) -> None:
    assert group.run(collective, collective) == [True, True]


def trains(worker: Worker) -> tuple[list[float], int]:
    """DistributedDataParallel, while a thread calls the other worker all the time."""
    with users_group(worker), joined(worker):
        over, calls = threading.Event(), [0]

        def call() -> None:
            while not over.is_set():
                x = torch.randn(500)
                assert torch.equal(rpc.rpc_sync(f"w{1 - worker.rank}", torch.neg, args=(x,)), -x)
                calls[0] += 1

        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(40, 4, 3)[worker.rank :: 2]
        thread = threading.Thread(target=call)
        thread.start()
        for batch in data:
            optimizer.zero_grad()
            (model(batch) - batch @ torch.tensor([[2.0], [-1.0], [0.5]])).pow(2).mean().backward()
            optimizer.step()
        over.set()
        thread.join()
        return model.module.weight.flatten().tolist(), calls[0]


def test_distributed_data_parallel_trains_beside_calls(group: Group) -> None:
    (first, its_calls), (second, other_calls) = group.run(trains, trains)

    assert first == second
    assert its_calls > 0
    assert other_calls > 0


def lives(worker: Worker) -> list[float]:
    got = []
    with users_group(worker):
        for life in range(3):
            with joined(worker):
                got.append(rpc.rpc_sync(f"w{1 - worker.rank}", torch.add, args=(torch.zeros(1), life)).item())
    return got


def test_workers_join_again_after_they_left(group: Group) -> None:
    assert group.run(lives, lives) == [[0, 1, 2]] * 2


def unmodified(worker: Worker) -> str:
    with worker.joined():  # with TensorPipe's options
        return rpc.rpc_sync(f"w{1 - worker.rank}", kind)


def test_a_program_that_names_no_backend_runs_on_a_group_if_the_environment_says_so(group: Group) -> None:
    group.environment["TENSORCALL_BACKEND"] = "process_group"

    assert group.run(unmodified, unmodified) == ["ProcessGroupAgent"] * 2


def survivor(worker: Worker) -> None:
    start(worker)
    future = rpc.rpc_async("w1", time.sleep, args=(100,), timeout=0)
    worker.tell("under way")
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        future.wait()
    worker.tell((str(raised.value), time.monotonic() - begun))
    assert rpc.rpc_sync("w2", torch.add, args=(torch.ones(1), 1)).item() == 2  # others are unharmed
    worker.tell("done")
    rpc.shutdown(graceful=False)


def victim(worker: Worker) -> None:
    start(worker)
    threading.Event().wait()


def bystander(worker: Worker) -> None:
    start(worker)
    worker.hear()
    rpc.shutdown(graceful=False)


def test_the_loss_of_a_rank_is_told_by_its_name(group: Group) -> None:
    group.start(survivor, victim, bystander)
    assert group.hear(0) == "under way"
    group.kill(1)
    text, took = group.hear(0)
    assert group.hear(0) == "done"
    group.tell(2, "end")
    group.finish(expect_killed=(1,))

    assert "w1" in text
    assert took < 5


def leaver(worker: Worker) -> None:
    start(worker)
    rpc.rpc_sync("w1", torch.add, args=(torch.ones(1), 1))
    worker.tell("called")
    worker.hear()
    begun = time.monotonic()
    rpc.shutdown(graceful=False)
    worker.tell(time.monotonic() - begun)


def stopped(worker: Worker) -> None:
    start(worker)
    worker.hear()
    rpc.shutdown(graceful=False)


def test_leaving_takes_a_moment_although_the_other_rank_says_nothing(group: Group) -> None:
    group.start(leaver, stopped)
    assert group.hear(0) == "called"
    os.kill(group.pid(1), signal.SIGSTOP)
    group.tell(0, "leave")
    took = group.hear(0)
    os.kill(group.pid(1), signal.SIGCONT)
    group.tell(1, "leave")
    group.finish()

    assert took < 5


count = 0


def nest_here(hops: int) -> None:
    global count
    time.sleep(0.02)
    count += 1
    if hops:
        other = "w1" if rpc.get_worker_info().name == "w0" else "w0"
        rpc.rpc_async(other, nest_here, args=(hops - 1,))  # nobody waits for it


def syncs(worker: Worker) -> list[int]:
    seen = []
    with worker.joined():
        agent = rpc.api._get_current_rpc_agent()
        for wait in (agent.sync, agent.join):
            if worker.rank == 0:
                rpc.rpc_async("w1", nest_here, args=(9,))
            wait()
            seen.append(count)
    return seen


@pytest.mark.parametrize("variables", WAYS.values(), ids=WAYS)
def test_sync_and_join_return_when_nested_messages_of_the_whole_job_are_processed(
    group: Group, variables: dict[str, str]
) -> None:
    group.environment |= variables

    assert group.run(syncs, syncs) == [[5, 10]] * 2


def same_name(worker: Worker) -> tuple[str, bool]:
    with users_group(worker):
        options = rpc.ProcessGroupRpcBackendOptions(rpc_timeout=20)
        with pytest.raises(RuntimeError) as raised:
            rpc.init_rpc("same", backend=rpc.BackendType.PROCESS_GROUP, rpc_backend_options=options)
        return str(raised.value), rpc.api._is_current_rpc_agent_set()


def test_names_are_unique_in_the_group(group: Group) -> None:
    for text, agent_is_set in group.run(same_name, same_name):
        assert text == "RPC worker name same is not unique. Workers 1 and 0 share the same name."
        assert not agent_is_set


def bad_name(worker: Worker) -> str:
    with users_group(worker):
        options = rpc.ProcessGroupRpcBackendOptions(rpc_timeout=20)
        with pytest.raises((RuntimeError, ValueError)) as raised:
            name = "no name" if worker.rank else "w0"
            rpc.init_rpc(name, backend=rpc.BackendType.PROCESS_GROUP, rpc_backend_options=options)
        return str(raised.value)


def test_a_worker_that_cannot_join_says_so_to_all(group: Group) -> None:
    first, second = group.run(bad_name, bad_name)

    assert first.startswith("worker 'no name' (rank 1) cannot join: ")
    assert first.endswith(second)


def waits(worker: Worker) -> tuple[str, float]:
    begun = time.monotonic()
    worker.world_size = 3
    with pytest.raises(RuntimeError) as raised:
        start(worker, rpc_timeout=1)
    return str(raised.value), time.monotonic() - begun


def test_a_worker_that_does_not_come_is_named(group: Group) -> None:
    for text, took in group.run(waits, waits):
        assert "missing rank(s) [2] of world size 3" in text
        assert took < 15


def test_a_process_group_has_a_fixed_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    import tensorcall.rpc as ours

    options = ours.ProcessGroupRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    with pytest.raises(RuntimeError, match="a process group are known from the start"):
        ours.init_rpc("w0", rank=0, backend=ours.BackendType.PROCESS_GROUP, rpc_backend_options=options)
