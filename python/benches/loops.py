"""The loops that time calls, and the figures that they print."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

WARM_LIMIT = 1.0
"""Seconds after which a warm-up ends at the latest: the largest tensors take some peers long."""
Start = Callable[[], Any]
Wait = Callable[[Any], Any]


def emit(workload: str, metric: str, value: float) -> None:
    """Prints one figure."""
    print(json.dumps({"workload": workload, "metric": metric, "value": value}), flush=True)


class CpuClock:
    """CPU time of a process and of all that it has started, all threads, in the kernel and outside."""

    def __init__(self, root: int) -> None:
        self._processes = [root, *descendants(root)]

    def used(self) -> float:
        """Seconds until now."""
        seconds = 0.0
        for process in self._processes:
            with suppress(OSError):  # it has ended
                seconds += time.clock_gettime(~process << 3 | 2)  # as `clock_getcpuclockid` makes it
        return seconds


def descendants(root: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, todo = [], [root]
    while todo:
        todo += (more := children.get(todo.pop(), []))
        found += more
    return found


class Timer:
    """Times the calls of one client."""

    def __init__(self, calls: int, seconds: float, root: int | None = None) -> None:
        self._calls, self._seconds = calls, seconds
        self._root = root or os.getpid()

    def latency(self, workload: str, call: Start, share: float = 1.0) -> None:
        """Single calls, one after another: p50 and p99, and CPU time per call.

        As many as were asked for, or that share of them, unless that takes four times the seconds of the
        other workloads.
        """
        count = max(20, int(self._calls * share))
        self._repeat(call, count // 4, self._seconds)
        clock = CpuClock(self._root)
        gc.collect()
        used = clock.used()
        times = self._repeat(call, count, 4 * self._seconds)
        used = clock.used() - used
        emit(workload, "CPU us", used / len(times) * 1e6)
        emit_times(workload, times)

    @staticmethod
    def _repeat(call: Start, count: int, limit: float) -> list[int]:
        times: list[int] = []
        now = time.perf_counter_ns
        end = now() + int(limit * 1e9)
        while len(times) < count and (start := now()) < end:
            call()
            times.append(now() - start)
        return times or [0]

    def rate(self, workload: str, start: Start, wait: Wait, in_flight: int) -> None:
        """Calls per second with so many under way all the time, and CPU time per call."""
        calls, took, used, _ = self._measure(start, wait, in_flight, self._seconds)
        emit(workload, "calls/s", calls / took)
        emit(workload, "CPU us", used / calls * 1e6)

    def bulk(self, workload: str, start: Start, wait: Wait, size: int, in_flight: int) -> None:
        """Bytes per second of calls that carry so many; with one in flight also what a call takes.

        The first few calls touch memory for the first time, on all sides, which costs more than the copies.
        """
        warm, at_least = 3 * in_flight + 4, 2 * in_flight
        calls, took, used, times = self._measure(start, wait, in_flight, self._seconds / 2, at_least, warm)
        emit(workload, "GB/s", calls * size / took / 1e9)
        emit(workload, "CPU us", used / calls * 1e6)
        if in_flight == 1:
            emit_times(workload, times)

    def parallel(self, workload: str, start: Start, wait: Wait, count: int) -> None:
        """Some calls at once: the median of how long they take together."""
        times = []
        for _ in range(4):
            began = time.perf_counter()
            for handle in [start() for _ in range(count)]:
                wait(handle)
            times.append(time.perf_counter() - began)
        emit(workload, "ms", sorted(times)[1] * 1e3)

    def _measure(
        self, start: Start, wait: Wait, in_flight: int, seconds: float, at_least: int = 0, warm: int = 0
    ) -> tuple[int, float, float, list[int]]:
        window(start, wait, in_flight, seconds / 4, warm, WARM_LIMIT)
        clock = CpuClock(self._root)
        gc.collect()
        used = clock.used()
        times = window(start, wait, in_flight, seconds, at_least)
        used = clock.used() - used
        return len(times), sum(times) / 1e9, used, times


def window(
    start: Start, wait: Wait, in_flight: int, seconds: float, at_least: int, limit: float = math.inf
) -> list[int]:
    """Keeps calls under way; the times between the ends of one and the next, in nanoseconds.

    For so many seconds, and until there are `at_least` so many calls, unless that takes longer than `limit`.
    """
    waiting = deque(start() for _ in range(in_flight))
    times: list[int] = []
    now = time.perf_counter_ns
    before = now()
    end, last = before + seconds * 1e9, before + limit * 1e9
    while (len(times) < max(1, at_least) and before < last) or before < end:
        wait(waiting.popleft())
        waiting.append(start())
        after = now()
        times.append(after - before)
        before = after
    for handle in waiting:
        wait(handle)
    return times


def emit_times(workload: str, times: list[int]) -> None:
    """Prints the median and the 99th percentile of times in nanoseconds."""
    times.sort()
    emit(workload, "p50 us", times[len(times) // 2] / 1e3)
    emit(workload, "p99 us", times[len(times) * 99 // 100] / 1e3)
