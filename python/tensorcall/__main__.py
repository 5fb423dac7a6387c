"""The command line: ``python -m tensorcall run prog.py args…``, ``python -m tensorcall doctor``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import _startup

_RUN = f"""\
Run an unmodified program; its torch.distributed.rpc is tensorcall.rpc, from the moment it imports torch.
So is that of the Python processes it starts, by whatever means: {_startup.MARK}=1 is put into their
environment, which a start-up file of this package reads (python -S and other environments do not)."""

_DOCTOR = """\
Say what this installation and this environment come to: torch and how it is reached, the addresses a
worker would listen on and why, where the secret comes from, the limits. Exit status 1 if something is
wrong."""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and do what it says; the exit status.

    Args:
        argv: the arguments after ``python -m tensorcall``; by default the process's.
    """
    options = _parser().parse_args(argv)
    if options.command == "doctor":
        from . import _doctor

        return _doctor.main(options.init_method)
    from . import _run

    if options.backend is not None:
        _run.choose_backend(options.backend)
    _run.run(options.program, options.args, is_module=options.module)
    return 0


class _Version(argparse.Action):
    """As argparse's own, but looks the version up only when asked: that takes its time."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        from . import __version__

        sys.stdout.write(f"tensorcall {__version__}\n")
        sys.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tensorcall",
        description="Tensor RPC: a drop-in for torch.distributed.rpc.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="run a program written for torch.distributed.rpc", description=_RUN, allow_abbrev=False
    )
    run.add_argument(
        "-m", dest="module", action="store_true", help="the program is a module, as for python -m"
    )
    run.add_argument(
        "--backend",
        choices=["tensorpipe", "process_group"],
        help="process_group: messages travel through a process group, MPI's if mpirun has started this "
        "process, whatever backend the program names (docs/transports.md)",
    )
    run.add_argument("program", help="path of the program, or name of the module with -m")
    run.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the program")
    doctor = commands.add_parser(
        "doctor", help="say what this installation and environment come to", description=_DOCTOR
    )
    doctor.add_argument(
        "--init-method",
        default="env://",
        help="URL of the rendezvous, as for init_rpc (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
