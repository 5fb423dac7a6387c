"""A parameter server: a table of embeddings is on one worker, several trainers train it at the same time.

Each sample is a handful of items, and its class depends on all of them. The server has a vector for every
item. A trainer sends it the items of a batch, gets the sums of their vectors, and classifies these with a
layer of its own. The backward pass goes through the call to the table, and the distributed optimizer steps on
both workers. The gradients of a pass are in its own context: trainers do not disturb each other's.

    python -m tensorcall run examples/train_parameter_server.py    # on tensorcall
    python examples/train_parameter_server.py                      # on torch's own agent
"""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from training import Progress, parse, run

NAMES = ["server", "trainer1", "trainer2", "trainer3"]
STEPS = 60
BATCH = 64
ITEMS, PER_SAMPLE, FEATURES, CLASSES = 100, 4, 16, 4


class Server:
    """Has the table; the trainers have an RRef for it."""

    def __init__(self):
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(ITEMS, FEATURES, mode="sum")

    def forward(self, items):
        return self.table(items)

    def parameters(self):
        """References to the parameters, for the optimizers of the trainers."""
        return [rpc.RRef(parameter) for parameter in self.table.parameters()]


class Trainer:
    """One trainer: its own data, its own last layer, an optimizer for what is here and on the server."""

    def __init__(self, server, seed):
        self.server = server
        self.generator = torch.Generator().manual_seed(seed)
        self.votes = torch.randn(ITEMS, CLASSES, generator=torch.Generator().manual_seed(0))
        self.layer = nn.Linear(FEATURES, CLASSES)
        parameters = server.rpc_sync().parameters() + [rpc.RRef(p) for p in self.layer.parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.Adagrad, parameters, lr=0.3)

    def batch(self):
        """Samples whose items vote for a class, and the class that wins."""
        items = torch.randint(ITEMS, (BATCH, PER_SAMPLE), generator=self.generator)
        return items, self.votes[items].sum(1).argmax(1)

    def step(self):
        """One step; the loss before it."""
        items, classes = self.batch()
        with dist_autograd.context() as context:
            features = self.server.rpc_sync().forward(items)
            loss = nn.functional.cross_entropy(self.layer(features), classes)
            dist_autograd.backward(context, [loss])
            self.optimizer.step(context)
        return loss.item()


def train(server, meter, seed, steps):
    """What a trainer runs; it tells each loss to the meter."""
    trainer = Trainer(server, seed)
    for _ in range(steps):
        meter.rpc_sync().take(trainer.step())


class Meter:
    """Shows the mean loss of the trainers: one step is as many losses as there are trainers."""

    def __init__(self, progress):
        self.progress, self.losses = progress, []

    def take(self, loss):
        self.losses.append(loss)
        count = len(NAMES) - 1
        if len(self.losses) % count == 0:
            self.progress.step(sum(self.losses[-count:]) / count)


def work(rank, options):
    if rank != 0:
        return  # leaving waits until the server has no more calls
    progress = Progress(options)
    server, meter = rpc.RRef(Server()), rpc.RRef(Meter(progress))
    trainers = [
        rpc.rpc_async(name, train, args=(server, meter, seed, options.steps), timeout=0)
        for seed, name in enumerate(NAMES[1:], start=1)
    ]
    torch.futures.wait_all(trainers)
    progress.end()


if __name__ == "__main__":
    run(NAMES, work, parse(__doc__, STEPS))
