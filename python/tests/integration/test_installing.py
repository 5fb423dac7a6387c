"""Programs without a line of ours are on our engine, however their processes start.

They run in an environment of their own, as pip would make it: the package and torch can be imported,
and the start-up file lies beside them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorcall
from tensorcall import _startup

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
PACKAGE = Path(tensorcall.__file__).resolve().parents[1]
FILE = Path(__file__).resolve().parents[2] / "startup/purelib" / _startup.FILE
RUN = ("-m", "tensorcall", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OURS = "tensorcall.rpc.api"


def make_environment(folder: Path, *, with_file: bool = True, with_packages: bool = True) -> str:
    """An environment that imports what this process can; the path of its interpreter."""
    base = Path(getattr(sys, "_base_executable", sys.executable))
    site = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(base.resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {base.resolve().parent}\n")
    if with_packages:
        packages = [path for path in sys.path if path.endswith("-packages")]
        (site / "packages.pth").write_text("\n".join([str(PACKAGE), *packages]))
    if with_file:
        shutil.copy(FILE, site)
    return str(folder / "bin/python")


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def start(python: str, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*arguments: str, cwd: Path = tmp_path, **variables: str) -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment.pop(_startup.MARK, None)
        return subprocess.Popen(
            [python, *arguments],
            cwd=cwd,
            env=environment | {"OMP_NUM_THREADS": "1"} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., str]:
    """What a program prints that ends well and complains about nothing."""

    def run(*arguments: str, **options: str) -> str:
        return finish(start(*arguments, **options))

    return run


def finish(process: subprocess.Popen[str]) -> str:
    with process:
        try:
            printed, complaints = process.communicate(timeout=50)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    assert process.returncode == 0, complaints
    return printed


def lines(printed: str) -> list[str]:
    return sorted(printed.splitlines())


BOTH = [f"w{rank} got [2.0, 2.0] by {OURS}, {OURS}" for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "fork", "forkserver", "subprocess"])
def test_children_of_a_program_are_on_our_engine(run: Callable[..., str], how: str) -> None:
    assert lines(run(*RUN, str(PROGRAMS / "children.py"), how)) == BOTH


@pytest.mark.slow
def test_children_of_a_module_are_on_our_engine(run: Callable[..., str]) -> None:
    assert lines(run(*RUN, "-m", "children", "spawn", cwd=PROGRAMS)) == BOTH


@pytest.mark.slow
def test_the_mark_alone_is_enough(run: Callable[..., str]) -> None:
    assert lines(run(str(PROGRAMS / "children.py"), "spawn", TENSORCALL_INSTALL="1")) == BOTH


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [(*TORCHRUN, *RUN, str(PROGRAMS / "ranks.py")), (*RUN, *TORCHRUN, str(PROGRAMS / "ranks.py"))],
    ids=["torchrun starts tensorcall", "tensorcall starts torchrun"],
)
def test_workers_of_torchrun_are_on_our_engine(run: Callable[..., str], command: tuple[str, ...]) -> None:
    each = [f"w{rank} got [2.0, 2.0] by {OURS}" for rank in (0, 0, 1, 1)]

    assert lines(run(*command)) == each


@pytest.mark.slow
def test_without_the_mark_everything_is_torchs(run: Callable[..., str]) -> None:
    theirs = "torch.distributed.rpc.api"
    names = "sorted(n for n in sys.modules if n.startswith('tensorcall'))"
    printed = run("-c", f"import sys, torch; print({names}, torch.distributed.rpc.rpc_sync.__module__)")

    assert printed == f"[] {theirs}\n"


@pytest.mark.slow
def test_a_worker_that_installed_and_one_that_imports_ours_understand_each_other(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    second = tmp_path / "second.py"
    text = (PROGRAMS / "acquainted.py").read_text()
    text = text.replace("torch.distributed.rpc", "tensorcall.rpc").replace("rank=0", "rank=1")
    text = text.replace("first", "third").replace("second", "first").replace("third", "second")
    second.write_text(text.replace('("first", 1)', '("first", 0)'))

    workers = start(*RUN, str(PROGRAMS / "acquainted.py"), store), start(str(second), store)

    assert [finish(worker) for worker in workers] == ["True True tensorcall.rpc._worker\n"] * 2


@pytest.mark.slow
def test_it_installs_when_import_torch_has_finished_in_whichever_thread(run: Callable[..., str]) -> None:
    printed = run(
        "-c",
        """if True:
        import importlib.util, sys, threading
        assert "torch" not in sys.modules
        finders = list(sys.meta_path)
        assert importlib.util.find_spec("torch").origin and "torch" not in sys.modules
        seen = []
        def load():
            import torch.distributed.rpc as rpc
            seen.append(rpc.rpc_sync.__module__)
        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        import torch
        print(*sorted(set(seen)), len(seen))
        print(any(type(finder).__module__ == "tensorcall._startup" for finder in sys.meta_path))
        print(vars(torch.__loader__).keys() == {"name", "path"}, torch.__spec__.loader is torch.__loader__)
        """,
        TENSORCALL_INSTALL="1",
    )

    assert printed == f"{OURS} 4\nFalse\nTrue True\n"


def test_a_marked_process_that_needs_no_torch_never_loads_it(run: Callable[..., str]) -> None:
    code = "import sys; print([name for name in sys.modules if 'torch' in name], len(sys.meta_path))"
    unmarked, marked = run("-c", code), run("-c", code, TENSORCALL_INSTALL="1")

    assert (unmarked[:3], marked[:3]) == ("[] ", "[] ")
    assert int(marked[3:]) == int(unmarked[3:]) + 1
    assert run("-c", code, TENSORCALL_INSTALL="0") == run("-c", code, TENSORCALL_INSTALL="") == unmarked


def test_run_says_so_when_child_processes_would_not_install(tmp_path: Path) -> None:
    python = make_environment(tmp_path, with_file=False)
    (tmp_path / "program.py").write_text("print('fine')")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    done = subprocess.run(
        [python, *RUN, str(tmp_path / "program.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert done.stdout == "fine\n"
    assert done.stderr.startswith(f"{_startup.FILE} is not beside the packages of this Python")


def test_it_says_so_when_it_cannot_install(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("x = 1")
    process = start("-c", "import torch", TENSORCALL_INSTALL="1")
    _, complaints = process.communicate(timeout=50)

    assert process.returncode == 1
    last = complaints.rstrip().splitlines()[-1]
    assert last.startswith("RuntimeError: the environment has TENSORCALL_INSTALL=1, but tensorcall could not")
    assert last.endswith("Unset TENSORCALL_INSTALL to go on with torch's own")


def test_an_unrelated_process_starts_as_fast_with_the_package_installed(tmp_path: Path) -> None:
    pythons = [
        make_environment(tmp_path / str(with_file), with_file=with_file, with_packages=False)
        for with_file in (False, True)
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment.pop(_startup.MARK, None)
    seconds: list[list[float]] = [[], []]
    for _ in range(21):
        for python, took in zip(pythons, seconds, strict=True):
            took.append(processor_time([python, "-c", "pass"], environment))
    # The fastest of many: whatever else the machine does can only add to it.
    without, with_file = (min(took) for took in seconds)

    print(f"at best {without * 1e3:.2f} ms, {with_file * 1e3:.2f} ms")
    assert with_file - without < 0.005


def processor_time(command: list[str], environment: dict[str, str]) -> float:
    """What a process used of the processors: other than the time, that is not up to who else is busy."""
    pid = os.posix_spawn(command[0], command, environment)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime
