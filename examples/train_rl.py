"""Reinforcement learning: observers have the environments, one agent chooses for all of them at once.

A ball falls, a paddle moves to catch it. Each observer plays on a worker of its own and asks the agent before
every move. The agent's answer is a function marked by `async_execution`: it returns a future, and so holds no
thread, until every observer has asked. Then one pass through the policy answers all of them.

    python -m tensorcall run examples/train_rl.py    # on tensorcall
    python examples/train_rl.py                      # on torch's own agent
"""

import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn
from training import Progress, parse, run

NAMES = ["agent", "observer1", "observer2", "observer3"]
OBSERVERS = len(NAMES) - 1
ROUNDS = 60
GAMES = 16  # of each observer at once
WIDTH, HEIGHT = 7, 5


class Environment:
    """Balls that drift as they fall, each with a paddle beneath it: several games at once."""

    def __init__(self, generator):
        self.balls, self.paddles = torch.randint(WIDTH, (2, GAMES), generator=generator)
        self.drifts = torch.randint(-1, 2, (GAMES,), generator=generator)
        self.height = HEIGHT

    def states(self):
        """What the policy sees, one line for each game."""
        heights = torch.full((GAMES,), self.height)
        return torch.stack([self.balls, self.paddles, self.drifts * WIDTH, heights], dim=1) / WIDTH

    def move(self, actions):
        """Moves the paddles by -1, 0 or 1 and lets the balls fall."""
        self.paddles = (self.paddles + actions - 1).clamp(0, WIDTH - 1)
        balls = self.balls + self.drifts
        self.drifts = torch.where((balls < 0) | (balls >= WIDTH), -self.drifts, self.drifts)
        self.balls = balls.clamp(0, WIDTH - 1)
        self.height -= 1


class Observer:
    """Plays; the agent has an RRef for it."""

    def __init__(self, number):
        self.number = number
        self.generator = torch.Generator().manual_seed(number)

    def play(self, agent):
        """Plays some games; how far each paddle was from its ball at the end."""
        environment = Environment(self.generator)
        while environment.height > 0:
            environment.move(agent.rpc_sync().choose(self.number, environment.states()))
        return (environment.balls - environment.paddles).abs().float()


class Agent:
    """Has the policy; the observers have an RRef for it."""

    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.lock = threading.Lock()
        self.states, self.answer = {}, torch.futures.Future()
        self.chosen = []  # for each move the logarithms of the probabilities, by observer and game

    @rpc.functions.async_execution
    def choose(self, observer, state):
        """The actions of one observer; they are chosen when all observers have asked."""
        with self.lock:
            self.states[observer] = state
            answer = self.answer
            own = answer.then(lambda actions: actions.wait()[observer])
            if len(self.states) == OBSERVERS:
                actions = self.choose_all(torch.stack([self.states[i] for i in range(OBSERVERS)]))
                self.states, self.answer = {}, torch.futures.Future()
                answer.set_result(actions)
        return own

    def choose_all(self, states):
        """Actions for a batch of states."""
        distribution = torch.distributions.Categorical(logits=self.policy(states))
        actions = distribution.sample()
        self.chosen.append(distribution.log_prob(actions))
        return actions

    def learn(self, distances):
        """Makes the moves of good games likelier, those of bad ones less likely."""
        loss = ((distances - distances.mean()) * sum(self.chosen)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.chosen = []


def work(rank, options):
    if rank != 0:
        return  # leaving waits until the agent has no more calls
    agent, progress = Agent(), Progress(options, what="mean distance")
    here = rpc.RRef(agent)
    observers = [rpc.remote(name, Observer, args=(number,)) for number, name in enumerate(NAMES[1:])]
    for _ in range(options.steps):
        games = [observer.rpc_async(timeout=0).play(here) for observer in observers]
        distances = torch.stack(torch.futures.wait_all(games))
        agent.learn(distances)
        progress.step(distances.mean().item())
    progress.end()


if __name__ == "__main__":
    run(NAMES, work, parse(__doc__, ROUNDS))
