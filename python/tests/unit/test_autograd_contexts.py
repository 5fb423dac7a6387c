"""Distributed autograd contexts on one worker: ids, threads, tasks, the end, and what is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest
import tensorcall.autograd as dist_autograd
import torch
from tensorcall.autograd import _context


def test_an_id_tells_the_worker_and_counts_from_0(alone: Any) -> None:
    program = """
import tensorcall.autograd as a
a._init(3)
ids = []
for _ in range(2):
    with a.context() as number:
        ids.append(number)
assert ids == [3 << 48, (3 << 48) + 1], ids
assert a._get_max_id() == (3 << 48) + 2**48 - 1
a._init(5)
with a.context() as number:
    assert number == (5 << 48) + 2, number
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


def test_before_init_rpc_there_are_no_contexts() -> None:
    program = """
import tensorcall.autograd as a
try:
    a.context().__enter__()
except RuntimeError as error:
    assert "Need to initialize distributed autograd" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


def test_a_thread_has_one_context_at_a_time(alone: Any) -> None:
    with dist_autograd.context() as number:
        assert dist_autograd._current_context()._context_id() == number
        with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"):
            dist_autograd.context().__enter__()

    with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd context"):
        dist_autograd._current_context()


def test_what_is_released_is_unknown_by_its_id(alone: Any) -> None:
    with dist_autograd.context() as number:
        assert dist_autograd._retrieve_context(number)._context_id() == number
        assert dist_autograd._is_valid_context(number) is None  # type: ignore[func-returns-value]

    for ask in (
        dist_autograd._retrieve_context,
        dist_autograd._is_valid_context,
        dist_autograd._release_context,
        dist_autograd.get_gradients,
        lambda number: dist_autograd.backward(number, [torch.ones(1)]),
    ):
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {number}"):
            ask(number)


def test_any_thread_may_release_a_context(alone: Any) -> None:
    with dist_autograd.context() as number:
        thread = threading.Thread(target=dist_autograd._release_context, args=(number,))
        thread.start()
        thread.join(10)
        with pytest.raises(RuntimeError, match="Current thread doesn't have a valid"):
            dist_autograd._current_context()
        # The place is free, too.
        with dist_autograd.context():
            pass


def test_an_error_in_the_block_passes_and_ends_the_context(alone: Any) -> None:
    with pytest.raises(KeyError), dist_autograd.context() as number:
        raise KeyError("mine")

    assert _context.container.find(number) is None
    assert dist_autograd._get_debug_info() == {
        "num_current_backward_passes": "0",
        "num_autograd_contexts": "0",
    }


def test_every_task_of_a_loop_has_a_context_of_its_own(alone: Any) -> None:
    async def task() -> tuple[int, int]:
        with dist_autograd.context() as number:
            await asyncio.sleep(0)
            return number, dist_autograd._current_context()._context_id()

    async def both() -> list[tuple[int, int]]:
        return list(await asyncio.gather(task(), task()))

    (one, same_one), (two, same_two) = asyncio.run(both())
    assert one == same_one
    assert two == same_two
    assert one != two


def test_without_a_context_a_call_leaves_no_trace(alone: Any) -> None:
    result = alone.rpc_sync("me", torch.add, args=(torch.ones(2, requires_grad=True), 1))

    assert result.is_leaf
    assert dist_autograd._get_debug_info()["num_autograd_contexts"] == "0"


def test_a_context_that_stayed_here_needs_no_messages(alone: Any) -> None:
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    with dist_autograd.context() as number:
        loss = (a * b).sum()
        dist_autograd.backward(number, [loss], retain_graph=True)
        dist_autograd.backward(number, [loss])
        gradients = dist_autograd.get_gradients(number)

    assert torch.equal(gradients[a], 2 * b)
    assert torch.equal(gradients[b], 2 * a)
    assert a.grad is None


@pytest.mark.parametrize(
    ("roots", "kind", "text"),
    [
        (None, TypeError, "incompatible function arguments"),
        (5, TypeError, "incompatible function arguments"),
        ([1], TypeError, "incompatible function arguments"),
        (torch.ones(1), TypeError, "incompatible function arguments"),
        ([], RuntimeError, "No tensors provided for gradient computation"),
        ([torch.ones(1)], RuntimeError, "requires_grad not set on"),
        ([torch.ones(2, requires_grad=True)], RuntimeError, "is not a scalar, all roots need to be scalar"),
        ([torch.ones(1, requires_grad=True)], RuntimeError, "does not have a valid gradient function"),
    ],
)
def test_roots_that_make_no_sense_are_refused(alone: Any, roots: Any, kind: Any, text: str) -> None:
    with dist_autograd.context() as number, pytest.raises(kind, match=text):
        dist_autograd.backward(number, roots)


def test_a_context_of_a_lost_worker_does_not_stay(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorcall.rpc import _agent

    monkeypatch.setattr(_agent.TensorPipeAgent, "lost_workers", lambda self: {9})
    for number in range(_context._SWEEP_EVERY):
        _context.container.enter((9 << 48) + number)
        _context.container.enter((8 << 48) + number)

    left = {number >> 48 for number in _context.container._contexts}
    for number in list(_context.container._contexts):
        dist_autograd._release_context(number)
    assert 8 in left
    assert _context.container.count() == 0
    assert len([number for number in left if number == 9]) <= 1


def recorded(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.grad_fn is not None else x.detach()


def test_calls_to_oneself_are_recorded_like_others(alone: Any) -> None:
    a = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as number:
        result = alone.rpc_sync("me", recorded, args=(a,))
        context = dist_autograd._current_context()
        assert len(context._send_functions()) == 2
        assert len(context._recv_functions()) == 2
        assert context._known_worker_ids() == {0}
        assert result.grad_fn is list(context._recv_functions().values())[1]
        assert dist_autograd._retrieve_context(number) is context


def test_torch_operators_without_gradients_do_not_carry_the_context(alone: Any) -> None:
    with dist_autograd.context():
        alone.rpc_sync("me", torch.add, args=(torch.ones(2), 1))
        assert dist_autograd._current_context()._known_worker_ids() == set()
        with torch.no_grad():
            alone.rpc_sync("me", torch.add, args=(torch.ones(2, requires_grad=True), 1))
        assert dist_autograd._current_context()._send_functions() == {}


def mixed(whole: torch.Tensor, numbers: torch.Tensor, half: Any) -> Any:
    sparse = half["sparse"]
    return [sparse * 2, whole.grad_fn is sparse.grad_fn, numbers.is_leaf, half["plain"].is_leaf]


def test_what_needs_gradients_is_found_wherever_it_is(alone: Any) -> None:
    whole = torch.ones(2, requires_grad=True)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,), requires_grad=True, check_invariants=True
    )
    with dist_autograd.context():
        result, together, leaf, plain = alone.rpc_sync(
            "me", mixed, args=(whole, torch.tensor([1, 2]), {"sparse": sparse, "plain": torch.ones(2)})
        )
        send = next(iter(dist_autograd._current_context()._send_functions().values()))

    assert [node.variable is tensor for (node, _), tensor in zip(
        send.next_functions, [whole, sparse], strict=True)] == [True, True]  # fmt: skip
    assert (together, leaf, plain) == (True, True, True)
    assert result.is_sparse
    assert result.grad_fn.name() == "torch::distributed::autograd::RecvRpcBackward"


class Fails:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __setstate__(self, state: Any) -> None:
        raise ValueError("does not like it")


def test_arguments_that_cannot_be_unpickled_are_answered_for(alone: Any) -> None:
    a = torch.ones(2, requires_grad=True)
    with dist_autograd.context():
        with pytest.raises(RuntimeError, match="does not like it"):
            alone.rpc_sync("me", recorded, args=(Fails(a * 1),))
        context = dist_autograd._current_context()
        assert list(context._recv_functions()) == list(context._send_functions())
        assert list(context._recv_functions().values()) == [None]


def test_arguments_of_a_call_that_was_not_made_are_forgotten(alone: Any) -> None:
    a = torch.ones(2, requires_grad=True)
    with dist_autograd.context():
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            alone.rpc_sync("me", recorded, args=(a,), timeout=-2)
        assert dist_autograd._current_context()._send_functions() == {}
        assert not dist_autograd._current_context().open_calls()
    assert not _context.context_of_call
