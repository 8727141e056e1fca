"""Federations to look at: a simulator and the state that it starts from, without the command's or the API's way there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.observe import Captured, Leak, Look, capture
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import FunctionalEngine
from fedcdp.files.tree import Tree
from fedcdp.models.networks import prepare
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State


@dataclass(frozen=True)
class Scene:
    """A federation at the beginning of its training."""

    simulator: Simulator
    state: State

    @property
    def plan(self) -> Plan:
        return self.simulator.plan

    @property
    def federation(self) -> Federation:
        return self.simulator.data.federation

    def look(self, leak: Leak, victims: int, **where: Any) -> Captured:
        return capture(self.simulator, self.state, Look(leak, **where), victims)


def scene(model: nn.Module, federation: Federation, **fields: Any) -> Scene:
    """One local step of one record, in a fixed order, without privacy; `fields` of the plan change that."""
    defaults = {
        "method": "nonprivate", "rounds": 5, "per_round": 1, "local_steps": 1, "batch_size": 1, "seed": 3,
        "record_sampling": "partition",
    }  # fmt: skip
    plan = Plan(**defaults | fields)
    network = prepare(model, plan, "cpu")
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    simulator = Simulator.stepwise(
        ClientData(federation, plan, torch.device("cpu")), FunctionalEngine(network, F.cross_entropy)
    )
    average = dict(weights) if plan.ema else None
    return Scene(simulator, State(0, weights, average, plan.quantile.start if plan.quantile else None))


def federation_of(inputs: Tensor, targets: Tensor, sizes: list[int]) -> Federation:
    """Clients that hold so many of the examples each, in turn."""
    parts = torch.arange(sum(sizes)).split(sizes)
    return partition((inputs, targets), indices=[part.numpy() for part in parts])


def one_example_each(data: Dataset) -> Federation:
    return partition(data, len(data), "iid")


def flat(captured: Captured, tree: Tree | None = None) -> Tensor:
    """What was seen, or another tree [victims, ...], as [victims, coordinates]."""
    return captured.engine.layout.flatten(captured.seen if tree is None else tree, lead=1)
