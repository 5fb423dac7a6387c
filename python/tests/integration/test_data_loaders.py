"""Data loaders with worker processes, beside a live agent that makes and serves calls meanwhile (FORK-1)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 1000
BATCH = 8


def add(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor + number


def load(worker: Worker, method: str) -> dict[str, Any]:
    """Loads all batches, has the other worker add to every tenth of them, and is called all the time."""
    worker.start(timeout=25)
    peer = f"w{1 - worker.rank}"
    over = threading.Event()
    calls = [0]

    def call() -> None:
        while not over.is_set():
            assert rpc.rpc_sync(peer, max, args=(1, 2)) == 2
            calls[0] += 1
            over.wait(0.001)

    caller = threading.Thread(target=call)
    caller.start()
    data = TensorDataset(torch.arange(BATCHES * BATCH))
    loader = DataLoader(data, batch_size=BATCH, num_workers=2, multiprocessing_context=method)
    total, batches, before = 0, 0, calls[0]
    for (batch,) in loader:
        if batches % 10 == 0:
            batch = rpc.rpc_sync(peer, add, args=(batch, 1)) - 1
        total += int(batch.sum())
        batches += 1
    meanwhile = calls[0] - before
    over.set()
    caller.join()
    rpc.shutdown()
    return {"batches": batches, "total": total, "meanwhile": meanwhile}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_loader_runs_beside_an_agent(group: Group, method: str) -> None:
    """LOG row 10: workers of a loader end well, whatever the order of exit handlers."""
    count = BATCHES * BATCH

    for seen in group.run(load, load, arguments=(method,)):
        assert seen["batches"] == BATCHES
        assert seen["total"] == count * (count - 1) // 2
        assert seen["meanwhile"] > 0
