"""The workloads that all peers have in common, by the names of the project's baseline.

L1 is a trivial call; L2 one with two small tensors; C1 trivial calls with 64 in flight, without and with a
tensor of 1 KiB; C2 eight calls at once that sleep for 50 ms; B1 large tensors one way; B2 the same there and
back. What a client does not know how to do is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from loops import Timer
from settings import Settings, size_of

IN_FLIGHT = (1, 4)


class Client:
    """Makes the calls that are measured. A peer says how."""

    def trivial(self) -> Any:
        """As little as a call can do; waits for it."""
        raise NotImplementedError

    def add(self) -> Any:
        """A function of two tensors of 2 x 2; waits for it."""
        raise NotImplementedError

    def start(self, function: str, tensor: Any = None) -> Any:
        """Starts a call of `trivial`, `sleep`, `swallow` (takes a tensor) or `echo` (gives it back)."""
        raise NotImplementedError

    def wait(self, handle: Any) -> Any:
        """Waits for such a call."""
        raise NotImplementedError

    def single(self, function: str, tensor: Any) -> Any:
        """Makes such a call while no other is under way; `wait` is given what this returns."""
        return self.start(function, tensor)

    def tensor(self, size: int) -> Any:
        """A tensor of so many bytes."""
        raise NotImplementedError


Workload = Callable[[Any, Timer, Settings], None]


def run_l1(client: Client, timer: Timer, _: Settings) -> None:
    """A trivial call."""
    timer.latency("L1", client.trivial)


def run_l2(client: Client, timer: Timer, _: Settings) -> None:
    """A function of two small tensors."""
    timer.latency("L2 function", client.add)


def run_c1(client: Client, timer: Timer, _: Settings) -> None:
    """64 in flight."""
    kib = client.tensor(1 << 10)
    timer.rate("C1", lambda: client.start("trivial"), client.wait, 64)
    timer.rate("C1 1 KiB", lambda: client.start("trivial", kib), client.wait, 64)


def run_c2(client: Client, timer: Timer, _: Settings) -> None:
    """Eight that sleep."""
    timer.parallel("C2", lambda: client.start("sleep"), client.wait, 8)


def run_b1(client: Client, timer: Timer, settings: Settings) -> None:
    """Large tensors one way."""
    bulk(client, timer, settings, "B1", "swallow")


def run_b2(client: Client, timer: Timer, settings: Settings) -> None:
    """Large tensors there and back."""
    bulk(client, timer, settings, "B2", "echo")


def bulk(client: Client, timer: Timer, settings: Settings, workload: str, function: str) -> None:
    """Tensors of several sizes, one and four in flight."""
    for name in settings.sizes:
        size = size_of(name)
        tensor = client.tensor(size)
        for in_flight in IN_FLIGHT:
            start = client.single if in_flight == 1 else client.start
            bound = partial(start, function, tensor)
            timer.bulk(f"{workload} {name} x{in_flight}", bound, client.wait, size, in_flight)


COMMON: Mapping[str, Workload] = {
    "L1": run_l1,
    "L2": run_l2,
    "C1": run_c1,
    "C2": run_c2,
    "B1": run_b1,
    "B2": run_b2,
}


def run(
    client: Client, settings: Settings, workloads: Mapping[str, Workload] = COMMON, root: int | None = None
) -> None:
    """Runs what the settings name, as far as it is among the `workloads`."""
    timer = Timer(settings.calls, settings.seconds, root)
    for name in settings.workloads:
        if name in workloads:
            workloads[name](client, timer, settings)
