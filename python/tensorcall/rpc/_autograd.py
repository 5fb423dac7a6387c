"""The module for distributed autograd, as seen from here."""

from __future__ import annotations

from typing import Any

import torch.distributed


def autograd() -> Any:
    """Ours, under the name that programs patch."""
    import tensorcall.autograd as ours

    theirs = getattr(torch.distributed, "autograd", None)
    return theirs if getattr(theirs, "__name__", None) == ours.__name__ else ours
