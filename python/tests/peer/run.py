"""Runs torch's own RPC tests, as they are in the installed wheel, against tensorcall.

    python run.py                                the tests that are known to pass (expected/)
    python run.py --all                          every test that is not in skip.txt
    python run.py --list static_calls            the tests of expected/static_calls.txt
    python run.py --filter 'RpcTest.test_add'    the tests whose id matches a regular expression
    python run.py --filter ids.txt               the tests whose ids stand in a file
    python run.py --engine torch                 the same on torch's own agent, to compare
    python run.py --backend process_group        the same through a process group

Ids are those of torch's own run, such as `TensorPipeRpcTest.test_add`. One process loads torch and
the test classes once and forks a process per test, which forks the test's ranks. A test that runs
past its limit is killed with all its processes, after they wrote their stacks. A backend other than the
default one has a list of tests to skip of its own, `skip_NAME.txt`, besides `skip.txt`. Exit status: 0 if
all passed, 1 if any failed, 2 if no test was selected.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import select
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from case import Case
    from report import Report

HERE = Path(__file__).resolve().parent
KNOWN = ("static_calls", "further")
"""The lists of the tests that pass; a change that makes one fail is wrong."""

_DEFAULTS = {
    # One thread in the process that forks, and two cores that are not fought over.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Machines whose host name does not resolve still have a loopback device.
    "TP_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="peer-suite", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--all", action="store_true", help="every test, not only the known ones")
    parser.add_argument("--filter", help="regular expression on ids, or a file of ids")
    parser.add_argument("--list", action="append", help="a list (expected/NAME.txt), or a file of ids")
    parser.add_argument("--engine", choices=["tensorcall", "torch"], default="tensorcall")
    parser.add_argument("--backend", choices=["tensorpipe", "process_group"], default="tensorpipe")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--results", type=Path, help="file for the outcomes, as JSON lines")
    parser.add_argument("--no-skips", action="store_true", help="run the tests of skip.txt too")
    parser.add_argument("--collect", action="store_true", help="print the ids, run nothing")
    parser.add_argument("--module", action="append", default=[], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def read_ids(file: Path) -> dict[str, str]:
    """The ids in `file` and what stands behind each; `#` begins a comment line."""
    ids = {}
    for line in file.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            test_id, _, rest = line.strip().partition("\t")
            ids[test_id.split()[0]] = rest.strip()
    return ids


def select_ids(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The ids to run, and a complaint per suite that could not be loaded."""
    import suites

    wanted: list[str] | None = None
    pattern = re.compile("")
    lists = options.list or ([] if options.all or options.filter else KNOWN)
    if lists:
        wanted = [test_id for name in lists for test_id in read_ids(_list_file(name))]
    if options.filter and Path(options.filter).is_file():
        wanted = list(read_ids(Path(options.filter)))
    elif options.filter:
        pattern = re.compile(options.filter)
    names = list(suites.RECIPES)
    if wanted is not None:
        names = [name for name in names if any(i.startswith(name + ".") for i in wanted)]
    found, complaints = [], []
    for name in names:
        if not _may_match(pattern, name):
            continue
        try:
            tests = suites.load(name)
        except BaseException:  # an import that exits or fails is a finding, not our end
            complaints.append(f"{name} could not be loaded\n{traceback.format_exc()}")
            continue
        found += [f"{name}.{test}" for test in tests]
    if wanted is not None:
        missing = [i for i in wanted if i not in found]
        complaints += [f"{i} is listed but does not exist" for i in missing]
        found = [i for i in found if i in set(wanted)]
    return [i for i in found if pattern.search(i)], complaints


def _skips(backend: str) -> dict[str, str]:
    """The tests that are not run on a backend, and why."""
    files = [HERE / "skip.txt", HERE / f"skip_{backend}.txt"]
    return {test_id: why for file in files if file.exists() for test_id, why in read_ids(file).items()}


def _list_file(name: str) -> Path:
    named = HERE / "expected" / f"{name}.txt"
    return named if named.exists() else Path(name)


def _may_match(pattern: re.Pattern[str], suite: str) -> bool:
    """Whether a suite is worth loading: false if the pattern begins with another suite's name."""
    head = re.match(r"\^?(\w+)\\?\.[^|]*$", pattern.pattern)
    return head is None or suite.endswith(head[1])


def run_all(ids: Iterable[str], options: argparse.Namespace, report: Report) -> None:
    """Runs the tests, `options.jobs` at a time."""
    from case import Case
    from witness import Demands

    without_agent = read_ids(HERE / "expected" / "no_agent.txt")
    without_calls = read_ids(HERE / "expected" / "no_calls.txt")
    waiting = list(ids)[::-1]
    running: dict[int, Case] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            test_id = waiting.pop()
            demands = None
            if options.engine == "tensorcall":
                demands = Demands.CALLS
                if test_id in without_agent:
                    demands = Demands.PLACE
                elif test_id in without_calls:
                    demands = Demands.AGENT
            case = Case(test_id, options.limit, demands)
            running[case.pidfd] = case
        for descriptor in _ended(running):
            report.add(running.pop(descriptor).finish())
        now = time.monotonic()
        for descriptor in [d for d, case in running.items() if case.deadline <= now]:
            report.add(running.pop(descriptor).expire())


def _ended(running: dict[int, Case]) -> list[int]:
    """Waits for a test to end or to reach its deadline; the descriptors of those that ended."""
    poll = select.poll()
    for descriptor in running:
        poll.register(descriptor, select.POLLIN)
    first = min(case.deadline for case in running.values())
    left = max(0.0, first - time.monotonic())
    return [descriptor for descriptor, _ in poll.poll(int(left * 1000) + 1)]


def main(arguments: list[str]) -> int:
    """The command."""
    options = parse(arguments)
    sys.path.insert(0, str(HERE))
    sys.argv = sys.argv[:1]  # torch's test helpers read it too
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)

    warnings.filterwarnings("ignore", message=".*torch.jit", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)

    import suites
    import witness

    witness.choose_engine(options.engine, options.backend)
    for module in options.module:
        suites.add_module(module)
    ids, complaints = select_ids(options)
    if options.collect:
        print("\n".join(ids))
        return 1 if complaints else 0

    from case import Outcome
    from report import Report

    skips = {} if options.no_skips else _skips(options.backend)
    report = Report(len(ids) + len(complaints), options.results)
    for complaint in complaints:
        report.add(Outcome(complaint.split()[0], "fail", 0.0, error=complaint))
    for test_id in [i for i in ids if i in skips]:
        report.add(Outcome(test_id, "skip", 0.0, error=skips[test_id]))
    if not ids and not complaints:
        print("no test was selected", file=sys.stderr)
        return 2
    gc.collect()
    gc.freeze()  # so that the forked processes do not copy pages for the collector's sake
    run_all([i for i in ids if i not in skips], options, report)
    return report.close()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # libraries that torch loads complain at an ordinary exit
