"""Groups of worker processes for tests: quick to start, with a deadline, never left behind.

A test file defines the functions that its workers run and the tests that judge what came of them:

    def caller(worker: Worker) -> int:
        with worker.joined():
            return rpc.rpc_sync("w1", min, args=(1, 2))

    def test_something(group: Group) -> None:
        assert group.run(caller, serve)[0] == 1

Workers are forked from a server process that has torch loaded, so they start in milliseconds and
have nothing of pytest in them. Each is the leader of its own session; when the deadline passes all
are made to write their stacks and are killed, and the test fails with what they had written.

`TENSORCALL_TEST_ENGINE=torch` runs the same workers on torch's own agent, to compare.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

ENGINE_VARIABLE = "TENSORCALL_TEST_ENGINE"

_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TP_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
_STACKS_WAIT = 1.0
_LOG_LINES = 60


@dataclass
class Worker:
    """What a function that runs in a worker process gets: where it is, and a line to the test."""

    rank: int
    world_size: int
    init_method: str
    _pipe: Any = None

    @property
    def name(self) -> str:
        """The name that `start` joins under: w0, w1, …"""
        return f"w{self.rank}"

    def start(self, *, threads: int = 16, timeout: float = 30.0, name: str | None = None) -> None:
        """Joins the group: `init_rpc` with a pool of `threads` and calls that last `timeout` s."""
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads, rpc_timeout=timeout, init_method=self.init_method
        )
        rpc.init_rpc(
            name or self.name,
            rank=self.rank,
            world_size=self.world_size,
            rpc_backend_options=options,
        )

    @contextmanager
    def joined(self, **options: Any) -> Iterator[None]:
        """Joins as `start` does and, if all went well, leaves by graceful shutdown."""
        from torch.distributed import rpc

        self.start(**options)
        yield
        rpc.shutdown()

    def tell(self, what: Any) -> None:
        """Sends `what` to the test, which takes it by `Group.hear`."""
        self._pipe.send_bytes(pickle.dumps(("told", what)))

    def hear(self) -> Any:
        """Waits for what the test says by `Group.tell`."""
        return pickle.loads(self._pipe.recv_bytes())

    def heard(self) -> bool:
        """Whether the test has said something that was not taken yet."""
        return bool(self._pipe.poll())


def serve(worker: Worker, *_arguments: Any) -> None:
    """A worker that answers calls until nobody has any left."""
    with worker.joined():
        pass


@dataclass
class Outcome:
    """How one worker ended."""

    value: Any = None
    """What its function returned."""
    raised: str = ""
    """The traceback of what its function raised."""
    exit_code: int | None = None
    """Of the process, negative for a signal."""
    told: list[Any] = field(default_factory=list)
    """What it told the test and the test did not hear yet."""


class Group:
    """The workers of one test of the file `tests`, which must end within `deadline` seconds.

    Every worker loads that file, so that each can run what another asks for. Logs go to `folder`.
    """

    def __init__(self, tests: Path, folder: Path, deadline: float = 30.0) -> None:
        self._tests = tests
        self.deadline = time.monotonic() + deadline
        self.environment: dict[str, str] = {}
        self._folder = folder
        self._port = _free_port()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._outcomes: list[Outcome] = []

    def run(self, *functions: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> list[Any]:
        """Runs each function in a worker of its own; what they returned, if none failed."""
        self.start(*functions, arguments=arguments)
        return [outcome.value for outcome in self.finish()]

    def start(self, *functions: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> None:
        """Starts one worker per function, which is called with its `Worker` and `arguments`."""
        for rank, function in enumerate(functions):
            self.add(function, rank, len(functions), arguments)

    def add(
        self,
        function: Callable[..., Any],
        rank: int,
        world_size: int,
        arguments: tuple[Any, ...] = (),
    ) -> int:
        """Starts one worker; its place among the workers of this group."""
        context = _context()
        near, far = context.Pipe()
        worker = Worker(rank, world_size, f"tcp://127.0.0.1:{self._port}", far)
        process = context.Process(
            target=_work,
            args=(self._tests, function.__name__, worker, arguments),
            kwargs={
                "log": str(self._log(len(self._processes))),
                "environment": _inherited() | self.environment,
            },
        )
        process.start()
        far.close()
        self._processes.append(process)
        self._pipes.append(near)
        self._outcomes.append(Outcome())
        return len(self._processes) - 1

    def pid(self, index: int) -> int:
        """The process id of a worker."""
        pid = self._processes[index].pid
        assert pid is not None
        return int(pid)

    def kill(self, index: int) -> None:
        """Kills a worker, as `kill -9` does."""
        os.kill(self.pid(index), signal.SIGKILL)

    def tell(self, index: int, what: Any) -> None:
        """Says something to a worker, which takes it by `Worker.hear`."""
        self._pipes[index].send_bytes(pickle.dumps(what))

    def hear(self, index: int) -> Any:
        """Waits for the next thing that a worker tells."""
        while not self._outcomes[index].told:
            if self._left() <= 0 or not self._listen([index]):
                self._fail(f"worker {index} told nothing")
        return self._outcomes[index].told.pop(0)

    def log(self, index: int) -> str:
        """What a worker wrote to its standard output and error so far."""
        file = self._log(index)
        return file.read_text(errors="replace") if file.exists() else ""

    def finish(self, *, expect_killed: tuple[int, ...] = ()) -> list[Outcome]:
        """Waits for all workers to end; fails if one raised, died or is still there at the deadline.

        The workers in `expect_killed` may have been killed.
        """
        open_pipes = list(range(len(self._pipes)))
        while open_pipes and self._left() > 0:
            self._listen(open_pipes)
            open_pipes = [i for i in open_pipes if not self._pipes[i].closed]
            if any(o.raised for i, o in enumerate(self._outcomes) if i not in expect_killed):
                self.deadline = min(self.deadline, time.monotonic() + _STACKS_WAIT)
        for index, process in enumerate(self._processes):
            process.join(max(0.0, self._left()))
            self._outcomes[index].exit_code = process.exitcode
        for index, outcome in enumerate(self._outcomes):
            if index not in expect_killed and (outcome.raised or outcome.exit_code not in (0, None)):
                self._fail(f"worker {index} ended with {outcome.exit_code}")
        late = [i for i, outcome in enumerate(self._outcomes) if outcome.exit_code is None]
        if late:
            self._fail(f"workers {late} were still there at the deadline")
        return self._outcomes

    def close(self) -> None:
        """Kills whatever is left of the workers and of the processes that they started."""
        for process in self._processes:
            if process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join(5)
        for pipe in self._pipes:
            pipe.close()

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _listen(self, indices: list[int]) -> bool:
        """Takes in what the workers send; false if nothing came or a worker has gone."""
        by_pipe = {self._pipes[i]: i for i in indices if not self._pipes[i].closed}
        alive = bool(by_pipe)
        for pipe in wait(list(by_pipe), max(0.0, self._left())):
            assert isinstance(pipe, Connection)
            outcome = self._outcomes[by_pipe[pipe]]
            try:
                kind, what = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                pipe.close()
                alive = False
                continue
            if kind == "told":
                outcome.told.append(what)
            else:
                setattr(outcome, kind, what)
        return alive

    def _fail(self, why: str) -> None:
        for process in self._processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
        wait([p.sentinel for p in self._processes if p.is_alive()], _STACKS_WAIT)
        text = [why]
        for index, outcome in enumerate(self._outcomes):
            lines = self.log(index).rstrip().splitlines()[-_LOG_LINES:]
            text += [f"--- worker {index}", outcome.raised, *lines]
        self.close()
        raise AssertionError("\n".join(text))

    def _log(self, index: int) -> Path:
        return self._folder / f"worker-{index}.log"


def _context() -> Any:
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    return context


def _inherited() -> dict[str, str]:
    """The server keeps the environment that it was started in; ours may have changed since."""
    return {name: value for name, value in os.environ.items() if name.startswith("TENSORCALL_")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(
    tests: Path,
    function: str,
    worker: Worker,
    arguments: tuple[Any, ...],
    *,
    log: str,
    environment: dict[str, str],
) -> None:
    """The life of a worker process."""
    os.setsid()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(environment)
    if os.environ.get(ENGINE_VARIABLE, "tensorcall") == "tensorcall":
        import tensorcall

        tensorcall.install()
    try:
        value = getattr(_load(tests), function)(worker, *arguments)
        worker._pipe.send_bytes(pickle.dumps(("value", value)))
    except BaseException:
        worker._pipe.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
        raise


def _load(file: Path) -> ModuleType:
    """A test file as a module of the same name in all workers, so that its functions pickle."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
