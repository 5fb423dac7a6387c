"""What the four `train_*.py` have in common: how their workers start, how progress is shown.

A program gives the names of its workers and the function that each of them runs. Without further ado all of
them are started on this host. Where a launcher (torchrun, say) has set RANK and WORLD_SIZE, this process is
one of them, and meets the others at MASTER_ADDR and MASTER_PORT. It may have started more than are needed:
those that are left over only join and leave with the others.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import wait

import torch
import torch.distributed.rpc as rpc


def parse(text, steps):
    """Reads the command line; `text` is what the program says of itself."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--steps", type=int, default=steps, help=f"steps to train ({steps})")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the loss; needs matplotlib")
    return parser.parse_args()


def run(names, work, *arguments):
    """Starts a worker for each name; `work(rank, *arguments)` is what it does between joining and leaving."""
    if "RANK" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if size < len(names):
            sys.exit(f"this program has {len(names)} workers: {', '.join(names)}")
        spare = [f"spare{number}" for number in range(size - len(names))]
        be_worker(rank, [*names, *spare], "env://", work if rank < len(names) else rest, arguments)
        return
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=be_worker, args=(rank, names, f"file://{folder}/store", work, arguments))
            for rank in range(len(names))
        ]
        for worker in workers:
            worker.start()
        running = list(workers)
        while running and not any(worker.exitcode for worker in workers):
            wait([worker.sentinel for worker in running])
            running = [worker for worker in running if worker.is_alive()]
        for worker in running:  # one failed: the others would wait for it
            worker.terminate()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit(1)


def be_worker(rank, names, init_method, work, arguments):
    """The life of one worker."""
    torch.manual_seed(rank)
    torch.set_num_threads(1)  # all workers may be on one host
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=60)
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    work(rank, *arguments)
    rpc.shutdown()


def rest(*_):
    """What a worker does that is left over."""


class Progress:
    """Prints the loss now and then, and plots it at the end if that was asked for."""

    def __init__(self, options, every=10, what="loss"):
        self.options, self.every, self.what = options, every, what
        self.losses = []

    def step(self, loss):
        """Takes the loss of one step."""
        self.losses.append(loss)
        number = len(self.losses)
        if number == 1 or number % self.every == 0 or number == self.options.steps:
            print(f"step {number:4}   {self.what} {loss:.4f}", flush=True)

    def end(self):
        """Writes the picture."""
        if self.options.plot:
            import matplotlib

            matplotlib.use("agg")
            from matplotlib import pyplot

            pyplot.plot(range(1, 1 + len(self.losses)), self.losses)
            pyplot.xlabel("step")
            pyplot.ylabel(self.what)
            pyplot.title(os.path.basename(sys.argv[0]))
            pyplot.savefig(self.options.plot)
