"""Numbers and strings that several modules and user programs refer to."""

from __future__ import annotations

from datetime import timedelta

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
"""Seconds a call may take unless the options or the call say otherwise."""

DEFAULT_INIT_METHOD: str = "env://"
"""Where workers meet unless the options say otherwise."""

DEFAULT_SHUTDOWN_TIMEOUT: float = 0
"""Seconds a graceful shutdown may take; 0 means no limit."""

DEFAULT_NUM_WORKER_THREADS: int = 16
"""User functions that may be at work at once on one worker."""

DEFAULT_NUM_SEND_RECV_THREADS: int = 4
"""Pieces of large tensors that a process group carries at once to one worker."""

UNSET_RPC_TIMEOUT: float = -1.0
"""The value of a ``timeout`` argument that means "the agent's default"."""

DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
"""The longest wait that c10d's stores and groups accept."""

__all__: list[str] = []
