"""TorchScript and torch.compile: code that cannot hold calls of ours.

TorchScript would compile `rpc_sync`, `rpc_async` and `remote` to operators of torch's own agent, which
is not there. So compiling them is refused, with a text that says what to do instead. The compiler asks
``torch.distributed.rpc.is_available()`` before it knows these functions; told no, it takes them for
functions like others and asks their ``__prepare_scriptable__``, which raises.

torch.compile breaks the graph at a function that is marked as not for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

refusing = True
"""Whether calls inside TorchScript are refused when it is compiled. torch's own test modules hold
script functions with such calls, which tests that use other functions of them need not mind."""


def eager_only(function: F) -> F:
    """Mark a function that neither TorchScript nor torch.compile can take in."""
    name = function.__name__

    def refuse() -> NoReturn:
        raise RuntimeError(
            f"tensorcall: {name} cannot be called inside TorchScript. Call it from Python instead; what it "
            f"calls may be a script function: rpc.{name}(to, script_function, args=...). A function that "
            "a script calls can be kept in Python by @torch.jit.ignore"
        )

    marked: Any = function
    marked.__prepare_scriptable__ = refuse
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "tensorcall's calls are not part of a graph"
    return function


def is_compiling(depth: int) -> bool:
    """Whether the caller, so many frames up, is TorchScript's compiler (in C++, below these modules)."""
    return sys._getframe(depth + 1).f_globals.get("__name__") in ("torch.jit._script", "torch.jit._recursive")
