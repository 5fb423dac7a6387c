"""A parameter server: trainers compute gradients, the server adds them up and gives everybody the same model.

The server is an object that all trainers have a reference for. They send the gradients of each step by
`rref.rpc_sync().update(…)`, a function marked by `async_execution`: it holds no thread of the server while it
waits for the other trainers. Each gets the parameters of the next step.

    python -m tensorcall run examples/parameter_server.py    # on tensorcall
    python examples/parameter_server.py                      # on torch's own agent
"""

import multiprocessing
import sys
import tempfile
import threading

import torch
import torch.distributed.rpc as rpc

TRAINERS = 3
STEPS = 60
TRUTH = torch.tensor([[2.0, -1.0, 0.5]])


class Server:
    """Lives on one worker; the others have an RRef for it."""

    def __init__(self):
        self.model = torch.nn.Linear(3, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.lock = threading.Lock()
        self.next_step, self.arrived = torch.futures.Future(), 0

    def parameters(self):
        """What the trainers begin with."""
        return [parameter.detach() for parameter in self.model.parameters()]

    @rpc.functions.async_execution
    def update(self, gradients):
        """Adds the gradients of one trainer; its answer comes when all have sent theirs."""
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self.arrived += 1
            step = self.next_step
            if self.arrived == TRAINERS:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.next_step, self.arrived = torch.futures.Future(), 0
                step.set_result(self.parameters())
            return step


def train(server, seed):
    """One trainer's part: its own data, a model as the server says; its last loss."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(3, 1, bias=False)
    parameters = server.rpc_sync().parameters()
    for _ in range(STEPS):
        with torch.no_grad():
            for mine, given in zip(model.parameters(), parameters, strict=True):
                mine.copy_(given)
        inputs = torch.randn(16, 3, generator=generator)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs @ TRUTH.T) / TRAINERS
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        parameters = server.rpc_sync().update(gradients)
    return loss.item()


def work(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=60)
    name = f"trainer{rank}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=1 + TRAINERS, rpc_backend_options=options)
    if rank == 0:
        server = rpc.RRef(Server())
        trainers = [rpc.rpc_async(f"trainer{i}", train, args=(server, i)) for i in range(1, 1 + TRAINERS)]
        losses = torch.futures.wait_all(trainers)
        weight = server.local_value().model.weight.detach()
        found = [round(w, 2) for w in weight.flatten().tolist()]
        print(f"after {STEPS} steps of {TRAINERS} trainers the weight is {found}", flush=True)
        assert max(losses) < 0.001, losses
        assert torch.allclose(weight, TRUTH, atol=0.01), weight
    rpc.shutdown()


def main():
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=work, args=(r, f"{folder}/store")) for r in range(1 + TRAINERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    main()
