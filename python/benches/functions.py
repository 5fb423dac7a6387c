"""What the called worker runs."""

from __future__ import annotations

import time
from collections import deque
from typing import Any


def trivial(*_: Any) -> int:
    """As little as a call can do."""
    return 7


def add(a: Any, b: Any) -> Any:
    """A Python function of two tensors."""
    return a + b


def swallow(*_: Any) -> None:
    """Takes a tensor and returns nothing."""


def echo(tensor: Any) -> Any:
    """Gives a tensor back."""
    return tensor


def sleep() -> None:
    """Sleeps, without the interpreter's lock."""
    time.sleep(0.05)


def total(tensor: Any) -> int:
    """Reads every byte."""
    import torch

    return int(tensor.view(torch.int64).sum())


_held: deque[Any] = deque(maxlen=32)


def hold(tensor: Any) -> None:
    """Keeps a tensor until 32 more have come."""
    _held.append(tensor)


def release() -> None:
    """Lets go of what is held."""
    _held.clear()


class Counter:
    """What references point to."""

    def count(self) -> int:
        """As little as a method can do."""
        return 7


_layers: list[Any] = []


def make_layer(width: int) -> None:
    """Makes the layer of the callee."""
    import torch

    torch.manual_seed(1)
    _layers[:] = [torch.nn.Linear(width, width)]


def layer(x: Any) -> Any:
    """The part of the model that is on the callee."""
    return _layers[0](x).relu()
