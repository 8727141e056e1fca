"""Accuracy with 0 to 3 rogues of ten clients, by aggregator, under Fed-CDP with noise; and under a secure sum.

    python -m benchmarks.poisoning --out results/poisoning.json

Ten clients share the embedded digits (400 each). The plan is the recommended recipe at the given ε, against the server.
Rogues collude, read all updates, and send what a server admits (`deploy.protocol.admission`):

| attack | what a rogue sends |
| --- | --- |
| opposite | the opposite of its own update without noise, as large as is admitted |
| a little | the honest mean, less z deviations in each coordinate ("A little is enough", Baruch et al., NeurIPS 2019) |
| labels | the honest update of a client whose labels y are 9 − y |

Under a secure sum the server admits anything. There the rogues' shares of `opposite` are as large as honest shares can be
(`honest size`), or a hundred times as large.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import norm
from torch import Tensor

from benchmarks.clean_tree import clean_commit
from fedcdp.deploy.protocol import admission
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.messages import Update
from fedcdp.engine.base import Batch
from fedcdp.engine.batched import engines_for
from fedcdp.engine.frozen import split
from fedcdp.files.tree import Tree
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.mechanism.secure_sum import to_integers
from fedcdp.methods.base import Local, Moment
from fedcdp.methods.fedcdp import FedCDP
from fedcdp.models.networks import prepare
from fedcdp.training.evaluation import evaluate
from fedcdp.training.planning import plan_experiment
from fedcdp.training.prepared import deal_out, load_splits, network_of, population_of
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State

CLIENTS, SEEDS = 10, (0, 1, 2)
CPU = torch.device("cpu")
AGGREGATORS: dict[str, dict[str, Any]] = {
    "mean": {},
    "trimmed-mean": {"aggregator": "trimmed-mean", "trim": 0.3},
    "median-of-means": {"aggregator": "median-of-means", "median_groups": 7},
}
EPSILONS = (2.0, 8.0)
ATTACKS = ("opposite", "a little", "labels")
SUM_ATTACKS = {"honest size": 1.0, "hundredfold": 100.0}


class Poisoned(FedCDP):
    """Fed-CDP, in which the clients with the lowest numbers replace their updates after they have seen all others'."""

    def __init__(self, rogues: int, attack: str, records: int) -> None:
        self.rogues, self.attack, self.records = rogues, attack, records
        self._own: Tree = {}

    def local_step(self, local: Local, batch: Batch, at: Moment) -> Local:
        """The step, of which the rogues keep their own direction without noise."""
        clean = super().local_step(local, batch, replace(at, plan=at.plan.but(noise_multiplier=0.0)))
        wanted = clean.weights if clean.total is None else {name: -value for name, value in clean.total.items()}
        start = local.weights if clean.total is None else {name: 0.0 * value for name, value in wanted.items()}
        self._own = {name: (value - start[name])[: self.rogues].double().mean(0) for name, value in wanted.items()}
        return super().local_step(local, batch, at)

    def admit(self, update: Tree, at: Moment) -> Tree:
        """The updates as they reach the server."""
        rogue = at.clients < self.rogues
        if self.attack == "labels" or not self.rogues:
            return update
        if at.plan.sums:
            sent = self._share(at)
        elif self.attack == "a little":
            sent = self._admitted(self._little({name: value[~rogue].double() for name, value in update.items()}), at)
        else:
            sent = self._admitted({name: -value for name, value in self._own.items()}, at)
        return {name: torch.where(_like(rogue, value), sent[name].to(value.dtype), value) for name, value in update.items()}

    def _little(self, honest: Tree) -> Tree:
        """As far from the mean as the number of honest clients that must be further away allows."""
        needed = CLIENTS // 2 + 1 - self.rogues
        z = float(norm.ppf((CLIENTS - self.rogues - needed) / (CLIENTS - self.rogues)))
        return {name: value.mean(0) - z * value.mean(0).sign() * value.std(0) for name, value in honest.items()}

    def _admitted(self, sent: Tree, at: Moment) -> Tree:
        """The largest admitted multiple for `opposite`; otherwise the update, made smaller if it has to be."""
        asked, layout = Round(at.round, 0, at.current_clip), at.engine.layout
        allowed = [(sent, None)] + [({name: value}, name) for name, value in sent.items()]
        room = min(
            admission.largest_norm(at.plan, layout, asked, self.records, part=part) / max(admission.norm_of(some), 1e-30)
            for some, part in allowed
        )
        factor = 0.999 * room if self.attack == "opposite" else min(1.0, 0.999 * room)
        sent = {name: value * factor for name, value in sent.items()}
        update = Update({name: value.float() for name, value in sent.items()}, None)
        admission.check_size(update, at.plan, layout, asked, self.records)  # the server would take it
        return sent

    def _share(self, at: Moment) -> Tree:
        """The largest sum of clipped gradients of an honest client, or a multiple, against the direction that helps."""
        factor = SUM_ATTACKS[self.attack] * self.records * at.clip_bound / admission.norm_of(self._own)
        shares = to_integers({name: factor * value[None] for name, value in self._own.items()}, at.clip_bound)
        return {name: value[0] for name, value in shares.items()}


def _like(clients: Tensor, value: Tensor) -> Tensor:
    return clients.view(-1, *(1,) * (value.dim() - 1))


class Federated:
    """An experiment whose frozen features are computed once for all trainings."""

    def __init__(self, epsilon: float, changes: dict[str, Any]) -> None:
        data = {"dataset": "mnist5k", "clients": CLIENTS, "partition": "iid"}
        planned = plan_experiment([{"data": data, "plan": changes}], population_of, target_epsilon=epsilon)
        self.plan = planned.experiment.plan
        splits = load_splits(planned.experiment, quiet=True)
        federation = deal_out(planned.experiment, splits)
        network = prepare(network_of(planned.experiment, splits), self.plan, CPU)
        front, trained = split(network, federation.train.inputs, CPU)
        self.data = ClientData(federation, self.plan, CPU, front)
        self.engine = next(iter(engines_for(trained, torch.nn.functional.cross_entropy).values()))
        self.weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}

    def accuracy(self, rogues: int, attack: str, seed: int, robust: dict[str, Any]) -> float:
        """The accuracy on the validation split after a training with this many rogues."""
        plan = self.plan.but(seed=seed, **robust)
        data = copy.copy(self.data)
        data.plan = data.draws = plan
        if attack == "labels":
            data.examples = replace(data.examples, targets=self._flipped(rogues))
        method = Poisoned(rogues, attack, data.federation.smallest)
        simulator = Simulator.stepwise(data, self.engine, CLIENTS, method=method)
        state = State.first(plan, self.weights)
        for round_ in range(plan.rounds):
            state = simulator.round(state, torch.as_tensor(choose_clients(plan, CLIENTS, round_)))
        weights = state.average or state.weights
        if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
            return 0.1  # a model that is not finite guesses
        assert data.validation is not None
        found = evaluate(self.engine, weights, data.validation, CPU)["accuracy"]
        assert found is not None
        return found

    def _flipped(self, rogues: int) -> Tensor:
        """The labels, with those of the rogues' records turned around."""
        targets = self.data.examples.targets.clone()
        for client in range(rogues):
            records = torch.from_numpy(self.data.federation.indices(client))
            targets[records] = 9 - targets[records]
        return targets


def cell(federated: Federated, rogues: int, attack: str, robust: dict[str, Any]) -> dict[str, Any]:
    """The accuracies with all seeds, and their mean."""
    found = [federated.accuracy(rogues, attack, seed, robust) for seed in SEEDS]
    return {"accuracy": round(statistics.mean(found), 4), "seeds": [round(each, 4) for each in found]}


def table(federated: Federated, attacks: Iterable[str], aggregators: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By aggregator: without rogues, and by attack and number of rogues."""
    found: dict[str, Any] = {}
    for name, robust in aggregators.items():
        found[name] = {"none": cell(federated, 0, "labels", robust)}
        for attack in attacks:
            found[name][attack] = {str(rogues): cell(federated, rogues, attack, robust) for rogues in (1, 2, 3)}
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kept = {"commit": clean_commit()} if given.out else {}
    torch.set_num_threads(1)
    started = time.perf_counter()
    found: dict[str, Any] = {"command": "python -m benchmarks.poisoning", **kept, "clients": CLIENTS, "seeds": list(SEEDS)}
    for epsilon in EPSILONS:
        federated = Federated(epsilon, {})
        found[f"epsilon {epsilon:g}"] = {"plan": federated.plan.written()} | table(federated, ATTACKS, AGGREGATORS)
    federated = Federated(EPSILONS[0], {"secure_aggregation": True})
    found["secure sum"] = {"plan": federated.plan.written()} | table(federated, SUM_ATTACKS, {"mean": {}})
    print(f"{time.perf_counter() - started:.0f} s")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
