"""DP-SGD written out, and the records that the package draws for its steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.mechanism.sampling import choose_records
from fedcdp.training.adoption import PrivateTraining


def clouds(count: int) -> tuple[Tensor, Tensor]:
    """Two clouds of points in five dimensions, and which is which."""
    generator = torch.Generator().manual_seed(count)
    targets = torch.arange(count) % 2
    return torch.randn(count, 5, generator=generator) + 2 * targets[:, None], targets


def network() -> nn.Module:
    """A network with weights that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def drawn(private: PrivateTraining) -> Iterator[list[Tensor]]:
    """For each step, the record numbers that each client draws."""
    for step in range(private.plan.rounds):
        clients = torch.arange(private.federation.clients)
        table, sizes = private.federation.table(clients.numpy())
        draw = choose_records(private.plan, clients, torch.from_numpy(sizes), step, 0)
        yield [torch.from_numpy(table)[client][draw.positions[client][draw.present[client]]] for client in clients.tolist()]


def dp_sgd(private: PrivateTraining) -> nn.Module:
    """The same training without noise: one example at a time, gradients clipped as a whole, summed and divided."""
    plan, data = private.plan, private.federation.train
    model = copy.deepcopy(private.model).double()
    weights = list(model.parameters())
    for step, of_clients in enumerate(drawn(private)):
        total = [torch.zeros_like(weight) for weight in weights]
        for record in torch.cat(of_clients).tolist():
            inputs, target = data.inputs[record : record + 1].double(), data.targets[record : record + 1]  # type: ignore[index]
            gradients = torch.autograd.grad(F.cross_entropy(model(inputs), target), weights)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            factor = min(1.0, plan.clip_at(step) / float(norm))
            total = [before + factor * gradient for before, gradient in zip(total, gradients, strict=True)]
        with torch.no_grad():
            for weight, moved in zip(weights, total, strict=True):
                weight -= plan.learning_rate_at(step) * moved / (plan.batch_size * private.federation.clients)
    return model


def flat(model: nn.Module) -> Tensor:
    """All weights of a network in one vector."""
    return torch.cat([weight.detach().double().flatten() for weight in model.parameters()])
