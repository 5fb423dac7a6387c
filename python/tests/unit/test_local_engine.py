"""Backward passes over several workers, played in one process, come to what plain autograd comes to.

Each worker is a container of contexts with its local engine. A small driver stands for the messages
between them: it hands out gradients in random order, early ones as soon as a circle asks for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensorcall.autograd import _context, _engine, _functions

CONTEXT = 7
PASS = (1, 1)


class Played:
    """A worker without a process."""

    def __init__(self, rank: int) -> None:
        self.container = _context._Container()
        self.container.join(rank)
        self.engine = _engine.LocalEngine(self.container.find)
        self.context = self.container.enter(CONTEXT)


class Stage:
    """Workers, and what travels between them."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.workers = [Played(rank) for rank in range(size)]
        self.random = random.Random(seed)
        self.pass_id = 0

    def move(self, tensors: list[torch.Tensor], source: int, target: int) -> list[torch.Tensor]:
        """Sends tensors, as a call or an answer would."""
        sender, receiver = self.workers[source], self.workers[target]
        message = sender.container.new_message()
        copies = [tensor.detach().clone() for tensor in tensors]
        needed = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        if needed:
            _functions.record_send(sender.context, message, target, [tensors[i] for i in needed])
            _functions.record_recv(receiver.context, message, [copies[i] for i in needed])
        return copies

    def backward(self, roots: list[torch.Tensor], *, retain_graph: bool = False) -> None:
        """Plays a pass that worker 0 begins, one random step after the other."""
        self.pass_id += 1
        parts = [
            Part(worker, (0, self.pass_id), roots if rank == 0 else None, retain_graph)
            for rank, worker in enumerate(self.workers)
        ]
        sent: list[tuple[int, int, Any]] = []
        for part in parts:
            sent += part.unreached()
        while True:
            ready = [part for part in parts if part.can_go_on()]
            if not sent and not ready:
                break
            if sent and (not ready or self.random.random() < 0.5):
                rank, message, gradients = sent.pop(self.random.randrange(len(sent)))
                parts[rank].arrive(message, gradients)
            else:
                sent += self.random.choice(ready).go_on()
        assert all(part.finished for part in parts), "the pass stands still"
        for part in parts:
            part.end()


class Part:
    """What one worker does in a pass."""

    def __init__(self, worker: Played, pass_id: Any, roots: Any, retain_graph: bool) -> None:
        self.engine = worker.engine
        self.pass_id = pass_id
        self.retain_graph = retain_graph
        sends, self.recvs, _ = self.engine.plan(CONTEXT, pass_id, roots)
        self.sources: list[int | None] = [message for message, _ in sends]
        self.complete: set[int | None] = set()
        self.new: list[Any] = []
        if roots is not None:
            self.sources.append(None)
            self.complete.add(None)
        self.reported: set[int] = set()
        self.finished = False

    def unreached(self) -> list[Any]:
        """What no source reaches has no gradients, and that can be said at once."""
        self.reported = {message for message, _, reach in self.recvs if not reach}
        return [(origin, message, None) for message, origin, reach in self.recvs if not reach]

    def arrive(self, message: int, gradients: Any) -> None:
        assert message in self.sources, "a gradient for a message that was not sent"
        assert message not in self.complete, "a gradient came twice"
        self.complete.add(message)
        if gradients is not None:
            self.new.append((message, gradients))

    def wanted(self) -> list[tuple[int, int]]:
        return [
            (message, origin)
            for message, origin, reach in self.recvs
            if message not in self.reported and {self.sources[place] for place in reach} <= self.complete
        ]

    def can_go_on(self) -> bool:
        return not self.finished and (bool(self.wanted()) or len(self.complete) == len(self.sources))

    def go_on(self) -> list[Any]:
        wanted = self.wanted()
        self.finished = len(self.complete) == len(self.sources)
        new, self.new = self.new, []
        self.reported |= {message for message, _ in wanted}
        found = self.engine.vjp(
            CONTEXT,
            self.pass_id,
            new,
            [message for message, _ in wanted],
            last=self.finished,
            retain_graph=self.retain_graph,
        )
        assert [message for message, _ in found] == [message for message, _ in wanted]
        return [(origin, *each) for (_, origin), each in zip(wanted, found, strict=True)]

    def end(self) -> None:
        self.engine.end(CONTEXT, self.pass_id)
        assert self.engine.count() == 0


def random_program(seed: int, size: int) -> tuple[Stage, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """A random computation over workers, and the same in one place: leaves, the two losses."""
    rng = random.Random(seed)
    stage = Stage(size, seed)
    generator = torch.Generator().manual_seed(seed)
    leaves = [
        torch.rand(3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2 * size)
    ]
    # What each worker has: a tensor of its own graph, and the same of the plain one.
    have: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
        [(leaves[2 * rank], leaves[2 * rank]), (leaves[2 * rank + 1], leaves[2 * rank + 1])]
        for rank in range(size)
    ]
    operations: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: torch.sin(a) - b,
        lambda a, b: a.sum() * b,
        lambda a, b: torch.cat([a[:2], b[2:]]),
        lambda a, b: torch.stack([a, b]).mean(0),
    ]
    for _ in range(rng.randrange(4, 24)):
        rank = rng.randrange(size)
        if rng.random() < 0.4:
            target = rng.randrange(size)
            chosen = [rng.choice(have[rank]) for _ in range(rng.randrange(1, 4))]
            moved = stage.move([mine for mine, _ in chosen], rank, target)
            have[target] += [(copy, plain) for copy, (_, plain) in zip(moved, chosen, strict=True)]
        else:
            operation = rng.choice(operations)
            (a, plain_a), (b, plain_b) = rng.choice(have[rank]), rng.choice(have[rank])
            have[rank].append((operation(a, b), operation(plain_a, plain_b)))
    # Whatever worker 0 gets in the end.
    for rank in range(1, size):
        mine, plain = rng.choice(have[rank][-2:])
        (moved_one,) = stage.move([mine], rank, 0)
        have[0].append((moved_one, plain))
    chosen = rng.sample(have[0], min(3, len(have[0])))
    ours = torch.stack([mine.sum() for mine, _ in chosen]).prod()
    plain = torch.stack([plain.sum() for _, plain in chosen]).prod()
    return stage, leaves, ours, plain


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_of_random_graphs_are_those_of_plain_autograd(size: int) -> None:
    for seed in range(120):
        stage, leaves, ours, plain = random_program(1000 * size + seed, size)
        expected = torch.autograd.grad(plain, leaves, allow_unused=True)

        stage.backward([ours])

        for number, (leaf, gradient) in enumerate(zip(leaves, expected, strict=True)):
            found = stage.workers[number // 2].context.gradients().get(leaf)
            assert leaf.grad is None
            if gradient is None:
                # Nothing came, or an answer that says so for all of a message.
                assert found is None or not found.any()
            else:
                torch.testing.assert_close(found, gradient)


def test_a_second_pass_adds_to_the_first() -> None:
    stage, leaves, ours, plain = random_program(5, 3)
    expected = torch.autograd.grad(plain, leaves, allow_unused=True)

    for _ in range(2):
        stage.backward([ours], retain_graph=True)

    for number, (leaf, gradient) in enumerate(zip(leaves, expected, strict=True)):
        found = stage.workers[number // 2].context.gradients().get(leaf)
        if gradient is not None:
            torch.testing.assert_close(found, 2 * gradient)


def there_and_back(stage: Stage, tensors: list[torch.Tensor], work: Any) -> torch.Tensor:
    (result,) = stage.move([work(*stage.move(tensors, 0, 1))], 1, 0)
    return result


def test_the_graph_has_the_shape_and_the_names_that_torch_gives_it() -> None:
    stage = Stage(2)
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    result = there_and_back(stage, [a, torch.ones(2), b], lambda x, _, y: x + y)

    here, there = (worker.context for worker in stage.workers)
    (send,) = here._send_functions().values()
    assert [(type(node).__name__, node.variable is leaf, place) for (node, place), leaf in zip(
        send.next_functions, [a, b], strict=True)] == [("AccumulateGrad", True, 0)] * 2  # fmt: skip
    (recv,) = here._recv_functions().values()
    assert result.grad_fn is recv
    (answer,) = there._send_functions().values()
    ((add, _),) = answer.next_functions
    assert add.name() == "AddBackward0"
    (x, first), (y, second) = add.next_functions
    assert x is y
    assert (first, second) == (0, 1)
    assert x.name() == "torch::distributed::autograd::RecvRpcBackward"
    assert answer.name() == "torch::distributed::autograd::SendRpcBackward"


def test_received_tensors_can_be_changed_in_place() -> None:
    stage = Stage(2)
    a = torch.tensor([1.0, 2.0], requires_grad=True)

    def work(x: torch.Tensor) -> torch.Tensor:
        assert not x.is_leaf
        x.mul_(3)
        x[0] = 10
        return x * x

    stage.backward([there_and_back(stage, [a], work).sum()])

    # d/da (3a)^2 = 18a, and the first element was overwritten.
    assert stage.workers[0].context.gradients()[a].tolist() == [0.0, 36.0]


def test_a_tensor_that_was_sent_may_be_changed_in_place_afterwards() -> None:
    stage = Stage(2)
    leaf = torch.tensor([1.0], requires_grad=True)
    a = leaf * 2
    result = there_and_back(stage, [a], lambda x: x * 5)
    a.mul_(100)

    stage.backward([(result + a).sum()])

    assert stage.workers[0].context.gradients()[leaf].tolist() == [210.0]


def test_every_hook_runs_once_in_a_pass_without_circles() -> None:
    stage = Stage(2)
    ran: list[str] = []
    a = torch.ones(2, requires_grad=True)
    b = a + a
    accumulator = b.grad_fn.next_functions[0][0]  # type: ignore[union-attr, index]
    a.register_hook(lambda gradient: ran.append("leaf") or 2 * gradient)  # type: ignore[func-returns-value]
    b.register_hook(lambda gradient: ran.append("inner"))
    accumulator.register_prehook(lambda gradients: ran.append("before"))
    accumulator.register_hook(lambda into, out: ran.append("after"))
    result = there_and_back(stage, [b, b], lambda x, y: x * y)

    stage.backward([(result + b).sum()])

    assert ran == ["inner", "leaf", "before", "after"]
    assert stage.workers[0].context.gradients()[a].tolist() == [20.0, 20.0]


def test_a_hook_of_a_leaf_sees_its_whole_gradient_also_if_nothing_else_is_shared() -> None:
    stage = Stage(2)
    weight = torch.tensor([2.0], requires_grad=True)
    seen: list[float] = []
    weight.register_hook(lambda gradient: seen.append(gradient.item()))
    ((first,), (second,)) = (stage.move([weight * factor], 1, 0) for factor in (3, 4))

    stage.backward([(first + second).sum()])

    assert seen == [7.0]


def test_a_chain_of_calls_runs_every_node_once_and_sums_at_the_leaf_from_the_last_call_on() -> None:
    for seed in range(5):
        stage = Stage(2, seed)
        weight = torch.tensor([0.1], requires_grad=True)
        runs: list[int] = []
        state = torch.tensor([1e8], requires_grad=True)
        for step in range(3):
            (there,) = stage.move([state], 0, 1)
            product = there * weight
            product.register_hook(lambda _, runs=runs, step=step: runs.append(step))
            (state,) = stage.move([product], 1, 0)

        stage.backward([state.sum()])

        assert runs == [2, 1, 0]
        # In another order the sum is rounded to something else.
        (found,) = stage.workers[1].context.gradients().values()
        inputs, flows = [torch.tensor([1e8])], [torch.ones(1)]
        for _ in range(2):
            inputs.append(inputs[-1] * weight.detach())
            flows.append(flows[-1] * weight.detach())
        first, second, third = (flow * value for flow, value in zip(flows, reversed(inputs), strict=True))
        assert found.item() == (first + second + third).item()


def test_sparse_gradients_stay_sparse_and_add_up() -> None:
    stage = Stage(2)
    table = torch.nn.Embedding(10, 3, sparse=True)
    result = there_and_back(stage, [table(torch.tensor([1, 2, 2]))], lambda x: x * 2)

    stage.backward([result.sum()], retain_graph=True)
    stage.backward([result.sum()], retain_graph=True)

    gradient = stage.workers[0].context.gradients()[table.weight]
    assert gradient.is_sparse
    assert gradient.to_dense().sum(1).tolist() == [0, 12, 24, 0, 0, 0, 0, 0, 0, 0]


def test_a_gradient_is_taken_as_it_is_or_copied_as_torch_would() -> None:
    stage = Stage(1)
    seen: list[torch.Tensor] = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            pointers.append(gradient.data_ptr())
            return gradient

    pointers: list[int] = []
    a, b, c = (torch.rand(4, 5, requires_grad=True) for _ in range(3))
    one: Any = Same.apply(a)  # type: ignore[no-untyped-call]
    two: Any = Same.apply(b + c)  # type: ignore[no-untyped-call]
    kept = torch.rand(4, 5, requires_grad=True)
    three: Any = kept * 1
    three.register_hook(seen.append)
    turned = torch.rand(5, 4, requires_grad=True)

    stage.backward([one[1][0]])
    stage.backward([two[1][0]])
    stage.backward([(three * 1)[1][0]])
    stage.backward([(turned.t() * 1).sum()])

    gradients = stage.workers[0].context.gradients()
    assert gradients[a].data_ptr() == pointers[0]
    assert len({gradients[b].data_ptr(), gradients[c].data_ptr(), pointers[1]}) == 3
    assert gradients[kept].data_ptr() != seen[0].data_ptr()
    assert gradients[turned].is_contiguous()


def test_an_error_ends_the_pass_and_the_next_one_works() -> None:
    stage = Stage(2)
    fails = True

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if fails:
                raise ValueError("in the graph")
            return gradient

    a = torch.ones(2, requires_grad=True)
    result = there_and_back(stage, [a], lambda x: Fails.apply(x))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="in the graph"):
        stage.backward([result.sum()], retain_graph=True)
    for worker in stage.workers:
        worker.engine.end(CONTEXT, (0, stage.pass_id))
    fails = False

    stage.backward([result.sum()])

    assert stage.workers[0].context.gradients()[a].tolist() == [1.0, 1.0]


def test_plain_backward_through_a_received_tensor_says_what_to_use() -> None:
    stage = Stage(2)
    a = torch.ones(2, requires_grad=True)
    result = there_and_back(stage, [a], lambda x: x * 2)

    with pytest.raises(RuntimeError, match=r"use torch\.distributed\.autograd\.backward"):
        result.sum().backward()  # type: ignore[no-untyped-call]


def test_a_tensor_of_another_context_is_refused() -> None:
    old, new = Stage(2), Stage(2)
    a = torch.ones(2, requires_grad=True)
    result = there_and_back(old, [a], lambda x: x * 2)
    new.workers[0].context._id = CONTEXT + 1
    new.workers[0].container._contexts[CONTEXT + 1] = new.workers[0].context

    with pytest.raises(RuntimeError, match="Autograd context no longer valid"):
        new.workers[0].engine.plan(CONTEXT + 1, PASS, [result.sum()])


def test_gradients_that_share_memory_with_what_is_sent_on_are_copies() -> None:
    stage = Stage(2)
    a = torch.ones(3, requires_grad=True)
    (moved,) = stage.move([a], 0, 1)
    b = torch.ones(3, requires_grad=True)
    (result,) = stage.move([moved + b], 1, 0)

    stage.backward([result.sum()], retain_graph=True)
    first = stage.workers[0].context.gradients()[a]
    stage.backward([result.sum()])

    assert stage.workers[1].context.gradients()[b].tolist() == [2.0] * 3
    assert stage.workers[0].context.gradients()[a] is first
    assert first.tolist() == [2.0] * 3
