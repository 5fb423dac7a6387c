"""Tests that misbehave on purpose, for the tests of the runner itself."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import Any

PIDS_VARIABLE = "TENSORCALL_PLANTED_PIDS"
"""Names the file to which the processes of a test that hangs write their ids."""


def _wait_for_ever() -> None:
    threading.Event().wait()


class PlantedTest:
    """Four ranks each, and no RPC unless the name says so."""

    rank: int

    def test_hangs_with_a_child(self: Any) -> None:
        child = subprocess.Popen(["sleep", "1000"])
        with open(os.environ[PIDS_VARIABLE], "a") as file:
            file.write(f"{os.getpid()}\n{child.pid}\n")
        if self.rank == 1:
            _wait_for_ever()

    def test_last_rank_dies(self: Any) -> None:
        if self.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_last_rank_fails(self: Any) -> None:
        self.assertNotEqual(self.rank, 3, "planted")

    def test_torch_agent_is_refused(self: Any) -> None:
        import torch
        from witness import torch_agents

        if not hasattr(torch._C, "_distributed_rpc"):
            torch._C._rpc_init()
        self.assertTrue(torch_agents())
        for agent in torch_agents():
            with self.assertRaisesRegex(RuntimeError, "out of reach"):
                agent(None, "worker", self.rank, 4, None, {}, [])

    def test_makes_no_agent(self: Any) -> None:
        pass
