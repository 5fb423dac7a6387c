"""Two agents of the extension in one process, without the package's interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorcall import _tensorcall
from tensorcall.rpc._handler import Handler
from tensorcall.rpc._worker import WorkerInfo


class NativeWorker(Handler):
    """A handler with an agent of its own, worker0 or worker1, not yet open.

    Args:
        plain: it says of itself that it is no Python program.
    """

    def __init__(self, rank: int, *, plain: bool = False) -> None:
        super().__init__(WorkerInfo(f"worker{rank}", rank))
        self.native = _tensorcall.Agent(
            f"worker{rank}",
            rank,
            job="native pair",
            secret=b"secret",
            num_worker_threads=4,
            host=None,
            handler=self,
            plain=plain,
        )


@contextmanager
def joined(first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    """Two of them as one group, until the end of the block."""
    pair = first, second
    roster = [(f"worker{rank}", rank, worker.native.contact()) for rank, worker in enumerate(pair)]
    for worker in pair:
        worker.native.open(roster, False)
    try:
        yield pair
    finally:
        for worker in pair:
            worker.native.close(False)
