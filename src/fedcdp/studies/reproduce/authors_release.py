"""Training as the authors' released program does it, where that differs from the paper: a rival explanation of its figures.

| | the paper's text | the released program |
| --- | --- | --- |
| noise | on each example's gradient, σ = 6 | on the sum of a batch, σ = 0.5 |
| learning rate | not stated | 0.05 |
| end of a round | W ← Σ W_k / K_t | W ← Σ W_k / (K_t − 1): all weights grow by K_t / (K_t − 1) |
| a client's records | two classes | two ranges of 5,000 records in the order of their classes, whatever the class sizes |

A table sets the noise and the rate, and `growth = false` for a server that divides by K_t. This module does the rest.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fedcdp.data.dataset import Splits
from fedcdp.data.federation import Federation
from fedcdp.data.partition import partition
from fedcdp.engine.runtime import products, stop_if_asked
from fedcdp.errors import PlanError
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.studies.reproduce.catalogue import Cell, Place
from fedcdp.studies.reproduce.cells import rates_of
from fedcdp.training.evaluation import evaluate
from fedcdp.training.prepared import Prepared, network_of
from fedcdp.training.rundir import State
from fedcdp.training.trainer import begin

RANGE = 5_000


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:
    """Train, and report the accuracy after the last round."""
    (rate,) = rates_of(cell)
    experiment = cell.experiment({"plan": {"learning_rate": rate}, "run": place.run})
    splits, plan, settings = place.splits(experiment), experiment.plan, experiment.data
    if plan.per_round < 2 or settings.records is None:
        raise PlanError(f"{cell.name}: the released program needs two clients in a round, and a number of records")
    dealt = federation(splits, settings.clients, settings.records, seed=plan.seed)
    prepared, device = Prepared.of(network_of(experiment, splits), dealt, plan), torch.device(place.device)
    with products(tf32=experiment.run.tf32):
        simulator, state = begin(
            prepared, prepared.network.to(device), device=device, loss=F.cross_entropy, engine=experiment.run.engine
        )
        for number in range(plan.rounds):
            stop_if_asked()
            chosen = torch.from_numpy(choose_clients(plan, settings.clients, number))
            state = simulator.round(state, chosen)
            if cell.settings.get("growth", True):
                state = grown(state, plan.per_round)
        accuracy = evaluate(simulator.engine, state.weights, splits.validation, device)["accuracy"]
    told = f"fedcdp reproduce {table} --cells {shlex.quote(cell.name)}"  # no `fedcdp train` does this
    return {"command": told, "accuracy": accuracy, "rate": rate, "rounds": plan.rounds}


def grown(state: State, per_round: int) -> State:
    """The state of a server that divides the sum of K_t networks by K_t − 1."""
    growth = per_round / (per_round - 1)
    return replace(state, weights={name: growth * value for name, value in state.weights.items()})


def federation(splits: Splits, clients: int, records: int, seed: int) -> Federation:
    """Two ranges of records for each client, about evenly; the last range may be shorter."""
    train = splits.train
    order = train.targets.argsort(stable=True)
    ranges = torch.empty_like(train.targets)
    ranges[order] = torch.arange(len(order)) // RANGE
    by_range = replace(train, targets=ranges, classes=int(ranges.max()) + 1)
    dealt = partition(replace(splits, train=by_range), clients, "shards", records=records, seed=seed)
    return replace(dealt, train=train, sentence=f"two ranges of {RANGE:,} records in the order of their classes")
