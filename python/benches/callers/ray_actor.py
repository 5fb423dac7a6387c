"""Ray: calls of an actor's methods. Calls that sleep go to an actor that runs eight at once."""

from __future__ import annotations

import os
from typing import Any

import both
import functions
import numpy as np
import settings as bench
import workloads

os.environ |= {
    "PYTHONPATH": f"{both.BENCHES}:{os.environ.get('PYTHONPATH', '')}",  # for the actors
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
import ray

STORE = 5 << 30
"""Bytes of Ray's store of objects: more than all that is under way."""


class Callee:
    """What the actor can do."""

    def trivial(self, *_: Any) -> int:
        return functions.trivial()

    def add(self, a: Any, b: Any) -> Any:
        return functions.add(a, b)

    def sleep(self) -> None:
        functions.sleep()

    def swallow(self, _: Any) -> None:
        pass

    def echo(self, tensor: Any) -> Any:
        return tensor


class RayClient(workloads.Client):
    """The driver calls."""

    def __init__(self) -> None:
        actor = ray.remote(Callee)
        self._actor = actor.remote()
        self._sleeper = actor.options(max_concurrency=8, num_cpus=0).remote()
        self._pair = np.ones((2, 2), "f4"), np.ones((2, 2), "f4")
        ray.get([self._actor.trivial.remote(), self._sleeper.trivial.remote()])

    def trivial(self) -> Any:
        return ray.get(self._actor.trivial.remote())

    def add(self) -> Any:
        return ray.get(self._actor.add.remote(*self._pair))

    def start(self, function: str, tensor: Any = None) -> Any:
        method = getattr(self._sleeper if function == "sleep" else self._actor, function)
        return method.remote() if tensor is None else method.remote(tensor)

    def wait(self, handle: Any) -> Any:
        return ray.get(handle)

    def tensor(self, size: int) -> Any:
        return np.ones(size // 4, "f4")


def main() -> None:
    """Starts Ray and calls."""
    options = bench.parser().parse_args()
    bench.place(options.placement, options.role)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=STORE,
    )
    workloads.run(RayClient(), bench.settings_of(options))
    ray.shutdown()


if __name__ == "__main__":
    main()
