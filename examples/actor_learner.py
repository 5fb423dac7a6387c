"""A learner and its actors: actors have the environment, the learner has the policy, RRefs lead to both.

Each actor walks a corridor until it finds the end of it. It asks the learner's agent for every step, by the
reference that it was given. The learner has a reference for each actor: it lets all of them walk at once,
then learns from what they met. The walks become short.

    python -m tensorcall run examples/actor_learner.py    # on tensorcall
    python examples/actor_learner.py                      # on torch's own agent
"""

import multiprocessing
import sys
import tempfile
import threading

import torch
import torch.distributed.rpc as rpc

ACTORS = 3
CELLS = 6
LONGEST = 40  # steps after which a walk is given up
ROUNDS = 25


class Actor:
    """Lives on a worker of its own, with the environment."""

    def walk(self, agent, name):
        """Walks from the first cell to the last as the agent says; how many steps that took."""
        cell = steps = 0
        while cell < CELLS - 1 and steps < LONGEST:
            right = agent.rpc_sync().choose(name, cell)
            cell = cell + 1 if right else max(cell - 1, 0)
            steps += 1
        return steps


class Agent:
    """Lives on the learner, with the policy: for each cell, how much rather to go right."""

    def __init__(self):
        self.preference = torch.zeros(CELLS, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.preference], lr=0.3)
        self.chosen = {}
        self.lock = threading.Lock()  # the actors ask at the same time

    def choose(self, name, cell):
        """Whether an actor should go right."""
        chances = torch.distributions.Bernoulli(logits=self.preference[cell])
        with self.lock:
            choice = chances.sample()
            self.chosen.setdefault(name, []).append(chances.log_prob(choice))
        return bool(choice)

    def learn(self, steps):
        """Makes the choices of shorter walks likelier, those of longer ones less likely."""
        usual = sum(steps.values()) / len(steps)
        loss = sum((taken - usual) * sum(self.chosen[name]) for name, taken in steps.items()) / LONGEST
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.chosen.clear()


def learn():
    """The learner's part; how many steps a walk took on average, in the first rounds and in the last ones."""
    agent = Agent()
    here = rpc.RRef(agent)
    actors = {f"actor{i}": rpc.remote(f"actor{i}", Actor) for i in range(1, 1 + ACTORS)}
    means = []
    for _ in range(ROUNDS):
        walks = {name: actor.rpc_async().walk(here, name) for name, actor in actors.items()}
        steps = {name: walk.wait() for name, walk in walks.items()}
        agent.learn(steps)
        means.append(sum(steps.values()) / len(steps))
    return sum(means[:3]) / 3, sum(means[-3:]) / 3


def work(rank, store):
    torch.manual_seed(0)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=60)
    name = f"actor{rank}" if rank else "learner"
    rpc.init_rpc(name, rank=rank, world_size=1 + ACTORS, rpc_backend_options=options)
    if rank == 0:
        before, after = learn()
        print(f"a walk of {CELLS - 1} steps took {before:.0f} at first, {after:.0f} at last", flush=True)
        assert after < before, "nothing was learned"
    rpc.shutdown()


def main():
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=work, args=(r, f"{folder}/store")) for r in range(1 + ACTORS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    main()
