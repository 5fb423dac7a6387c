"""A job that torchrun starts again after a crash: what the first attempt left does not disturb the second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
import torch
import torch.distributed.rpc as rpc

rank, size, attempt = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=30)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)
assert rpc.rpc_sync(f"w{1 - rank}", torch.add, args=(torch.ones(2), attempt)).tolist() == [1 + attempt] * 2
if rank == 1 and attempt == 0:
    os._exit(9)
rpc.shutdown()
open(f"{sys.argv[1]}/{rank} of attempt {attempt}", "w").close()
"""


def test_the_second_attempt_of_a_job_that_crashed_succeeds(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "-m", "tensorcall", "run", str(program), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55)

    assert result.returncode == 0, result.stdout + result.stderr
    left = {file.name for file in tmp_path.glob("* of attempt *")}
    # Rank 0 may have left the first attempt in good order before torchrun stopped it.
    assert (
        {"0 of attempt 1", "1 of attempt 1"} <= left <= {"0 of attempt 0", "0 of attempt 1", "1 of attempt 1"}
    )
