"""The end of a context: here, and on the workers that this one has sent it to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from . import _context

_logger = logging.getLogger("tensorcall")

_ATTEMPTS = 5


def release(context_id: int, but: int | None = None) -> bool:
    """End a context on this worker and have those told that it went to, `but` one. False if there is none."""
    found = _context.container.remove(context_id)
    if found is None:
        return False
    if _context.current.get() is found:
        _context.current.set(None)
    known, calls = found.clear()
    known.discard(but)
    if known:
        _after(calls, partial(_tell_all, context_id, known))
    return True


def release_here(context_id: int) -> None:
    """Runs on a worker that a context was sent to, when the sender has released it.

    Where it began it has ended by now: that worker decides.
    """
    release(context_id, but=_context.rank_of(context_id))


def _after(calls: list[Any], run: Callable[[], None]) -> None:
    """Run `run` when these calls have their outcomes: a context is there as long as calls use it."""
    waiting = [call for call in calls if not call.done()]
    if not waiting:
        run()
        return
    lock = threading.Lock()
    left = len(waiting)

    def one_is_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        run()

    for call in waiting:
        call.on_done(one_is_done)


def _tell_all(context_id: int, ranks: set[int]) -> None:
    from ..rpc import _agent

    agent = _agent._current
    if not isinstance(agent, _agent.TensorPipeAgent):
        # Whoever leaves takes its group's contexts along.
        return
    with _context.entered(None):
        for rank in sorted(ranks - {agent.get_worker_info().id}):
            _tell(agent, context_id, rank, _ATTEMPTS)


def _tell(agent: Any, context_id: int, rank: int, attempts: int) -> None:
    from ..rpc import _call
    from ..rpc.constants import UNSET_RPC_TIMEOUT
    from ..rpc.internal import _internal_rpc_pickler

    if rank in agent.lost_workers() or rank not in agent._infos:
        return
    try:
        call = _call.start(
            agent, rank, release_here, (context_id,), None, UNSET_RPC_TIMEOUT, _internal_rpc_pickler
        )
    except RuntimeError as error:
        _logger.info(
            "worker %d could not be told that autograd context %d ended: %s", rank, context_id, error
        )
        return
    call.disregard()
    call.on_done(partial(_told, agent, context_id, rank, attempts, call))


def _told(agent: Any, context_id: int, rank: int, attempts: int, call: Any) -> None:
    from ..rpc import _agent

    try:
        call.result()
    except RuntimeError as error:
        if attempts > 1 and _agent._current is agent:
            _tell(agent, context_id, rank, attempts - 1)
        else:
            _logger.info("worker %d was not told that autograd context %d ended: %s", rank, context_id, error)
