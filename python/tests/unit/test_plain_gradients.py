"""Gradients for workers that read plain data only."""

from __future__ import annotations

from typing import Any

import tensorcall.rpc  # noqa: F401 (calls know of autograd and the other way round: this way in)
import torch
from tensorcall.autograd import _messages


def test_gradients_of_every_kind_become_ordinary_tensors() -> None:
    whole = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    complex_numbers = torch.tensor([1 + 2j])
    anything: Any = None

    packed = _messages.pack_gradients([whole.to_sparse(), None, complex_numbers.conj()], anything, True)

    assert packed is not None
    payload, gradients = packed
    assert payload is None
    assert torch.equal(gradients[0], whole)
    assert gradients[1] is None
    assert torch.equal(gradients[2], complex_numbers.conj())
    assert not gradients[2].is_conj()


def test_that_there_are_no_gradients_needs_no_message() -> None:
    anything: Any = None

    assert _messages.pack_gradients([None, None], anything, True) is None
