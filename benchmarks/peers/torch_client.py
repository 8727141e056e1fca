"""One client at a time in plain PyTorch: a client's data and weights, and non-private SGD on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import Task, Turns, clients_a_turn, seconds_of

from fedcdp.models.networks import build

Step = Callable[[Tensor, Tensor], None]
"""A local step on a batch."""


class Client:
    """A client that trains a network by `step` from the global weights, and adds its update to a sum."""

    def __init__(self, task: Task, network: nn.Module, step: Step) -> None:
        generator = torch.Generator().manual_seed(0)
        self.task, self._step = task, step
        self._inputs = torch.rand(task.records, *task.shape, generator=generator).to(task.device)
        self._targets = torch.randint(task.classes, (task.records,), generator=generator).to(task.device)
        self.weights = [each.data for each in network.parameters()]
        self.global_weights = [each.clone() for each in self.weights]
        self.sent = [torch.zeros_like(each) for each in self.weights]

    def train(self, steps: int | None = None) -> None:
        """Run all local steps of a round (or some)."""
        torch._foreach_copy_(self.weights, self.global_weights)
        size = self.task.batch_size
        for step in range(steps or self.task.local_steps):
            self._step(self._inputs[step * size : (step + 1) * size], self._targets[step * size : (step + 1) * size])
        torch._foreach_add_(self.sent, torch._foreach_sub(self.weights, self.global_weights))

    def seconds_a_step(self) -> float:
        """The minimum time of a few steps, after a warm-up."""
        few = min(5, self.task.local_steps)
        self.train(few)
        return seconds_of(lambda: (self.train(few), wait(self.task)), times=10) / few


def wait(task: Task) -> None:
    """Wait until a GPU has finished its work."""
    if task.device.startswith("cuda"):
        torch.cuda.synchronize()


def network_of(task: Task) -> nn.Module:
    """The paper's network for the task."""
    return build(task.network, task.shape, task.classes).to(task.device)


def serve_clients(task: Task, turns: Turns, client: Client, version: str, note: str = "") -> None:
    """Each turn trains several clients, one at a time."""
    clients = clients_a_turn(task, client.seconds_a_step())

    def round_() -> int:
        for _ in range(clients):
            client.train()
        wait(task)
        return clients * task.local_steps

    turns.ready(version, note)
    turns.serve(round_)


def serve(task: Task, turns: Turns) -> None:
    """Non-private SGD."""
    torch.set_num_threads(1)
    network = network_of(task)
    optimiser = torch.optim.SGD(network.parameters(), lr=task.learning_rate)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimiser.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimiser.step()

    serve_clients(task, turns, Client(task, network, step), torch.__version__)
