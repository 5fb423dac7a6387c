"""Random programs over several workers, as `crates/tensorcall/tests/candle/program.rs` has them for candle.

A program is a number: it decides which operations a worker does on its inputs and its own variables, and
which workers it calls meanwhile with what. Both files do the same, number by number, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

SIZE = 3
"""Rows and columns of every tensor."""
VARIABLES = 2
"""Variables of each worker."""
_MASK = (1 << 64) - 1

Call = Callable[[int, int, int, list[torch.Tensor]], list[torch.Tensor]]
"""Runs a program on another worker, or on the same one: worker, program, depth, inputs."""


class Numbers:
    """Numbers that are the same in every language (splitmix64)."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def next(self) -> int:
        """64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = ((self._state ^ (self._state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, count: int) -> int:
        """One of so many."""
        return (self.next() >> 33) % count

    def fraction(self) -> float:
        """From 0 to 1."""
        return (self.next() >> 11) / (1 << 53)


def variables(worker: int) -> list[torch.Tensor]:
    """The variables of a worker."""
    numbers = Numbers(1000 + worker)
    return [
        torch.tensor(
            [[numbers.fraction() * 2 - 1 for _ in range(SIZE)] for _ in range(SIZE)],
            dtype=torch.float64,
            requires_grad=True,
        )
        for _ in range(VARIABLES)
    ]


def run(
    own: Sequence[torch.Tensor],
    workers: int,
    call: Call,
    seed: int,
    depth: int,
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Run a program on the worker that has these variables. With a depth of 0 it calls nobody."""
    numbers = Numbers(seed)
    pool = [*inputs, *own]
    for _ in range(4 + numbers.below(4)):
        a = pool[numbers.below(len(pool))]
        b = pool[numbers.below(len(pool))]
        operation = numbers.below(12 if depth > 0 else 7)
        if operation == 0:
            made = a + b
        elif operation == 1:
            made = a * b
        elif operation == 2:
            made = (a @ b).tanh()
        elif operation == 3:
            made = a.sin()
        elif operation == 4:
            made = a.t().contiguous()
        elif operation == 5:
            made = torch.cat([a[:1], b[1:]])
        elif operation == 6:
            made = a - b.mean(dim=0, keepdim=True)
        else:
            to = numbers.below(workers)
            sub_program = numbers.next() & (_MASK >> 1)
            arguments = [a] if numbers.below(2) == 0 else [a, b]
            pool += call(to, sub_program, depth - 1, arguments)
            continue
        pool.append(made)
    last = (pool[-1] + pool[-2]).tanh()
    return [last, pool[numbers.below(len(pool))]]


def loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number that depends on all that a program returned."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        total = total + (output * output).sum()
    return total


def expected(workers: int, first: int, seed: int, depth: int) -> list[list[torch.Tensor]]:
    """The gradients of the variables of all workers, as one process computes them."""
    alone = [variables(worker) for worker in range(workers)]

    def call(to: int, seed: int, depth: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return run(alone[to], workers, call, seed, depth, inputs)

    loss(call(first, seed, depth, [])).backward()
    return [[_gradient(variable, variable.grad) for variable in own] for own in alone]


def _gradient(variable: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(variable) if gradient is None else gradient


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far two tensors are from each other; 1, or the larger of their numbers, counts as a unit."""
    unit = torch.maximum(found.abs(), wanted.abs()).clamp(min=1)
    return float(((found - wanted).abs() / unit).max())
