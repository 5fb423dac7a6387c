"""References among several workers: passed on, given back, and what becomes of them when a worker goes."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve
from torch.distributed.rpc import RRef, api, internal

SOON = 20.0

kept: list[Any] = []
"""What this worker was told to keep."""


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def keep(rref: Any) -> None:
    kept.append(rref)


def drop() -> None:
    kept.clear()
    gc.collect()


def figures() -> dict[str, int]:
    return {name: int(count) for name, count in rpc._rref_context_get_debug_info().items()}


def add(x: Any, y: Any) -> Any:
    return x + y


def value_of(rref: Any) -> Any:
    return rref.to_here()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def confirmed(rrefs: Any) -> bool:
    return all(rref.confirmed_by_owner() for rref in rrefs)


def share_and_drop(worker: Worker) -> Any:
    with worker.joined():
        mine = RRef(torch.ones(3))
        for to in ("w1", "w2"):
            rpc.rpc_sync(to, keep, args=(mine,))
        eventually(lambda: figures()["num_forks"] == 2)
        owners = figures()["num_owner_rrefs"]
        for to in ("w1", "w2"):
            rpc.rpc_sync(to, drop)
        eventually(lambda: figures()["num_forks"] == 0)
        theirs = [rpc.remote("w1", add, args=(i, i)) for i in range(5)]
        seen = rpc.rpc_sync("w2", confirmed, args=(theirs,))
        sums = [rpc.rpc_sync("w2", value_of, args=(rref,)) for rref in theirs]
        del theirs
        eventually(lambda: rpc.rpc_sync("w1", figures)["num_owner_rrefs"] == 0)
        return owners, figures()["num_owner_rrefs"], seen, sums


def test_an_owner_counts_what_others_have(group: Group) -> None:
    found = group.run(share_and_drop, serve, serve)[0]

    assert found == (1, 0, True, [0, 2, 4, 6, 8])


def leave_with_references(worker: Worker) -> list[str]:
    api._ignore_rref_leak = False
    worker.start()
    rref = rpc.remote("w1", add, args=(1, 1))
    rpc.rpc_sync("w2", keep, args=(rref,))
    rpc.rpc_sync("w1", keep, args=(RRef([5]),))
    rpc.shutdown()
    texts = []
    for use in (rref.to_here, lambda: internal.serialize(rref)):
        with pytest.raises(RuntimeError) as raised:
            use()
        texts.append(str(raised.value))
    return [*texts, rref.owner_name()]


def serve_strictly(worker: Worker) -> None:
    api._ignore_rref_leak = False
    with worker.joined():
        pass


def test_shutdown_gives_back_what_is_still_in_use(group: Group) -> None:
    """LOG rows 9 and 79."""
    to_here, fork, owner = group.run(leave_with_references, serve_strictly, serve_strictly)[0]

    assert "has been deleted. Cannot call to_here() on it after deletion." in to_here
    assert "has been deleted. Cannot call fork an UserRRef after deletion." in fork
    assert owner == "w1"


def leak(worker: Worker) -> str:
    """Leaves without giving back what it has, which the owner notices."""
    worker.start()
    api._delete_all_user_and_unforked_owner_rrefs = lambda: None  # type: ignore[assignment]
    if worker.rank == 0:
        kept.append(rpc.remote("w1", add, args=(1, 1)))
        kept[0].to_here()
        rpc.rpc_sync("w1", keep, args=(RRef("mine"),))
    api._ignore_rref_leak = False
    try:
        rpc.shutdown()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_leak_is_reported_with_the_place_where_it_was_made(group: Group) -> None:
    first, second = group.run(leak, leak)

    assert "Leaking RRef GloballyUniqueId(created_on=0, local_id=" in first
    assert "which worker 'w1' has, made at " in first
    assert "test_rrefs.py:" in first
    assert "Leaking RRef GloballyUniqueId(created_on=0, local_id=0) with fork Id" in second
    assert "which worker 'w0' has" in second


def outlive_an_owner(worker: Worker) -> list[str]:
    worker.start()
    rref = rpc.remote("w1", add, args=(1, 1))
    rref.to_here()
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("w1", die)
    eventually(lambda: 1 in api._get_current_rpc_agent().lost_workers())
    late = rpc.remote("w1", add, args=(1, 1))
    texts = []
    for use in (
        rref.to_here,
        rref.rpc_sync().bit_length,
        late.to_here,
        lambda: rpc.rpc_sync("w0", keep, args=(late,)),
    ):
        began = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            use()
        assert time.monotonic() - began < 5
        texts.append(str(raised.value))
    rpc.shutdown()
    return texts


def test_a_lost_owner_fails_its_references_at_once(group: Group) -> None:
    group.start(outlive_an_owner, serve)

    of_value, of_method, of_creation, of_sharing = group.finish(expect_killed=(1,))[0].value

    for text in (of_value, of_method):
        assert "its owner, worker 'w1' (rank 1), is lost" in text
    assert "RRef creation" in of_creation
    assert "RRef creation" in of_sharing


def outlive_a_holder(worker: Worker) -> tuple[int, int]:
    worker.start()
    mine = RRef(torch.ones(2))
    rpc.rpc_sync("w1", keep, args=(mine,))
    eventually(lambda: figures()["num_forks"] == 1)
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("w1", die)
    eventually(lambda: figures()["num_forks"] == 0)
    rpc.shutdown()
    return figures()["num_owner_rrefs"], figures()["num_forks"]


def test_what_a_lost_worker_had_is_given_back(group: Group) -> None:
    group.start(outlive_a_holder, serve)

    assert group.finish(expect_killed=(1,))[0].value == (0, 0)


def live_twice(worker: Worker) -> list[str]:
    worker.start()
    rref = rpc.remote("w1", add, args=(1, 1))
    assert rref.to_here() == 2
    rpc.shutdown()
    worker.start(name=f"again{worker.rank}")
    fresh = rpc.remote("again1", add, args=(2, 2))
    texts = [str(fresh.to_here())]
    with pytest.raises(RuntimeError) as raised:
        rref.to_here()
    texts.append(str(raised.value))
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync("again1", value_of, args=(rref,))
    texts.append(str(raised.value))
    rpc.shutdown()
    return texts


def serve_twice(worker: Worker) -> None:
    with worker.joined():
        pass
    with worker.joined(name=f"again{worker.rank}"):
        pass


def test_references_of_an_earlier_life_are_of_no_use(group: Group) -> None:
    fresh, to_here, fork = group.run(live_twice, serve_twice)[0]

    assert fresh == "4"
    assert "has been deleted" in to_here
    assert "has been deleted" in fork


def churn(worker: Worker) -> tuple[int, int]:
    """Makes, passes on and drops many references."""
    with worker.joined():
        for _ in range(20):
            rrefs = [rpc.remote("w1", add, args=(i, i)) for i in range(50)]
            mine = [RRef(i) for i in range(50)]
            assert rpc.rpc_sync("w2", confirmed, args=(rrefs + mine,))
            assert rpc.rpc_async("w2", value_of, args=(rrefs[7],)).wait() == 14
            del rrefs, mine
        eventually(lambda: figures()["num_owner_rrefs"] == 0)
        eventually(lambda: rpc.rpc_sync("w1", figures)["num_owner_rrefs"] == 0)
        # The owner's last answers may be on their way.
        eventually(lambda: figures()["num_pending_futures"] == 0)
        return figures()["num_pending_users"], figures()["num_forks"]


def test_many_references_leave_nothing_behind(group: Group) -> None:
    """LOG row 9."""
    assert group.run(churn, serve, serve)[0] == (0, 0)


def faulty(worker: Worker) -> Any:
    """Every message about references fails three times, or is late."""
    from torch.distributed.rpc import _testing

    options = _testing.FaultyTensorPipeRpcBackendOptions(
        init_method=worker.init_method,
        messages_to_fail=["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"],
        messages_to_delay={"PYTHON_RREF_FETCH_CALL": 0.2},
        num_fail_sends=3,
    )
    api._ignore_rref_leak = False
    rpc.init_rpc(worker.name, rank=worker.rank, world_size=worker.world_size, rpc_backend_options=options)
    seen = None
    if worker.rank == 0:
        rref = rpc.remote("w1", add, args=(1, 1))
        seen = rpc.rpc_sync("w2", value_of, args=(rref,)), rpc.rpc_sync("w2", confirmed, args=([rref],))
        with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
            rref.to_here(0.05)
        assert rref.to_here() == 2
        del rref
        eventually(lambda: rpc.rpc_sync("w1", figures)["num_owner_rrefs"] == 0)
    rpc.shutdown()
    return seen


def test_messages_about_references_that_fail_are_said_again(group: Group) -> None:
    assert group.run(faulty, faulty, faulty)[0] == (2, True)
