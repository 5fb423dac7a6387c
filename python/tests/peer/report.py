"""What a run of the peer suite tells: a line per test, a summary, and a file for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from case import Outcome


class Report:
    """Prints each outcome as it comes and, if asked, writes it to a file of JSON lines."""

    def __init__(self, total: int, results: Path | None, out: TextIO = sys.stdout) -> None:
        self._total = total
        self._out = out
        self._started = time.monotonic()
        self._outcomes: list[Outcome] = []
        self._file: TextIO | None = None
        if results is not None:
            results.parent.mkdir(parents=True, exist_ok=True)
            self._file = results.open("w")

    def add(self, outcome: Outcome) -> None:
        """Takes one test's outcome."""
        self._outcomes.append(outcome)
        if self._file is not None:
            self._file.write(json.dumps(asdict(outcome)) + "\n")
            self._file.flush()
        count = f"[{len(self._outcomes):3}/{self._total}]"
        print(
            f"{count} {outcome.outcome:7} {outcome.seconds:6.2f} s  {outcome.id}",
            file=self._out,
            flush=True,
        )

    def close(self) -> int:
        """Prints what failed and the summary; returns the exit status, 0 if nothing failed."""
        if self._file is not None:
            self._file.close()
        failed = [o for o in self._outcomes if o.outcome in ("fail", "timeout")]
        for outcome in failed:
            print(f"\n--- {outcome.outcome}: {outcome.id}\n{outcome.error}", file=self._out)
        calls = sum(outcome.calls for outcome in self._outcomes)
        seconds = time.monotonic() - self._started
        print(f"\n{seconds:.1f} s; tensorcall agents sent {calls} calls", file=self._out)
        print(self.summary(), file=self._out, flush=True)
        return 1 if failed else 0

    def summary(self) -> str:
        """One line: how many passed, failed and were skipped; the failed include the timed out."""
        count = Counter(outcome.outcome for outcome in self._outcomes)
        failed = count["fail"] + count["timeout"]
        line = f"{count['pass']} passed, {failed} failed, {count['skip']} skipped"
        return line + (f" ({count['timeout']} of the failed timed out)" if count["timeout"] else "")
