"""Distributed autograd over several processes."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve
from torch.distributed.rpc import functions

PATIENCE = 10.0
"""Seconds in which whatever happens on its own has happened."""


def eventually(check: Any) -> bool:
    end = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def contexts_here() -> int:
    return int(dist_autograd._get_debug_info()["num_autograd_contexts"])


def contexts_on(to: str) -> int:
    return int(rpc.rpc_sync(to, contexts_here))


def passes_on(to: str) -> str:
    found: str = rpc.rpc_sync(to, dist_autograd._get_debug_info)["num_current_backward_passes"]
    return found


class Layer:
    """A weight on some worker."""

    def __init__(self, weight: float) -> None:
        self.weight = torch.full((3,), weight, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @functions.async_execution
    def forward_later(self, to: str, x: torch.Tensor) -> Any:
        here = x * self.weight
        return rpc.rpc_async(to, double, args=(here,)).then(lambda future: future.wait() + here)

    async def forward_as_coroutine(self, to: str, x: torch.Tensor) -> torch.Tensor:
        return await rpc.rpc_async(to, double, args=(x * self.weight,))

    def gradient(self, context_id: int) -> Any:
        found = dist_autograd.get_gradients(context_id).get(self.weight)
        return None if found is None else found.tolist()

    def has_grad(self) -> bool:
        return self.weight.grad is not None


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def chain(x: torch.Tensor, *to: str) -> torch.Tensor:
    x = x * 3
    return rpc.rpc_sync(to[0], chain, args=(x, *to[1:])) if to else x


def of_nested_calls(worker: Worker) -> Any:
    with worker.joined():
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as number:
            # There and back and there again, the last part on this very worker.
            loss = rpc.rpc_sync("w1", chain, args=(x, "w2", "w1", "w0")).sum()
            dist_autograd.backward(number, [loss])
            return dist_autograd.get_gradients(number)[x].tolist(), x.grad


def test_gradients_go_through_nested_calls_and_circles(group: Group) -> None:
    assert group.run(of_nested_calls, serve, serve)[0] == ([81.0, 81.0], None)


def of_ways_to_call(worker: Worker) -> Any:
    found = {}
    with worker.joined():
        layer = rpc.remote("w1", Layer, args=(5.0,))
        for name in ("forward", "forward_later", "forward_as_coroutine"):
            for make in ("rpc_sync", "rpc_async", "remote"):
                x = torch.ones(3, requires_grad=True)
                with dist_autograd.context() as number:
                    method = getattr(getattr(layer, make)(), name)
                    result = method(x) if name == "forward" else method("w2", x)
                    if make == "rpc_async":
                        result = result.wait()
                    elif make == "remote":
                        result = result.to_here()
                    dist_autograd.backward(number, [result.sum()])
                    found[name, make] = (
                        dist_autograd.get_gradients(number)[x].tolist(),
                        layer.rpc_sync().gradient(number),
                        layer.rpc_sync().has_grad(),
                    )
    return found


def test_every_way_to_call_is_recorded(group: Group) -> None:
    found = group.run(of_ways_to_call, serve, serve)[0]

    once, thrice, twice = (
        ([5.0] * 3, [1.0] * 3, False),
        ([15.0] * 3, [3.0] * 3, False),
        ([10.0] * 3, [2.0] * 3, False),
    )
    for make in ("rpc_sync", "rpc_async", "remote"):
        assert found["forward", make] == once
        assert found["forward_later", make] == thrice
        assert found["forward_as_coroutine", make] == twice


def of_ends(worker: Worker) -> Any:
    with worker.joined():
        with dist_autograd.context():
            rpc.rpc_sync("w1", chain, args=(torch.ones(1), "w2"))
            during = contexts_on("w1"), contexts_on("w2")
        after = eventually(lambda: contexts_on("w1") == 0 == contexts_on("w2"))
        return during, after, contexts_here()


def test_the_end_of_a_context_reaches_all_workers_that_it_came_to(group: Group) -> None:
    assert group.run(of_ends, serve, serve)[0] == ((1, 1), True, 0)


def slow(x: torch.Tensor, seconds: float) -> tuple[torch.Tensor, int]:
    time.sleep(seconds)
    return x * 2, dist_autograd._current_context()._context_id()


def of_calls_that_last_longer(worker: Worker) -> Any:
    with worker.joined():
        x = torch.ones(1, requires_grad=True)
        with dist_autograd.context() as number:
            future = rpc.rpc_async("w1", slow, args=(x, 0.5))
        result, seen = future.wait()
        return seen == number, result.requires_grad, eventually(lambda: contexts_on("w1") == 0)


def test_a_call_may_last_longer_than_its_context(group: Group) -> None:
    """LOG row 81: the message that ends a context does not overtake what belongs to it."""
    assert group.run(of_calls_that_last_longer, serve)[0] == (True, True, True)


def of_results_that_nobody_takes(worker: Worker) -> Any:
    with worker.joined():
        x = torch.ones(1, requires_grad=True)
        layer = rpc.remote("w1", Layer, args=(5.0,))
        with dist_autograd.context() as number:
            kept = layer.rpc_async().forward(x)
            layer.rpc_async().forward(x)
            layer.rpc_sync().forward(x)
            loss = (kept.wait() + x).sum()
            begin = time.monotonic()
            dist_autograd.backward(number, [loss])
            soon = time.monotonic() - begin < 5
            return dist_autograd.get_gradients(number)[x].tolist(), layer.rpc_sync().gradient(number), soon


def test_results_that_the_loss_does_not_use_hold_nobody_up(group: Group) -> None:
    """In the place of torch's test_backward_unused_send_function, which wants a pass that never ends."""
    assert group.run(of_results_that_nobody_takes, serve)[0] == ([18.0], [1.0] * 3, True)


class Breaks(torch.autograd.Function):
    broken = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Breaks.broken:
            raise KeyError("planted")
        return gradient


def breaks(x: torch.Tensor) -> Any:
    return Breaks.apply(x)


def mend() -> None:
    Breaks.broken = False


def of_errors(worker: Worker) -> Any:
    texts = []
    with worker.joined():
        x = torch.ones(1, requires_grad=True)
        with dist_autograd.context() as number:
            there = rpc.rpc_sync("w2", breaks, args=(rpc.rpc_sync("w1", chain, args=(x, "w2")),))
            for _ in range(3):
                with pytest.raises(RuntimeError) as caught:
                    dist_autograd.backward(number, [there.sum()], retain_graph=True)
                texts.append(str(caught.value))
            before = dict(dist_autograd.get_gradients(number))
            rpc.rpc_sync("w2", mend)
            dist_autograd.backward(number, [there.sum()], retain_graph=True)
            idle = [passes_on(to) for to in ("w0", "w1", "w2")]
            return texts, before, dist_autograd.get_gradients(number)[x].tolist(), idle


def test_an_error_anywhere_is_raised_and_the_next_pass_works(group: Group) -> None:
    texts, before, gradient, idle = group.run(of_errors, serve, serve)[0]

    assert texts == ["Error on Node 2: 'planted'"] * 3
    assert before == {}
    assert gradient == [9.0]
    assert idle == ["0", "0", "0"]


def of_an_interrupt(worker: Worker) -> Any:
    # Who starts tests in the background may have them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with worker.joined(), dist_autograd.context() as number:
        x = torch.ones(1, requires_grad=True)
        y = rpc.rpc_sync("w1", double, args=(x,))
        y.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            dist_autograd.backward(number, [y.sum()])
        return eventually(lambda: passes_on("w0") == passes_on("w1") == "0")


def test_an_interrupt_in_a_pass_is_raised_where_it_began_and_ends_the_pass(group: Group) -> None:
    assert group.run(of_an_interrupt, serve)[0]


def of_a_lost_worker(worker: Worker) -> None:
    worker.start(timeout=8)
    x = torch.ones(1, requires_grad=True)
    with dist_autograd.context() as number:
        loss = rpc.rpc_sync("w1", chain, args=(x, "w2")).sum()
        worker.tell("recorded")
        worker.hear()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="w2"):
            dist_autograd.backward(number, [loss])
        soon = time.monotonic() - begin < 5
        other = torch.ones(1, requires_grad=True)
        with pytest.raises(RuntimeError, match="w2"):
            dist_autograd.backward(number, [rpc.rpc_sync("w1", chain, args=(other,)).sum()])
    with dist_autograd.context() as number:
        dist_autograd.backward(number, [rpc.rpc_sync("w1", chain, args=(other,)).sum()])
        found = dist_autograd.get_gradients(number)[other].tolist()
        idle = eventually(lambda: passes_on("w1") == "0")
    worker.tell((soon, found, idle))
    rpc.shutdown(graceful=False)


def stay_until_told(worker: Worker) -> None:
    worker.start(timeout=8)
    worker.hear()
    rpc.shutdown(graceful=False)


def test_a_lost_worker_ends_the_passes_of_its_contexts(group: Group) -> None:
    group.start(of_a_lost_worker, stay_until_told, stay_until_told)
    group.hear(0)
    group.kill(2)
    group.tell(0, "killed")

    assert group.hear(0) == (True, [3.0], True)
    group.tell(1, "the end")
    group.finish(expect_killed=(2,))


def train(number: int, parameter: Any, results: list[Any]) -> None:
    x = torch.full((3,), float(number))
    with dist_autograd.context() as context_id:
        loss = parameter.rpc_sync().forward(x).sum()
        dist_autograd.backward(context_id, [loss])
        results.append((number, parameter.rpc_sync().gradient(context_id)))


def of_many_threads(worker: Worker) -> Any:
    results: list[Any] = []
    with worker.joined():
        parameter = rpc.remote("w1", Layer, args=(2.0,))
        threads = [threading.Thread(target=train, args=(n, parameter, results)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sorted(results)


def test_contexts_of_many_threads_do_not_mix(group: Group) -> None:
    found = group.run(of_many_threads, serve)[0]

    assert found == [(n, [float(n)] * 3) for n in range(16)]


def of_a_profile(worker: Worker) -> Any:
    with worker.joined():
        x = torch.ones(3, requires_grad=True)
        with dist_autograd.context() as number:
            loss = rpc.rpc_sync("w1", chain, args=(x,)).sum()
            with torch.autograd.profiler.profile() as profile:
                dist_autograd.backward(number, [loss])
    return sorted(
        {event.name for event in profile.function_events if event.name.startswith("torch::distributed")}
    )


def test_a_profile_shows_the_pass_and_its_messages(group: Group) -> None:
    prefix = "torch::distributed::autograd::"
    assert group.run(of_a_profile, serve)[0] == [
        f"{prefix}{name}" for name in ("RecvRpcBackward", "SendRpcBackward", "backward")
    ]


def of_another_rank(worker: Worker, folder: str) -> Any:
    # Not with a server of rank 0, whose port would have to move.
    worker.init_method = f"file://{folder}/store"
    with worker.joined(), dist_autograd.context() as number:
        first = number >> 48
    other = Worker(1 - worker.rank, 2, worker.init_method)
    with other.joined(), dist_autograd.context() as number:
        x = torch.ones(1, requires_grad=True)
        loss = rpc.rpc_sync(f"w{worker.rank}", chain, args=(x,)).sum()
        dist_autograd.backward(number, [loss])
        return first, number >> 48, dist_autograd.get_gradients(number)[x].tolist()


def test_a_worker_may_come_back_under_another_rank(group: Group, tmp_path: Path) -> None:
    found = group.run(of_another_rank, of_another_rank, arguments=(str(tmp_path),))

    assert found == [(0, 1, [3.0]), (1, 0, [3.0])]


def of_rref_backward(worker: Worker) -> Any:
    with worker.joined():
        with dist_autograd.context() as number:
            x = torch.ones(1, requires_grad=True)
            there = rpc.remote("w1", chain, args=(x,))
            there.backward(number)
            found = dist_autograd.get_gradients(number)[x].tolist()
        with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
            there.backward()
        mine = rpc.RRef((x * 2).sum())
        mine.backward()
        return found, x.grad.tolist()  # type: ignore[union-attr]


def test_a_reference_can_be_the_root(group: Group) -> None:
    assert group.run(of_rref_backward, serve)[0] == ([3.0], [2.0])
