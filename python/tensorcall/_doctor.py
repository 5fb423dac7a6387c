"""``python -m tensorcall doctor``: what this installation and this environment come to."""

from __future__ import annotations

import json
import os
import platform
import resource
import stat
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import __version__, _startup

_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
_HIDDEN = "TENSORCALL_SECRET"
_OLDEST_TORCH = (2, 9)
_FEW_FILES = 1024
_SHORT_SECRET = 16


class Finding(NamedTuple):
    """One line of the report. `state` is ``ok``, ``note`` or ``WRONG``."""

    state: str
    what: str
    text: str


def main(init_method: str) -> int:
    """Write the report to standard output; 1 if something is wrong, else 0."""
    sys.stdout.write(f"tensorcall {__version__} in {os.path.dirname(os.path.abspath(__file__))}\n")
    wrong = 0
    for finding in examine(init_method):
        sys.stdout.write(f"{finding.state:>5}  {finding.what:<14} {finding.text}\n")
        wrong += finding.state == "WRONG"
    sys.stdout.write(f"{wrong} of these keep workers from running\n" if wrong else "nothing is wrong\n")
    return int(wrong > 0)


def examine(init_method: str) -> Iterator[Finding]:
    """All findings, in the order of the report."""
    yield from _python()
    yield from _startup_file()
    yield from _environment()
    yield from _limits()
    found = list(_torch())
    yield from found
    if any(finding.state == "WRONG" for finding in found):
        return  # without torch nothing else can be asked
    for what, check in (
        ("extension", _extension),
        ("address", lambda: _addresses(init_method)),
        ("backend", _backend),
        ("secret", _secret),
    ):
        try:
            yield from check()
        except Exception as error:
            yield Finding("WRONG", what, f"{type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    implementation = platform.python_implementation()
    text = f"{implementation} {platform.python_version()}, {sys.executable}, {platform.platform()}"
    supported = sys.version_info >= (3, 11) and implementation == "CPython"
    yield Finding("ok" if supported else "WRONG", "Python", text)


def _startup_file() -> Iterator[Finding]:
    path = _startup.find_file()
    if path is None:
        text = f"no {_startup.FILE}: processes that a program starts have torch's own RPC; install by pip"
        yield Finding("note", "start-up file", text)
    else:
        yield Finding("ok", "start-up file", path)
    if _startup.is_marked():
        yield Finding(
            "ok", "installing", f"{_startup.MARK} is set: every process installs when it imports torch"
        )
    else:
        text = f"{_startup.MARK} is not set: by `python -m tensorcall run` or tensorcall.install() only"
        yield Finding("ok", "installing", text)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("WRONG", "torch", f"cannot be imported: {error}")
        return
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    text = f"{version}, {os.path.dirname(torch.__file__)}"
    if not torch.distributed.is_available():
        yield Finding("WRONG", "torch", f"{text}: built without torch.distributed")
    elif numbers < _OLDEST_TORCH:
        yield Finding("WRONG", "torch", f"{text}: older than {'.'.join(map(str, _OLDEST_TORCH))}")
    else:
        yield Finding("ok", "torch", text)


def _extension() -> Iterator[Finding]:
    from . import _tensorcall

    yield Finding("ok", "extension", str(_tensorcall.__file__))
    ways = {
        "stable": "torch's stable C interface",
        "attributes": "attributes of Python's tensors (slower; this torch has no stable C interface)",
    }
    way = str(_tensorcall._testing.path())
    yield Finding("ok" if way == "stable" else "note", "tensors", f"reached by {ways.get(way, way)}")


def _addresses(init_method: str) -> Iterator[Finding]:
    """Make an agent that nobody gets to know, and look where it listens."""
    from . import _tensorcall
    from .rpc import _membership

    why = ""
    try:
        host = _membership.meeting_host(init_method)
        ip, why = _tensorcall.listening(host)
        agent = _tensorcall.Agent(
            "doctor",
            0,
            job="doctor",
            secret=os.urandom(32),
            num_worker_threads=1,
            host=host,
            handler=object(),
        )
    except Exception as error:
        yield Finding("WRONG", "address", f"{ip}, {why}: {error}" if why else str(error))
        return
    try:
        addresses: list[str] = json.loads(agent.contact())["addresses"]
    finally:
        agent.close(False)
    kinds = ", ".join(address.partition(":")[0] for address in addresses)
    yield Finding("ok", "transports", f"{kinds}; a peer uses the first that reaches it")
    for address in addresses:
        kind, _, place = address.partition(":")
        if kind == "tcp":
            yield Finding(
                "ok", "address", f"{place.rpartition(':')[0]}: {why}; each worker takes a free port"
            )


def _backend() -> Iterator[Finding]:
    from .rpc import _groups

    if _groups.is_wanted():
        text = "gloo, or MPI if mpirun starts `python -m tensorcall run`; workers listen nowhere themselves"
        yield Finding("ok", "backend", f"{_startup.BACKEND}={os.environ[_startup.BACKEND]}: {text}")


def _secret() -> Iterator[Finding]:
    from .rpc import _membership

    try:
        secret = _membership._given_secret()
    except (OSError, RuntimeError) as error:
        yield Finding("WRONG", "secret", str(error))
        return
    if secret is None:
        text = "a random one that the first worker leaves in the store: whoever reads the store can join"
        yield Finding("ok", "secret", text)
        return
    from_variable = bool(os.environ.get(_HIDDEN))
    path = os.environ.get(f"{_HIDDEN}_FILE", "")
    yield Finding("ok", "secret", f"from {_HIDDEN}" if from_variable else f"from the file {path}")
    if len(secret) < _SHORT_SECRET:
        yield Finding("note", "secret", f"{len(secret)} bytes are few: it could be guessed")
    if not from_variable and os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield Finding("note", "secret", f"other users can read {path}")


def _environment() -> Iterator[Finding]:
    for name, value in sorted(os.environ.items()):
        if name.startswith("TENSORCALL_") or name in _VARIABLES:
            yield Finding("ok", "environment", f"{name}={'(not shown)' if name == _HIDDEN else value}")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} open files (ulimit -n), at most {_limit(hard)}"
    few: Any = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    if few:
        text += ": few for a large group, of which every worker may connect to every other"
    yield Finding("note" if few else "ok", "limits", text)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)
