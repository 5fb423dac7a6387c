"""An optimizer whose parameters are on several workers.

Each worker that has parameters gets an optimizer of torch's over its own ones, the parameters
themselves and not copies. A step reads the gradients of a distributed autograd context, and happens
where they are.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .. import autograd, rpc
from ..rpc import _fork
from ..rpc._scripts import eager_only

if TYPE_CHECKING:
    from ..rpc import RRef

__all__ = ["DistributedOptimizer"]

logger = logging.getLogger("tensorcall")

_stepping = threading.Lock()
"""Held by an optimizer that finds its gradients in ``.grad``: parameters may belong to several of them.
Also while one is made."""


@_fork.in_child
def _have_a_free_lock() -> None:
    global _stepping
    _stepping = threading.Lock()


class DistributedOptimizer:
    """Steps parameters on the workers that have them.

    Steps of several trainers with one optimizer follow each other on each worker; there is no order
    between workers, and gradients may be those of a forward pass that began before another one's step.

    Args:
        optimizer_class: a class of ``torch.optim``, or any that is made from parameters and has ``step()``.
        params_rref: references to parameters on any workers.
        args: further arguments of `optimizer_class`.
        kwargs: its keyword arguments.

    Raises:
        Exception: what making the optimizer raised on a worker.
    """

    is_functional_optim: bool
    """Whether the optimizers take the gradients as an argument, and leave ``.grad`` alone."""
    remote_optimizers: list[RRef[Any]]
    """One optimizer per worker."""

    @eager_only
    def __init__(
        self,
        optimizer_class: Callable[..., Any],
        params_rref: Iterable[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        of_worker: defaultdict[rpc.WorkerInfo, list[RRef[Any]]] = defaultdict(list)
        for rref in params_rref:
            of_worker[rref.owner()].append(rref)
        functional = _functional(optimizer_class)
        self.is_functional_optim = functional is not None
        if functional is None:
            logger.info("%r has no functional form: it steps with the gradients in .grad", optimizer_class)
        make = _LocalOptimizer if functional is None else _FunctionalLocalOptimizer
        made = functional or optimizer_class
        self.remote_optimizers = _wait_for_all(
            rpc.rpc_async(worker, _make, args=(make, made, rrefs, *args), kwargs=kwargs)
            for worker, rrefs in of_worker.items()
        )

    def step(self, context_id: int) -> None:
        """Do one step, with the gradients of a context, on every worker; returns when all are done.

        A parameter that has no gradient there stays as it is. The part of this worker is done by the
        thread that asks for the step, while the others do theirs.

        Args:
            context_id: the distributed autograd context.

        Raises:
            RuntimeError: there is no such context on this worker.
            Exception: what the optimizer of a worker raised; the others have stepped.
        """
        autograd._is_valid_context(context_id)
        others = [
            rpc.rpc_async(optimizer.owner(), _step, args=(optimizer, context_id))
            for optimizer in self.remote_optimizers
            if not optimizer.is_owner()
        ]
        error: Exception | None = None
        for optimizer in self.remote_optimizers:
            if optimizer.is_owner():
                try:
                    with torch.inference_mode(False), torch.enable_grad():
                        _step(optimizer, context_id)
                except Exception as failure:
                    error = failure
        _wait_for_all(others)
        if error is not None:
            raise error


class _LocalOptimizer:
    """The part of one worker, for an optimizer that looks for gradients in ``.grad``."""

    def __init__(self, make: Callable[..., Any], rrefs: list[RRef[Any]], *args: Any, **kwargs: Any) -> None:
        self._parameters = [rref.local_value() for rref in rrefs]
        self.optim = make(self._parameters, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """Step; afterwards ``.grad`` of the parameters is what it was."""
        gradients = autograd.get_gradients(context_id)
        with _stepping:
            before = [parameter.grad for parameter in self._parameters]
            try:
                for parameter in self._parameters:
                    parameter.grad = gradients.get(parameter)
                self.optim.step()
            finally:
                for parameter, gradient in zip(self._parameters, before, strict=True):
                    parameter.grad = gradient


class _FunctionalLocalOptimizer:
    """The part of one worker, for an optimizer that is given the gradients."""

    def __init__(self, make: Callable[..., Any], rrefs: list[RRef[Any]], *args: Any, **kwargs: Any) -> None:
        self._parameters = [rref.local_value() for rref in rrefs]
        self._lock = threading.Lock()
        with _without_warning(make):
            self.optim = make(self._parameters, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """Step with the gradients of a context."""
        gradients = autograd.get_gradients(context_id)
        with self._lock:
            self.optim.step([gradients.get(parameter) for parameter in self._parameters])


@contextlib.contextmanager
def _without_warning(make: Any) -> Iterator[None]:
    """Torch warns, whatever the filters say, that such classes will not be for TorchScript any more."""
    module = sys.modules.get(getattr(make, "__module__", ""))
    with _stepping:
        warn = getattr(module, _WARNING, None)
        if module is not None and warn is not None:
            setattr(module, _WARNING, lambda *_, **__: None)
        try:
            yield
        finally:
            if module is not None and warn is not None:
                setattr(module, _WARNING, warn)


_WARNING = "_scripted_functional_optimizer_deprecation_warning"


def _functional(optimizer_class: Any) -> Any:
    """What does the same without ``.grad``, if torch has it."""
    # Not at the top: torch's package imports this module in the place of its own.
    from torch.distributed.optim.utils import functional_optim_map

    if not torch.jit._state._enabled:
        return None
    try:
        return functional_optim_map.get(optimizer_class)
    except TypeError:
        # Something that has no hash.
        return None


def _make(make: Callable[..., Any], *args: Any, **kwargs: Any) -> RRef[Any]:
    """Runs on a worker that has parameters: make its optimizer."""
    return rpc.RRef(make(*args, **kwargs))


def _step(optimizer: RRef[Any], context_id: int) -> None:
    """Runs on a worker that has parameters: step its optimizer."""
    optimizer.local_value().step(context_id)


def _wait_for_all(futures: Iterable[Any]) -> list[Any]:
    """The values of all futures; raises the last error once all are done."""
    values = []
    error: Exception | None = None
    for future in list(futures):
        try:
            values.append(future.wait())
        except Exception as failure:
            error = failure
    if error is not None:
        raise error
    return values
