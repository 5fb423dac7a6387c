"""The examples that train: what each is to make smaller becomes smaller, from the first steps to the last."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 55


def printed(*arguments: str, **variables: str) -> str:
    """What a program prints on tensorcall, if it ends well."""
    done = subprocess.run(
        [sys.executable, "-m", "tensorcall", "run", *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(text: str) -> list[float]:
    """The numbers of the lines that show progress."""
    return [float(number) for number in re.findall(r"^step +\d+ .* (\d+\.\d+)$", text, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["parameter_server", "pipeline", "rnn", "rl"])
def test_an_example_learns(program: str) -> None:
    """LOG row 121, which asks for recipes that are tested."""
    text = printed(f"examples/train_{program}.py")

    shown = losses(text)
    assert len(shown) >= 5, text
    assert mean(shown[-2:]) < shown[0] / 2, text


@pytest.mark.slow
def test_the_loss_is_plotted_on_request(tmp_path: Path) -> None:
    """With something that stands for matplotlib, which need not be installed."""
    module = tmp_path / "matplotlib"
    module.mkdir()
    (module / "__init__.py").write_text("def use(backend):\n    assert backend == 'agg'\n")
    (module / "pyplot.py").write_text(
        "lines = []\n"
        "def plot(x, y):\n    lines.extend(f'{a} {b}' for a, b in zip(x, y))\n"
        "def savefig(file):\n    open(file, 'w').write('\\n'.join(lines))\n"
        "def xlabel(text):\n    pass\n"
        "ylabel = title = xlabel\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    printed("examples/train_rnn.py", "--steps", "3", "--plot", str(tmp_path / "loss.png"), PYTHONPATH=path)

    drawn = (tmp_path / "loss.png").read_text().splitlines()
    assert [line.split()[0] for line in drawn] == ["1", "2", "3"]


@pytest.mark.slow
def test_a_launcher_may_start_the_workers() -> None:
    """As on several hosts: each worker a process of its own, with its rank in the environment."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", "tensorcall", "run", "examples/train_rnn.py", "--steps", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )

    assert done.returncode == 0, done.stdout
    assert len(losses(done.stdout)) == 2, done.stdout
