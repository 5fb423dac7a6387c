"""A recurrent network that lies on three workers: what comes next in a text?

The vectors of the symbols and the layer that names the next symbol are large with a real vocabulary; each is
on a worker of its own. The recurrent layer is on the trainer, which calls the one before it and the other
after it. The trainer has RRefs for all parameters, its own among them, and one distributed optimizer.

    python -m tensorcall run examples/train_rnn.py    # on tensorcall
    python examples/train_rnn.py                      # on torch's own agent
"""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from training import Progress, parse, run

NAMES = ["trainer", "embeddings", "decoder"]
STEPS = 60
SYMBOLS, FEATURES, HIDDEN = 12, 16, 32
BATCH, LENGTH = 16, 10


class Embeddings(nn.Module):
    """On the worker `embeddings`: a vector for each symbol."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(SYMBOLS, FEATURES)

    def forward(self, symbols):
        return self.table(symbols)


class Decoder(nn.Module):
    """On the worker `decoder`: how likely each symbol comes next."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, hidden):
        return self.layer(hidden)


def rrefs_of(module):
    """References to the parameters of a module that is here."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


class Network:
    """The network as the trainer sees it, and its training."""

    def __init__(self):
        torch.manual_seed(0)
        self.embeddings = rpc.remote("embeddings", Embeddings)
        self.recurrent = nn.LSTM(FEATURES, HIDDEN, batch_first=True)
        self.decoder = rpc.remote("decoder", Decoder)
        parameters = [rpc.RRef(parameter) for parameter in self.recurrent.parameters()]
        for part in (self.embeddings, self.decoder):
            parameters += rpc.rpc_sync(part.owner(), rrefs_of, args=(part,))
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5, momentum=0.9)
        self.generator = torch.Generator().manual_seed(0)
        self.state = None

    def forward(self, symbols):
        hidden, state = self.recurrent(self.embeddings.rpc_sync().forward(symbols), self.state)
        self.state = tuple(part.detach() for part in state)  # the text goes on, the graph does not
        return self.decoder.rpc_sync().forward(hidden)

    def text(self):
        """Symbols that count upwards by one, two or three; whoever knows two of them knows the rest."""
        starts = torch.randint(SYMBOLS, (BATCH, 1), generator=self.generator)
        strides = torch.randint(1, 4, (BATCH, 1), generator=self.generator)
        while True:
            yield (starts + strides * torch.arange(LENGTH + 1)) % SYMBOLS
            starts = starts + strides * LENGTH

    def train(self, steps):
        """Trains; the loss before each step."""
        for _, symbols in zip(range(steps), self.text(), strict=False):
            with dist_autograd.context() as context:
                outputs = self.forward(symbols[:, :-1])
                loss = nn.functional.cross_entropy(outputs.flatten(0, 1), symbols[:, 1:].flatten())
                dist_autograd.backward(context, [loss])
                self.optimizer.step(context)
            yield loss.item()


def work(rank, options):
    if rank != 0:
        return  # leaving waits until the trainer has no more calls
    progress = Progress(options)
    for loss in Network().train(options.steps):
        progress.step(loss)
    progress.end()


if __name__ == "__main__":
    run(NAMES, work, parse(__doc__, STEPS))
