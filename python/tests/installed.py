"""What a user has after installing: to be run by the Python of an environment with nothing else in it.

`cargo xtask packages` does, from another folder and with no program on PATH but the environment's. This
file needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # nothing of it hides what is installed

import pages

CHILD = "import torch.distributed.rpc as rpc; print(rpc.rpc_sync.__module__, flush=True)"
PARENT = f"import subprocess, sys\n{CHILD}\nsubprocess.run([sys.executable, '-c', {CHILD!r}], check=True)\n"
LICENCES = ("LICENSE-APACHE", "LICENSE-MIT", "LICENSE-THIRD-PARTY")


def main() -> None:
    surroundings()
    files()
    command_line()
    with tempfile.TemporaryDirectory() as folder:
        programs(Path(folder))
    print("everything works as installed")


def surroundings() -> None:
    for tool in ("cargo", "rustc", "maturin", "cc"):
        assert shutil.which(tool) is None, tool
    assert not Path.cwd().is_relative_to(pages.ROOT / "python")


def files() -> None:
    installed = importlib.metadata.distribution("tensorcall")
    package = Path(installed.locate_file("tensorcall"))
    assert package.parent == Path(sysconfig.get_path("platlib")), package
    for name in ("py.typed", "_tensorcall.pyi", "_tensorcall.abi3.so", "rpc/__init__.py"):
        assert (package / name).is_file(), name
    assert (Path(sysconfig.get_path("purelib")) / "tensorcall_install.pth").is_file()
    required = [each for each in installed.requires or () if "extra ==" not in each]
    assert required == ["torch>=2.9"], required
    assert installed.metadata["License-Expression"] == "MIT OR Apache-2.0"
    listed = [str(file) for file in installed.files or ()]
    for name in LICENCES:
        assert any(file.endswith(f".dist-info/licenses/{name}") for file in listed), name
    foreign = [file for file in listed if "test" in Path(file).name or file.endswith((".rs", ".md"))]
    assert foreign == [], foreign


def command_line() -> None:
    version = importlib.metadata.version("tensorcall")
    assert said_by("-m", "tensorcall", "--version") == f"tensorcall {version}\n"
    assert "doctor" in said_by("-m", "tensorcall", "--help")
    found = said_by("-m", "tensorcall", "doctor")
    assert found.endswith("nothing is wrong\n"), found
    assert " note " not in found.partition("limits")[0], found


def programs(folder: Path) -> None:
    for program in pages.programs(pages.ROOT / "README.md"):
        fault = pages.fault(program, folder)
        assert fault is None, fault
    (folder / "prog.py").write_text(PARENT)
    said = said_by("-m", "tensorcall", "run", str(folder / "prog.py"))
    assert said == "tensorcall.rpc.api\n" * 2, said


def said_by(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENSORCALL_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main()
