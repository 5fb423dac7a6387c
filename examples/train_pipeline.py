"""A pipeline: a convolutional network lies on two workers, and batches go through it in pieces.

The first half of the network is on one worker, the second half on another. The master cuts each batch into
micro-batches: while the second worker has the first of them, the first worker has the next. The output of
the first half goes straight to the second, by an RRef that the master hands on without looking at it. The
backward pass takes the same ways back, and each half is optimized where it is.

    python -m tensorcall run examples/train_pipeline.py    # on tensorcall
    python examples/train_pipeline.py                      # on torch's own agent
"""

import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from training import Progress, parse, run

NAMES = ["master", "first", "second"]
STEPS = 50
BATCH, PIECES = 32, 4
SIZE, CLASSES = 12, 3


class Half(nn.Module):
    """A part of the network, which takes a reference to its input."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.lock = threading.Lock()

    def forward(self, rref):
        inputs = rref.to_here()
        with self.lock:  # one piece at a time, each in one go
            return self.layers(inputs)

    def parameter_rrefs(self):
        """References to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def first_half():
    torch.manual_seed(1)
    return Half(
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
        )
    )


def second_half():
    torch.manual_seed(2)
    return Half(
        nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (SIZE // 4) ** 2, CLASSES),
        )
    )


class Pipeline:
    """The network as the master sees it, and its training."""

    def __init__(self):
        self.first = rpc.remote("first", first_half)
        self.second = rpc.remote("second", second_half)
        parameters = [*self.first.rpc_sync().parameter_rrefs(), *self.second.rpc_sync().parameter_rrefs()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.2, momentum=0.9)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, images):
        outputs = []
        for piece in images.chunk(PIECES):
            between = self.first.remote().forward(rpc.RRef(piece))
            outputs.append(self.second.rpc_async().forward(between))
        return torch.cat(torch.futures.wait_all(outputs))

    def batch(self):
        """Noisy pictures of a line that lies, stands or runs aslant, and which of these it does."""
        classes = torch.randint(CLASSES, (BATCH,), generator=self.generator)
        places = torch.randint(SIZE, (BATCH,), generator=self.generator)
        images = 0.3 * torch.randn(BATCH, 1, SIZE, SIZE, generator=self.generator)
        for image, kind, place in zip(images, classes.tolist(), places.tolist(), strict=True):
            along = torch.arange(SIZE)
            across = torch.full((SIZE,), place) if kind < 2 else (along + place) % SIZE
            rows, columns = (across, along) if kind == 0 else (along, across)
            image[0, rows, columns] += 1
        return images, classes

    def step(self):
        """One step; the loss before it."""
        images, classes = self.batch()
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(self.forward(images), classes)
            dist_autograd.backward(context, [loss])
            self.optimizer.step(context)
        return loss.item()


def work(rank, options):
    if rank != 0:
        return  # leaving waits until the master has no more calls
    pipeline, progress = Pipeline(), Progress(options)
    for _ in range(options.steps):
        progress.step(pipeline.step())
    progress.end()


if __name__ == "__main__":
    run(NAMES, work, parse(__doc__, STEPS))
