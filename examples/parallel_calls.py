"""How do remote calls run in parallel, and on which threads?

worker2 sends a bfloat16 tensor to worker1 while the main thread of worker1 is in a long
computation, and once more while it sits in `shutdown()`. Then it makes eight calls at once of a
function that takes 50 ms. What happens is printed as it happens: when, on which worker, on which
thread.

This is an ordinary program for `torch.distributed.rpc`:

    python -m tensorcall run examples/parallel_calls.py    # on tensorcall
    python examples/parallel_calls.py                      # on torch's own agent

A launcher, torchrun or mpirun for example, may start the workers instead, two of them or more.
"""

import os
import socket
import subprocess
import sys
import threading
import time

import torch
import torch.distributed.rpc as rpc

COMPUTATION = 3.0  # seconds that worker1's main thread is busy
NAP = 0.05  # seconds that one call of nap() takes
if "RANK" in os.environ:  # a launcher has started this process, and others
    NAME, SIZE = f"worker{1 + int(os.environ['RANK'])}", int(os.environ["WORLD_SIZE"])
else:
    NAME, SIZE = sys.argv[-1], 2  # "worker1" or "worker2", or what comes last on our own command line
clock = 0.0  # when worker1 began


def say(what):
    """Prints one line of the timeline."""
    main = threading.current_thread() is threading.main_thread()
    thread = "main thread" if main else f"thread {threading.get_native_id()}"
    line = f"{time.time() - clock:7.3f} s  {NAME:8}  {thread:14}  {what}\n"
    print(line, end="", flush=True)  # in one piece: many threads print


# What worker1 runs: its own long computation, and functions that worker2 calls.

begun, halfway, computed = threading.Event(), threading.Event(), threading.Event()
progress = "about to compute"


def worker1():
    global clock
    rpc.init_rpc("worker1", rank=0, world_size=SIZE)
    clock = time.time()
    begun.set()
    say(f"begins a computation of {COMPUTATION:g} s")
    compute()
    say("is done computing and calls shutdown(graceful=True)")
    computed.set()
    rpc.shutdown(graceful=True)
    say("has left shutdown()")


def compute():
    """Keeps the main thread busy, in Python and in torch, without a thought for remote calls."""
    global progress
    matrix, step, start = torch.randn(300, 300), 0, time.monotonic()
    while (spent := time.monotonic() - start) < COMPUTATION:
        matrix = (matrix @ matrix).clamp(-1, 1)
        step += 1
        progress = f"in step {step} of its computation, {spent / COMPUTATION:.0%} done"
        if spent > COMPUTATION / 2:
            halfway.set()
    progress = "in shutdown(graceful=True)"


def square(tensor):
    say(f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}; main thread is {progress}")
    return tensor.pow(2)


def wait_for(event):
    """Returns when worker1 has come so far; meanwhile it blocks one thread, and no other call."""
    {"begun": begun, "halfway": halfway, "computed": computed}[event].wait(30)
    return clock


def nap(number):
    say(f"nap {number} begins")
    time.sleep(NAP)
    return threading.get_native_id()


# What worker2 runs: the calls.


def worker2():
    global clock
    rpc.init_rpc("worker2", rank=1, world_size=SIZE)
    clock = rpc.rpc_sync("worker1", wait_for, args=("begun",))
    tensor = torch.randn(2, 32, 100, 100).to(torch.bfloat16)
    for event in ("halfway", "computed"):
        rpc.rpc_sync("worker1", wait_for, args=(event,))
        say("sends the tensor with rpc_async")
        future = rpc.rpc_async("worker1", square, args=(tensor,))
        future.then(lambda _: say("the reply is here: this is a callback of its future"))
        result = future.wait()
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, tensor.pow(2)), "not exactly tensor.pow(2)"
        say("has the result, and it is exactly tensor.pow(2)")

    say(f"makes eight calls at once of a function that takes {1000 * NAP:g} ms")
    start = time.monotonic()
    threads = torch.futures.wait_all([rpc.rpc_async("worker1", nap, args=(i,)) for i in range(8)])
    took = time.monotonic() - start
    say(f"all took {1000 * took:.0f} ms together, on {len(set(threads))} threads of worker1")
    assert took < 8 * NAP, "the calls did not run in parallel"
    rpc.shutdown(graceful=True)


# What further workers do, if somebody starts them: nothing.


def spare():
    rpc.init_rpc(NAME, rank=int(os.environ["RANK"]), world_size=SIZE)
    rpc.shutdown(graceful=True)


# Our own launcher: it runs its own command line twice more, once for each worker.


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch():
    if torch.cuda.is_available():
        print("There are CUDA devices here; this program stays on the CPU. For them see cuda_calls.py.")
    print("   when     worker    thread          what")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, *sys.orig_argv[1:]]
    workers = [subprocess.Popen([*command, name], env=os.environ | where) for name in ("worker1", "worker2")]
    deadline = time.monotonic() + 120
    codes = [None, None]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = [worker.poll() for worker in workers]
    for worker in workers:
        worker.kill()
    if codes != [0, 0]:
        sys.exit(f"the workers ended with {codes}")
    print("So: calls run on threads of their own, whatever the main thread does, many at a time.")


if __name__ == "__main__":
    {"worker1": worker1, "worker2": worker2}.get(NAME, spare if "RANK" in os.environ else launch)()
