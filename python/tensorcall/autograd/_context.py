"""Distributed autograd contexts: what one forward and backward pass has on this worker.

A context begins on one worker and is entered by the others as calls carry its id to them. It knows the
send and recv functions of its messages here, which workers it was sent to, and the gradients that
backward passes have brought. Where it began decides when it ends: then this worker tells those that it
sent the context to, and they tell theirs (`_release`).

Which context is current belongs to the thread, or to the task of an event loop. The code that makes
calls looks at `current` once per call; without a context nothing else of this package runs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .. import _tensorcall

_WORKER_SHIFT = 48
_COUNTER_MAX = (1 << _WORKER_SHIFT) - 1
_SWEEP_EVERY = 64
"""So many contexts of others begin here before those of lost workers are looked for."""


def rank_of(number: int) -> int:
    """The worker that made the id of a context or message."""
    return number >> _WORKER_SHIFT


class DistAutogradContext:
    """One distributed forward and backward pass, as this worker sees it; made by :class:`context`."""

    def __init__(self, context_id: int) -> None:
        self._id = context_id
        self._lock = threading.Lock()
        self._sends: dict[int, Any] = {}
        self._recvs: dict[int, Any] = {}
        self._answers: set[int] = set()
        self._known: set[int] = set()
        self._calls: dict[int, tuple[_tensorcall.Call, int | None]] = {}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._released = False

    def _context_id(self) -> int:
        """The id, the same on all workers."""
        return self._id

    def _send_functions(self) -> dict[int, Any]:
        """The send functions by the ids of their messages, in the order in which they were made."""
        with self._lock:
            return dict(self._sends)

    def _recv_functions(self) -> dict[int, Any]:
        """The recv functions by the ids of their messages, in the order in which they were made."""
        with self._lock:
            return dict(self._recvs)

    def _known_worker_ids(self) -> set[int]:
        """The ranks of the workers that this one has sent the context to."""
        with self._lock:
            return set(self._known)

    def is_local(self) -> bool:
        """Whether no message has carried it to this worker or from here."""
        with self._lock:
            return not (self._known or self._sends or self._recvs)

    def sends_to(self, rank: int) -> None:
        """Note that a message that carries the context goes to that worker."""
        with self._lock:
            self._known.add(rank)

    def add_send(self, message: int, function: Any) -> None:
        """Note the send function of a message; it knows the worker that the message goes to."""
        with self._lock:
            self._sends[message] = function

    def drop_send(self, message: int) -> None:
        """Forget a message that was not sent, or whose call failed."""
        with self._lock:
            self._sends.pop(message, None)

    def add_recv(self, message: int, function: Any, is_answer: bool) -> None:
        """Note the recv function of a message; ``None`` stands for one that nobody can use."""
        with self._lock:
            self._recvs[message] = function
            if is_answer:
                self._answers.add(message)

    def is_answer(self, message: int) -> bool:
        """Whether a message that was received answered a call of this worker."""
        return message in self._answers

    def add_call(self, call: _tensorcall.Call, message: int | None) -> None:
        """Note a call made in the context, and its message if that has a send function."""
        with self._lock:
            self._calls[id(call)] = call, message
        context_of_call[id(call)] = self

    def drop_call(self, call: _tensorcall.Call) -> int | None:
        """Forget a call whose outcome was taken; its message."""
        with self._lock:
            context_of_call.pop(id(call), None)
            return self._calls.pop(id(call), (None, None))[1]

    def open_calls(self) -> list[_tensorcall.Call]:
        """The calls whose outcomes nobody has taken."""
        with self._lock:
            return [call for call, _ in self._calls.values()]

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of this worker's leaves."""
        with self._lock:
            return dict(self._gradients)

    def accumulate(
        self,
        found: dict[torch.Tensor, torch.Tensor],
        add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Take in gradients that a pass has found, by their leaves."""
        with self._lock:
            if self._released:
                return
            for leaf, gradient in found.items():
                before = self._gradients.get(leaf)
                self._gradients[leaf] = gradient if before is None else add(before, gradient)

    def clear(self) -> tuple[set[int], list[_tensorcall.Call]]:
        """End; returns the workers to be told and the calls whose answers nobody has taken."""
        with self._lock:
            self._released = True
            known, calls = self._known, [call for call, _ in self._calls.values()]
            graph = (self._sends, self._recvs, self._gradients)
            self._known, self._calls = set(), {}
            self._sends, self._recvs, self._gradients = {}, {}, {}
        for call in calls:
            context_of_call.pop(id(call), None)
        # Freeing the graph may run code of the program: not under the lock.
        del graph
        return known, calls

    def forget_workers(self) -> None:
        """The workers that it was sent to are those of a group that has ended."""
        with self._lock:
            self._known = set()


class _Container:
    """All contexts of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[int, DistAutogradContext] = {}
        self._worker: int | None = None
        self._numbers = itertools.count()
        self._messages = itertools.count()
        self._until_sweep = _SWEEP_EVERY

    def join(self, worker: int) -> None:
        """Become the worker of that rank, which may be another one than before."""
        with self._lock:
            self._worker = worker
            contexts = list(self._contexts.values())
        for each in contexts:
            each.forget_workers()

    def new(self) -> DistAutogradContext:
        """Begin a context here."""
        made = DistAutogradContext(self._next(self._numbers))
        with self._lock:
            self._contexts[made._id] = made
        return made

    def new_message(self) -> int:
        """An id for a message with tensors that need gradients."""
        return self._next(self._messages)

    def max_id(self) -> int:
        """The largest id that a context of this worker can have."""
        return (self._rank() << _WORKER_SHIFT) | _COUNTER_MAX

    def find(self, context_id: int) -> DistAutogradContext | None:
        """The context of that id, if it is here."""
        return self._contexts.get(context_id)

    def get(self, context_id: int) -> DistAutogradContext:
        """The context of that id; raises if there is none."""
        found = self._contexts.get(context_id)
        if found is None:
            raise RuntimeError(f"Could not find autograd context with id: {context_id}")
        return found

    def enter(self, context_id: int) -> DistAutogradContext:
        """The context of that id, which a message has brought; begins here if it is new."""
        found = self._contexts.get(context_id)
        if found is not None:
            return found
        with self._lock:
            found = self._contexts.setdefault(context_id, DistAutogradContext(context_id))
            self._until_sweep -= 1
            sweep = self._until_sweep <= 0
            if sweep:
                self._until_sweep = _SWEEP_EVERY
        if sweep:
            self._drop_orphans()
        return found

    def remove(self, context_id: int) -> DistAutogradContext | None:
        """Take a context out; it is then nobody's."""
        with self._lock:
            return self._contexts.pop(context_id, None)

    def count(self) -> int:
        """How many contexts there are."""
        return len(self._contexts)

    def _next(self, counter: itertools.count[int]) -> int:
        number = next(counter)
        if number > _COUNTER_MAX:
            raise RuntimeError("this worker has used up its ids of autograd contexts or messages")
        return (self._rank() << _WORKER_SHIFT) | number

    def _rank(self) -> int:
        if self._worker is None:
            raise RuntimeError(
                "Need to initialize distributed autograd using torch.distributed.autograd.init()"
            )
        return self._worker

    def _drop_orphans(self) -> None:
        """Release what workers began that were lost since: nobody else will."""
        from ..rpc import _agent
        from . import _release

        agent = _agent._current
        lost = agent.lost_workers() if isinstance(agent, _agent.TensorPipeAgent) else set()
        with self._lock:
            orphans = [number for number in self._contexts if rank_of(number) in lost]
        for number in orphans:
            _release.release(number)


container = _Container()

context_of_call: dict[int, DistAutogradContext] = {}
"""By their ids, the calls whose outcomes nobody has taken; their contexts keep them."""

current: ContextVar[DistAutogradContext | None] = ContextVar("tensorcall.autograd.context", default=None)
"""The context of this thread or task; it may have been released meanwhile."""


def begin_anew() -> Any:
    """In a forked child: have no contexts. What is returned, the parent's, must be kept and left alone."""
    global container
    inherited, container = container, _Container()
    context_of_call.clear()
    current.set(None)
    return inherited


def open_context() -> DistAutogradContext | None:
    """The context of this thread or task, if it is still there."""
    found = current.get()
    return None if found is None or found._released else found


def begin() -> DistAutogradContext:
    """Begin a context and make it this thread's."""
    if open_context() is not None:
        raise RuntimeError("Already have an autograd context id for this thread")
    made = container.new()
    current.set(made)
    return made


class entered:
    """In the block a context, or none, is that of this thread."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: DistAutogradContext | None) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = current.set(self._context)

    def __exit__(self, *exception: object) -> None:
        current.reset(self._token)
