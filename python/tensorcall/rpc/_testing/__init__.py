"""Fault injection, for tests of programs that use RPC.

Importing this registers the backend FAULTY_TENSORPIPE. Its agent is the ordinary one, but messages
that the options name fail before they are sent, or are sent late. Names are torch's: ``PYTHON_CALL``,
``SCRIPT_CALL``, ``PYTHON_REMOTE_CALL``, ``SCRIPT_REMOTE_CALL``, ``PYTHON_RREF_FETCH_CALL``,
``SCRIPT_RREF_FETCH_CALL``, ``RREF_FORK_REQUEST``, ``RREF_CHILD_ACCEPT``, ``RREF_USER_DELETE``.
``SCRIPT`` stands for torch operators and script functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._agent import TensorPipeAgent
from ..constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from ..options import TensorPipeRpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]


def is_available() -> bool:
    """Whether the backend FAULTY_TENSORPIPE can be used."""
    return True


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options of the backend FAULTY_TENSORPIPE.

    Args:
        num_worker_threads: as for ``TensorPipeRpcBackendOptions``.
        rpc_timeout: as for ``TensorPipeRpcBackendOptions``.
        init_method: as for ``TensorPipeRpcBackendOptions``.
        messages_to_fail: names of messages that fail at the sender.
        messages_to_delay: seconds by which messages of these names are late.
        num_fail_sends: how often one message fails before it is sent. A call fails for good each
            time; another call of the same function with the same arguments is the next attempt.
            Other messages are tried again.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method
        )
        self._messages_to_fail = list(messages_to_fail)
        self._messages_to_delay = dict(messages_to_delay or {})
        self._num_fail_sends = num_fail_sends

    @property
    def messages_to_fail(self) -> list[str]:
        """Names of messages that fail at the sender."""
        return self._messages_to_fail

    @property
    def messages_to_delay(self) -> dict[str, float]:
        """Seconds by which messages of these names are late."""
        return self._messages_to_delay

    @property
    def num_fail_sends(self) -> int:
        """How often one message fails before it is sent."""
        return self._num_fail_sends

    def _faults(self) -> Any:
        return self._messages_to_fail, self._messages_to_delay, self._num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """The agent of the backend FAULTY_TENSORPIPE."""


from . import faulty_agent_backend_registry as faulty_agent_backend_registry  # noqa: E402 (it needs the classes)
