"""Calling functions on other workers, gathering from all, and leaving.

Functions that other workers call here (`_gather_to_leader`, `_broadcast_to_followers`) go by
their names in this module, whatever it is bound to elsewhere. Several functions are looked up
through the module at the moment of use, since programs and tests replace them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch.futures
from typing_extensions import ParamSpec

from . import _agent, _call, _fork, _profiling, _rref
from ._agent import TensorPipeAgent
from ._agent import enable_gil_profiling as enable_gil_profiling
from ._futures import Future
from ._gather import AllGatherStates as AllGatherStates
from ._gather import Round
from ._rref import PyRRef as PyRRef
from ._rref import RRef
from ._scripts import eager_only
from ._worker import WorkerInfo
from .constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from .internal import _internal_rpc_pickler

__all__ = ["RRef", "get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown"]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("tensorcall")

_ignore_rref_leak = True
_DELETING_LIMIT = 100.0
"""Seconds that a shutdown waits for references to be given back, as with torch."""
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if _agent._current is None:
            raise _agent.not_set(_agent.NOT_INITIALIZED)
        return func(*args, **kwargs)

    return wrapper


def _get_current_rpc_agent() -> Any:
    """The current agent; ``RuntimeError`` if there is none."""
    return _agent.current()


def _is_current_rpc_agent_set() -> bool:
    """Whether there is a current agent."""
    return _agent.is_set()


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Make `agent` the current one and let it serve."""
    _agent.set_current(agent)


def _reset_current_rpc_agent() -> None:
    """Forget the current agent."""
    _agent.reset()


def get_rpc_timeout() -> float:
    """Seconds that a call may take by default; 0 means no limit."""
    return float(_agent.current().rpc_timeout)


def _set_rpc_timeout(rpcTimeoutSeconds: float) -> None:
    """Set the seconds that later calls may take by default; 0 means no limit."""
    agent = _agent.current()
    if rpcTimeoutSeconds < 0:
        raise RuntimeError(f"RPC Timeout must be non-negative, got {rpcTimeoutSeconds}")
    agent.rpc_timeout = float(rpcTimeoutSeconds)


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counts of references that this worker has."""
    return _rref.debug_info()


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """This worker, or the one of that name or rank.

    Raises:
        RuntimeError: there is no such worker.
    """
    info: WorkerInfo = _agent.current().get_worker_info(worker_name)
    return info


@eager_only
@_require_initialized
def rpc_sync(
    to: str | WorkerInfo | int,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on worker `to` and return its result.

    Args:
        to: the worker, by name, rank or ``WorkerInfo``.
        func: a function that the worker can import, a method of an object that can be sent, a
            torch operator or a script function; or the name that a function has there, which takes and
            returns plain data and may be in another language (docs/mixed-jobs.md).
        args: positional arguments; what cannot be sent raises here.
        kwargs: keyword arguments.
        timeout: seconds to wait; 0 waits for ever. Defaults to the agent's timeout.

    Raises:
        RuntimeError: on timeout or if `to` is gone. An exception raised by `func` is re-raised here.
    """
    profiler = _profiling.current()
    run = _rpc_sync if profiler is None else profiler.rpc_sync
    return run(to, func, args, kwargs, timeout)


def _rpc_sync(to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
    call = _call.start(_agent._current, to, func, args, kwargs, timeout, _default_pickler, waits=True)
    try:
        call.wait(None)
    except BaseException:
        # Nobody can get the result any more.
        call.cancel()
        raise
    return _call.take(call)


@eager_only
@_require_initialized
def rpc_async(
    to: str | WorkerInfo | int,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Run ``func(*args, **kwargs)`` on worker `to` and return at once with a future for its result.

    The contents of argument tensors must stay as they are until the future is done.

    Args:
        to: the worker, by name, rank or ``WorkerInfo``.
        func: as for :func:`rpc_sync`.
        args: positional arguments.
        kwargs: keyword arguments.
        timeout: seconds until the future fails; 0 means never. Defaults to the agent's timeout.

    Raises:
        Exception: the arguments cannot be sent. What goes wrong later arrives through the future.
    """
    profiler = _profiling.current()
    run = _rpc_async if profiler is None else profiler.rpc_async
    return run(to, func, args, kwargs, timeout)


def _rpc_async(to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Future[Any]:
    call = _call.start(_agent._current, to, func, args, kwargs, timeout, _default_pickler)
    future: Future[Any] = Future(call=call)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@eager_only
@_require_initialized
def remote(
    to: str | WorkerInfo | int,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on worker `to` and return at once with a reference to its result.

    The result stays on `to` as long as there are references to it. What the function raises is raised
    by those who ask for the value.

    Args:
        to: the worker, by name, rank or ``WorkerInfo``.
        func: as for :func:`rpc_sync`.
        args: positional arguments.
        kwargs: keyword arguments.
        timeout: seconds in which the value must be there; when they have passed the reference is of no
            use. 0 means no limit. Defaults to the agent's timeout.

    Raises:
        Exception: the arguments cannot be sent. What goes wrong later is raised when the value is used.
    """
    profiler = _profiling.current()
    run = _remote if profiler is None else profiler.remote
    return run(to, func, args, kwargs, timeout)


def _remote(to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
    return _rref.remote(_agent._current, to, func, args, kwargs, timeout, _default_pickler)


def _rref_typeof_on_owner(rref: PyRRef) -> type:
    """Runs on the owner: the class of a value."""
    return type(rref.local_value())


def _rref_backward_on_owner(rref: PyRRef, dist_autograd_ctx_id: int, retain_graph: bool) -> None:
    """Runs on the owner: a backward pass from a value."""
    rref.backward(dist_autograd_ctx_id, retain_graph)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Serialize the arguments of calls with `rpc_pickler` inside the block."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At the end of the block, wait for the futures of all ``rpc_async`` calls made in it.

    Only calls of this thread count. An exception of the block wins over one of a future.
    """
    _thread_local_var.future_list = []
    try:
        yield
        torch.futures.wait_all(_thread_local_var.future_list)
    finally:
        del _thread_local_var.future_list


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(
    AllGatherStates
)


@_fork.in_child
def _forget_rounds() -> None:
    global _all_gather_dict_lock
    _all_gather_dict_lock = threading.RLock()


def _init_rpc_states(agent: Any) -> None:
    """Begin with `agent`, which becomes the current one unless its handler has seen to that."""
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if _is_current_rpc_agent_set():
        return
    # An earlier group may have ended in the middle of a round; in this one all count from 0.
    with _all_gather_dict_lock:
        _all_gather_sequence_id.clear()
        _all_gather_sequence_id_to_states.clear()
    _set_and_start_rpc_agent(agent)


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: Iterable[str]) -> None:
    """Runs on the leader: note what a worker reports."""
    names = set(worker_names)
    if worker_name not in names:
        raise RuntimeError(
            f"worker {worker_name!r} reports to a gathering of {sorted(names)}, which leaves it out"
        )
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise RuntimeError(f"worker {worker_name!r} reports a second time to gathering {sequence_id}")
        states.gathered_objects[worker_name] = obj
        complete = states.gathered_objects.keys() == names
    if complete:
        states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Runs on a follower: take what the leader gathered."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise RuntimeError(f"the result of gathering {sequence_id} came a second time")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


def _sign_of_life() -> None:
    """Runs on a worker that has not reported yet: answering is all."""


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Give `obj` to all workers of a set and return what each gave, by name.

    The worker with the smallest name leads: the others report to it, and it tells all.

    Args:
        obj: what this worker gives.
        worker_names: the set, all workers by default; each of them must call this.
        timeout: seconds; 0 means no limit. By default each message has the agent's limit.

    Raises:
        RuntimeError: the limit passed, or a worker of the set was lost.
    """
    names = set(worker_names or _ALL_WORKER_NAMES)
    return Round(names, timeout, forgiving=False).run(obj)


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all workers of the set have come here; errors are logged."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until every worker that is still there has come here.

    Raises:
        RuntimeError: the limit passed.
    """
    try:
        Round(set(_ALL_WORKER_NAMES), timeout, forgiving=True).run(None)
    except RuntimeError as error:
        logger.error("not all workers came to shutdown: %s", error)
        raise


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Stop the agent of this worker.

    Args:
        graceful: first wait until all workers have called this and nothing is in flight
            anywhere. A worker of a dynamic group tells the others that it leaves and waits for its own
            calls alone. Otherwise pending calls fail and the others see this worker leave.
        timeout: seconds that waiting may take; 0 means no limit.

    Raises:
        RuntimeError: RPC is not initialized, or the limit passed; the agent is stopped all the same.
    """
    # Here, since a dynamic group is led by functions that are called as any other.
    from . import _dynamic

    agent = _get_current_rpc_agent()
    end = time.monotonic() + timeout
    try:
        if graceful and not getattr(agent, "is_static_group", True):
            agent._native.delete_rrefs(timeout or _DELETING_LIMIT, others=False)
            _dynamic.leave(agent, timeout)
            agent.join(shutdown=True, timeout=max(end - time.monotonic(), 0.001) if timeout else 0)
        elif graceful:
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=max(end - time.monotonic(), 0.001) if timeout else 0)
    finally:
        _finalize_shutdown(agent)


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = _DELETING_LIMIT) -> None:
    """Delete all references of this worker, then wait for those that others have to its values.

    Args:
        timeout: seconds after which what is left is left; 0 means no limit.
    """
    agent = _agent.current()
    if isinstance(agent, TensorPipeAgent) and not agent._native.delete_rrefs(timeout):
        logger.warning("references were not all deleted in %g s", timeout)


def _destroy_rref_context(ignore_leak: bool) -> None:
    """Look for references that others still have to values of this worker.

    Raises:
        RuntimeError: there are some, and `ignore_leak` is false.
    """
    agent = _agent.current()
    report = _rref.leak_report(agent) if isinstance(agent, TensorPipeAgent) else None
    if report is not None:
        if not ignore_leak:
            raise RuntimeError(report)
        logger.info("%s", report)


def _finalize_shutdown(agent: Any) -> None:
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        # Forgotten first: no new call starts on an agent that is going away.
        _reset_current_rpc_agent()
        agent.shutdown()
