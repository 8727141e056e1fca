"""The canaries of a one-run audit: records with wrong labels, or worst-case records in a network that is made for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedcdp.audit.canary import LinearCanaries, beyond_clip
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation, partition
from fedcdp.errors import DataError, PlanError
from fedcdp.mechanism.randomness import numpy_generator


@dataclass(frozen=True)
class Canaries:
    """The canaries among the training records [canaries], as indices into them, and the client that holds each."""

    records: Tensor
    clients: Tensor


def mislabelled(federation: Federation, count: int, seed: int) -> tuple[Federation, Canaries]:
    """The federation with wrong labels on `count` of the records that a single client holds: a model must memorise them.

    Raises:
        DataError: The data have no classes, or too few such records.
    """
    data = federation.train
    if data.classes < 2 or data.targets.dim() != 1:
        raise DataError(f"canaries: records of task {data.task} cannot be mislabelled; classes are needed")
    held = [federation.indices(client) for client in range(federation.clients)]
    records = np.concatenate(held)
    holders = np.repeat(np.arange(federation.clients), [len(each) for each in held])
    alone = np.flatnonzero(np.bincount(records, minlength=len(data))[records] == 1)
    if count > len(alone):
        raise DataError(f"canaries: {count} is not allowed; a single client holds each of only {len(alone)} records")
    random = numpy_generator(seed, "audit-canaries")
    chosen = alone[np.sort(random.permutation(len(alone))[:count])]
    placed = Canaries(torch.from_numpy(records[chosen]), torch.from_numpy(holders[chosen]))
    targets = data.targets.clone()
    targets[placed.records] = (
        targets[placed.records] + torch.from_numpy(random.integers(1, data.classes, count)).to(targets.dtype)
    ) % data.classes
    return replace(federation, train=replace(data, targets=targets)), placed


def worst_case(plan: Plan, count: int, clients: int, layers: int) -> tuple[nn.Module, Federation, Canaries]:
    """A network and a federation in which every record is a canary, with a gradient at the clip bound in every layer.

    The network is linear in its weights, and its loss is its output: an example's gradient is its input. The gradients of
    two canaries are orthogonal in every layer, so no canary hides another.
    """
    if clients < 1 or count % clients:
        raise PlanError(f"clients: {clients} is not allowed; each must hold as many of the {count} canaries as the others")
    length = beyond_clip(plan, plan.rounds)
    one = torch.cat([length * torch.eye(count), torch.zeros(count, 1)], dim=1)  # the weights of a layer, and its bias
    data = Dataset(one.repeat(1, layers), torch.zeros(count), task="custom")
    held = torch.arange(count).view(clients, -1)
    federation = partition(data, indices=[each.numpy() for each in held])
    owners = torch.arange(clients).repeat_interleave(count // clients)
    return LinearCanaries(layers, count), federation, Canaries(torch.arange(count), owners)
