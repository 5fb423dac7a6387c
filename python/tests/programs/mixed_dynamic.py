"""A dynamic group of both languages: `mixed_dynamic.py WORKER RANK PLACE`.

Rank 0 starts the others, which join and leave while it goes on: a Rust worker (`WORKER`), and a Python
worker that joins after that has come.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import tensorcall.rpc as rpc

SOON = 30.0


@rpc.function
def double(x: int) -> int:
    return 2 * x


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def join(rank: int, place: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=place, rpc_timeout=SOON)
    rpc.init_rpc(f"py{rank}", rank=rank, rpc_backend_options=options)


def is_member(name: str) -> bool:
    try:
        rpc.get_worker_info(name)
    except RuntimeError:
        return False
    return True


def lead(worker: str, place: str) -> None:
    join(0, place)
    address, _, port = place.removeprefix("tcp://").partition(":")
    environment = {**os.environ, "MASTER_ADDR": address, "MASTER_PORT": port, "RANK": "1"}
    environment.pop("WORLD_SIZE", None)
    rust = subprocess.Popen([worker, "rust1", "--dynamic"], stdin=subprocess.PIPE, env=environment)
    eventually(lambda: is_member("rust1"))
    assert rpc.rpc_sync("rust1", "echo", args=("early",)) == "early"
    assert rpc.rpc_sync("rust1", "forward", args=("py0", "double", [2])) == 4

    other = subprocess.Popen([sys.executable, __file__, worker, "2", place], stdin=subprocess.PIPE)
    eventually(lambda: is_member("py2"))
    # Each of the two that came later knows the other.
    assert set(rpc.rpc_sync("rust1", "workers")) == {"py0", "rust1", "py2"}
    assert rpc.rpc_sync("rust1", "forward", args=("py2", "double", [3])) == 6
    assert rpc.rpc_sync("py2", ask_rust) == "from py2"

    rust.communicate(timeout=SOON)
    assert rust.returncode == 0
    eventually(lambda: not is_member("rust1"))
    assert rpc.rpc_sync("py2", double, args=(4,)) == 8
    other.communicate(timeout=SOON)
    assert other.returncode == 0
    rpc.shutdown()
    print("all have joined and left", flush=True)


def ask_rust() -> str:
    answer: str = rpc.rpc_sync("rust1", "echo", args=("from py2",))
    return answer


if __name__ == "__main__":
    program, number, where = sys.argv[1:]
    if number == "0":
        lead(program, where)
    else:
        join(int(number), where)
        sys.stdin.read()
        rpc.shutdown()
