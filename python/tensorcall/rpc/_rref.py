"""References to values on other workers.

The extension counts who refers to what; here is what programs see of it. An `RRef` is pickled only
inside a message: its place is taken by an index into the message's table of references, as with
tensors. The extension shares what stands in the table, so that a reference is accounted for even if
the message is never unpickled.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import torch

from ..autograd import _context
from . import _agent, _call, _fork, internal
from ._autograd import autograd
from ._futures import Future
from ._worker import WorkerInfo
from .constants import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from .. import _tensorcall
    from .rref_proxy import RRefProxy

T = TypeVar("T")

_NOT_BY_PICKLE = "Can not pickle rref in python pickler, rref can only be pickled when using RPC"

_lock = threading.Lock()
"""For what an `RRef` makes when first asked: held for moments only."""


@_fork.in_child
def _have_a_free_lock() -> None:
    global _lock
    _lock = threading.Lock()


class PyRRef:
    """A reference to a value on some worker, which keeps that value alive.

    Made from a value, the reference is to a value of this worker; those of others come from
    ``rpc.remote`` and in messages. A reference can be sent to any worker, and nowhere else.

    Args:
        value: what to refer to; it is kept, not copied.
        type_hint: the interface of a ScriptModule, and nothing for other values.

    Raises:
        RuntimeError: RPC is not initialized, or the type hint is missing or out of place.
    """

    _native: _tensorcall.RRef
    _agent: Any
    _owner: WorkerInfo
    _call: _tensorcall.Call | _call.Unsent | None = None
    _label = "a value"
    _creation: Future[None] | None = None
    _type: Future[type] | None = None
    _profiling: torch.futures.Future[Any] | None = None

    def __init__(self, value: Any, type_hint: Any = None) -> None:
        agent = _agent.current()
        _check_hint(value, type_hint)
        self._take(agent, agent._native.make_rref(value, _site()))

    def _take(self, agent: Any, native: _tensorcall.RRef) -> None:
        self._agent = agent
        self._native = native
        self._owner = agent._info_of(native.owner(), native.owner_name())

    def is_owner(self) -> bool:
        """Whether the value is on this worker."""
        return self._native.is_owner()

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._owner

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference. One that came as an argument is known."""
        return self._native.confirmed()

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """The value: the very object on its owner, else a copy, fetched anew each time.

        Args:
            timeout: seconds; 0 means no limit. Defaults to the agent's timeout; the owner, which
                waits for a function of its own, then has no limit.

        Raises:
            RuntimeError: the limit passed, the value could not be created, or the owner is gone.
            Exception: what the function raised that should have made the value.
        """
        self._look()
        if self._native.is_owner():
            return self._local(timeout)
        if isinstance(self._call, _call.Unsent):
            self._check_usable()
        call = self._fetch(_call.limit_of(self._agent, timeout))
        try:
            call.wait(None)
        except BaseException:
            call.cancel()
            raise
        return _call.take(call)

    def _fetch(self, limit: float) -> _tensorcall.Call:
        label = f"to_here of {self._label}"
        context = _context.open_context()
        if context is None:
            return self._native.fetch(limit, label)
        call = self._native.fetch(limit, label, (context._context_id(), None))
        context.sends_to(self._owner.id)
        context.add_call(call, None)
        return call

    def local_value(self) -> Any:
        """The value, on its owner, once it is there.

        Raises:
            RuntimeError: this worker is not the owner.
            Exception: what the function raised that should have made the value.
        """
        if not self._native.is_owner():
            rref, fork = _id(self._native.rref_id()), _id(self._native.fork_id())
            me = self._agent.get_worker_info()
            raise RuntimeError(
                f"For UserRRef(rref_id={rref}, fork_id={fork}), can't call localValue() on user {me}. "
                f"Call it on owner {self._owner}"
            )
        self._look()
        return self._local(UNSET_RPC_TIMEOUT)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """A proxy whose methods run those of the value on its owner, and return their results.

        Args:
            timeout: seconds that a call may take; 0 means no limit. Defaults to the agent's timeout.
        """
        return self._proxy("rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """As :meth:`rpc_sync`, with futures for the results."""
        return self._proxy("rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """As :meth:`rpc_sync`, with references to the results, which stay on the owner."""
        return self._proxy("remote", timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass with the value, a tensor, as its root.

        Args:
            dist_autograd_ctx_id: the distributed autograd context in which to do it. Only the owner
                may leave it out: the pass is then a local one.
            retain_graph: keep the graph for another pass.
        """
        from . import api

        if self._native.is_owner():
            _backward(self.local_value(), dist_autograd_ctx_id, retain_graph)
        elif dist_autograd_ctx_id == -1:
            raise RuntimeError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified, so that the backward pass can be "
                "run on the owner"
            )
        else:
            api.rpc_sync(
                self._owner, api._rref_backward_on_owner, args=(self, dist_autograd_ctx_id, retain_graph)
            )

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The class of the value, or without `blocking` a future for it.

        Another worker is asked once; an answer is kept, a failure is not.
        """
        self._look()
        if self._native.is_owner():
            if blocking:
                return type(self._local(timeout))
            if self._native.has_value():
                known: Future[type] = Future()
                known.set_result(type(self._local(timeout)))
                return known
        future = self._ask_for_type(timeout)
        return future.wait() if blocking else future

    def _ask_for_type(self, timeout: float) -> Future[type]:
        from . import api

        known = self._type
        if known is None or known.has_failed():
            asked = api.rpc_async(self._owner, api._rref_typeof_on_owner, args=(self,), timeout=timeout)
            with _lock:
                if self._type is known:
                    self._type = asked
                known = self._type
        return cast("Future[type]", known)

    def _get_future(self) -> Future[None]:
        """The future of the call that creates the value; done when the owner has it."""
        with _lock:
            if self._creation is None:
                if self._call is None:
                    raise RuntimeError(f"{self} was not returned by rpc.remote: no call creates its value")
                self._creation = Future(call=self._call)
            return self._creation

    def _get_profiling_future(self) -> torch.futures.Future[Any]:
        """The future that is done when a profiler has its entry of the call that creates the value."""
        if self._profiling is None:
            raise RuntimeError(f"{self} has no profiling future: no profiler was on when it was made")
        return self._profiling

    def _set_profiling_future(self, future: torch.futures.Future[Any]) -> None:
        """Set what :meth:`_get_profiling_future` returns."""
        self._profiling = future

    def _serialize(self) -> tuple[Any, ...]:
        """What stands for this reference in the message that is being pickled: for reducers of one's own.

        A tuple of seven: rank of the owner, the two numbers of the value's id, the two of this
        reference's, its place in the message's table, and the kind of value.
        """
        self._check_usable()
        index = internal.place_of_rref(self._native)
        if index is None:
            raise RuntimeError(_NOT_BY_PICKLE)
        return (self._owner.id, *self._native.rref_id(), *self._native.fork_id(), index, "PyObject")

    @staticmethod
    def _deserialize(fork: tuple[Any, ...]) -> RRef[Any]:
        """The reference that :meth:`_serialize` gave the tuple for, in the message that is being read."""
        return receive(fork[5])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._check_usable()
        index = internal.place_of_rref(self._native)
        if index is None:
            raise RuntimeError(_NOT_BY_PICKLE)
        return receive, (index,)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(_NOT_BY_PICKLE)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(_NOT_BY_PICKLE)

    def __repr__(self) -> str:
        native = self._native
        if native.is_owner():
            return f"OwnerRRef({_id(native.rref_id())})"
        return f"UserRRef(RRefId = {_id(native.rref_id())}, ForkId = {_id(native.fork_id())})"

    def _local(self, timeout: float) -> Any:
        limit = None if timeout in (UNSET_RPC_TIMEOUT, 0) else max(timeout, 0.0)
        return self._native.local_value(limit)

    def _proxy(self, name: str, timeout: float) -> RRefProxy:
        from . import api
        from .rref_proxy import RRefProxy

        return RRefProxy(self, getattr(api, name), timeout)

    def _look(self) -> None:
        """Whatever became of the creation, somebody is about to hear of it."""
        if self._creation is not None:
            self._creation._look()
        elif self._call is not None:
            self._call.disregard()

    def _check_usable(self) -> None:
        """Raise if the reference can no longer be passed on."""
        if isinstance(self._call, _call.Unsent):
            raise RuntimeError(f"RRef creation via rpc.remote() failed: {self._call.error}")
        self._native.check()


class RRef(PyRRef, Generic[T]):
    """A reference to a value of type ``T`` on some worker; see :class:`PyRRef`."""

    if TYPE_CHECKING:

        def __init__(self, value: T, type_hint: Any = None) -> None: ...
        def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T: ...
        def local_value(self) -> T: ...


def remote(agent: Any, to: Any, func: Any, args: Any, kwargs: Any, timeout: float, pickler: Any) -> RRef[Any]:
    """Make a call whose result stays with the callee, and return the reference to it."""
    native, call, label = _call.start_remote(agent, to, func, args, kwargs, timeout, pickler)
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._take(agent, native)
    rref._call = call
    rref._label = label
    return rref


def receive(index: int) -> RRef[Any]:
    """The reference in that place of the message that is being read."""
    return wrap(internal.rref_at(index))


def wrap(native: _tensorcall.RRef) -> RRef[Any]:
    """A reference that has come in a message."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._take(_agent.current(), native)
    return rref


def debug_info() -> dict[str, str]:
    """How many references this worker has."""
    counts = {"num_owner_rrefs": 0, "num_pending_futures": 0, "num_pending_users": 0, "num_forks": 0}
    if _agent.is_set():
        native = getattr(_agent.current(), "_native", None)
        if native is not None:
            counts |= native.rref_counts()
    return {name: str(count) for name, count in counts.items()}


def leak_report(agent: Any) -> str | None:
    """Which references others still have to values of this worker; ``None`` if there are none."""
    lines = []
    for rref_id, fork_id, holder, label in agent._native.leaks():
        where = f", made at {label}" if label else ""
        lines.append(
            f"Leaking RRef {_id(rref_id)} with fork Id {_id(fork_id)}, which worker "
            f"'{agent._info_of(holder).name}' has{where}"
        )
    return "\n".join(lines) or None


def _backward(value: Any, context_id: int, retain_graph: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"RRef should contain a tensor for .backward(), not {type(value).__name__}")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        autograd().backward(context_id, [value], retain_graph)


def _check_hint(value: Any, type_hint: Any) -> None:
    if isinstance(value, torch.jit.ScriptModule):
        if type_hint is None:
            raise RuntimeError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
            )
        if not hasattr(type_hint, "__torch_script_interface__"):
            raise RuntimeError(
                f"the type hint of a ScriptModule must be a torch.jit.interface, not {type_hint!r}"
            )
    elif type_hint is not None:
        raise RuntimeError(
            "type_hint should only be specified when the RRef being created contains a ScriptModule."
        )


def _site() -> str:
    """Where the program is that makes a reference."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_SITES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_NOT_SITES = (__name__.partition(".")[0], "typing")


def _id(pair: tuple[int, int]) -> str:
    return f"GloballyUniqueId(created_on={pair[0]}, local_id={pair[1]})"
