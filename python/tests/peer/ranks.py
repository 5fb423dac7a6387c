"""The ranks of one test: forked, one process each, and watched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase
from witness import Witness

FOLDER_VARIABLE = "TENSORCALL_PEER_FOLDER"
"""Names, to a rank, the folder of its test."""


class ForkedRanks(MultiProcessTestCase):  # type: ignore[no-untyped-call]
    """Starts the ranks by fork and lets each leave evidence of the agent it used.

    torch's own helper spawns them, which imports torch once more for every rank of every test.
    """

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _spawn_processes(self) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        witness = Witness(Path(os.environ[FOLDER_VARIABLE]), self.rank)
        witness.watch()
        try:
            super().run_test(test_name, parent_pipe)
        finally:
            witness.leave()

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        """Also fails for a rank that died by a signal; upstream looks at rank 0 only."""
        super()._check_return_codes(fn, elapsed_time)
        for rank, process in enumerate(self.processes):
            if process.exitcode is not None and process.exitcode < 0:
                raise RuntimeError(f"rank {rank} died by signal {-process.exitcode}")
