"""What is logged, where to, and that a normal run says nothing at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ALONE = """
import logging, os, tempfile
import torch
import tensorcall.rpc as rpc

logger = logging.getLogger("tensorcall")
BEFORE
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tempfile.mkdtemp()}/store", rpc_timeout=20)
rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
assert rpc.rpc_sync("me", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
DURING
rpc.shutdown()
print("level", logger.level, "handlers", len(logger.handlers))
"""


def run(tmp_path: Path, *, before: str = "", during: str = "", **environment: str) -> tuple[list[str], str]:
    """The lines a program with one worker prints, and what it writes to stderr; warnings are errors."""
    program = tmp_path / "program.py"
    program.write_text(ALONE.replace("BEFORE", before).replace("DURING", during))
    from_outside = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        env=from_outside | environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_normal_run_prints_nothing_and_passes_with_warnings_as_errors(tmp_path: Path) -> None:
    """LOG row 116: quiet by default, and nothing is configured."""
    printed, errors = run(tmp_path)

    assert printed == ["level 0 handlers 0"]
    assert errors == ""


def test_the_variable_sets_the_level_and_shows_what_it_asks_for(tmp_path: Path) -> None:
    """LOG row 11: whoever looks for the cause of a hang can see the links."""
    printed, errors = run(tmp_path, TENSORCALL_LOG="debug")

    assert printed == ["level 10 handlers 1"]
    assert "DEBUG tensorcall[" in errors
    assert "link open" in errors


def test_what_the_program_has_configured_stays(tmp_path: Path) -> None:
    before = "logger.setLevel(logging.ERROR); logging.basicConfig(format='%(message)s', level=logging.DEBUG)"

    printed, errors = run(tmp_path, before=before, TENSORCALL_LOG="debug")

    assert printed == ["level 40 handlers 0"]
    assert errors == ""


def test_a_level_that_is_none_is_named(tmp_path: Path) -> None:
    printed, errors = run(tmp_path, TENSORCALL_LOG="loud")

    assert printed == ["level 0 handlers 0"]
    assert errors == "TENSORCALL_LOG=loud is no level: it is one of error, warn, info, debug, trace\n"


TAKE = """
import threading
from tensorcall import _tensorcall

records, enough = [], threading.Event()

class Take(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())
        if LAST in records[-1]:
            enough.set()

logger.addHandler(Take())
_tensorcall._testing.warn(COUNT)
came = enough.wait(LIMIT)
logger.handlers.clear()
print(came, len(records), *records[:1], *records[-1:], sep=" | ")
"""


def taken(tmp_path: Path, count: int, last: str, limit: float, **environment: str) -> str:
    """What came of `count` warnings from below Python, waiting at most `limit` s for one with `last`."""
    during = TAKE.replace("COUNT", str(count)).replace("LAST", repr(last)).replace("LIMIT", str(limit))
    return run(tmp_path, during=during, **environment)[0][0]


def test_messages_from_below_python_wait_in_a_queue_that_is_bounded(tmp_path: Path) -> None:
    said = taken(tmp_path, 3000, "dropped", 20)

    assert said == "True | 1025 | a warning of 100% number=0 | 1976 further messages were dropped"


def test_below_the_level_nothing_leaves_rust(tmp_path: Path) -> None:
    assert taken(tmp_path, 1, "warning", 20, TENSORCALL_LOG="warn").startswith("True | 1 | a warning")
    assert taken(tmp_path, 1, "warning", 0.2, TENSORCALL_LOG="error") == "False | 0"
