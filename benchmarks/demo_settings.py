"""The search for the demo's settings: `python -m benchmarks.demo_settings results/demo/settings.json`.

Every setting is scored on a fifth of the 4,000 training digits that is left out of the training: the mean of two seeds. The
1,000 validation digits, which the demo reports, are read once, at the end, for the settings that the demo uses. Each private
method has the noise for ε = 3 on its own unit: Fed-CDP a record against the server, Fed-SDP a client against anyone who sees
the model. No ε covers the search itself. It takes about ten minutes on a free core.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from benchmarks.recommended import featured, for_tuning
from fedcdp.accounting.calibrate import Target, calibrate_noise
from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.data.partition import partition
from fedcdp.studies.demo import METHODS, Demo
from fedcdp.training.simulate import simulate

RECORDS, EPSILON = 4000, 3.0
TUNING_SEEDS, FINAL_SEEDS = (0, 1), (0, 1, 2)
TARGETS = {"fed-cdp": Target(EPSILON), "fed-sdp": Target(EPSILON, "model", "client")}


@dataclass(frozen=True)
class Trial:
    """One setting: how many clients share the digits, and the plan."""

    family: str
    clients: int
    plan: Plan

    @property
    def records(self) -> int:
        """Digits of a client."""
        return RECORDS // self.clients

    def calibrated(self) -> Trial:
        """The trial with the noise for its ε."""
        if not self.plan.private:
            return self
        bare = self.plan.but(clip=1.0, learning_rate=1.0, ema=0.0)
        return Trial(self.family, self.clients, self.plan.but(noise_multiplier=_noise(bare, self.clients)))

    def accuracy(self, seed: int, tuning: bool) -> float:
        """On the held-out fifth, with four fifths of the clients; or on the validation digits."""
        splits, network = featured("mnist5k", 0, "oriented-gradients", "cpu")
        clients = self.clients * 4 // 5 if tuning else self.clients
        data = for_tuning(splits, seed) if tuning else splits
        federation = partition(data, clients=clients, scheme="iid", records=self.records, seed=seed)
        plan = self.plan.but(per_round=clients, seed=seed)
        if network is None:
            raise TypeError("the network has no fixed layers")
        run = simulate(network, federation, plan, evaluate_every=plan.rounds)
        if run.accuracy is None:
            raise TypeError("the run was not evaluated")
        return run.accuracy

    def told(self) -> dict[str, Any]:
        """What differs between trials."""
        plan = self.plan.written()
        kept = ("record_sampling", "rounds", "local_steps", "batch_size", "clip", "learning_rate", "noise_multiplier", "ema")
        return {"clients": self.clients, "records": self.records} | {each: plan[each] for each in kept}


@cache
def _noise(plan: Plan, clients: int) -> float:
    population = Population(clients, RECORDS // clients, 1, 1)
    return round(calibrate_noise(plan, population, TARGETS[plan.method]).noise_multiplier + 5e-5, 4)


def trials() -> Iterator[Trial]:
    """Every setting that is tried."""
    for rate in (1.0, 4.0, 16.0):
        plan = Plan(method="nonprivate", rounds=120, per_round=10, local_steps=20, batch_size=5, learning_rate=rate)
        yield Trial("non-private", 10, plan)
    lengths = ((60, 20, 0.9), (120, 20, 0.9), (120, 20, 0.95))
    for (rounds, steps, ema), clip, move in product(lengths, (0.1, 0.25, 0.5), (0.2, 0.4, 0.8)):
        plan = Plan(method="fed-cdp", rounds=rounds, per_round=10, local_steps=steps, batch_size=5, clip=clip,
                    learning_rate=move / clip, ema=ema, clip_mode="flat")  # fmt: skip
        yield Trial("Fed-CDP, batches of 5 drawn at random", 10, plan)
    for clients, rounds, move in product((10, 40, 100), (20, 40), (10.0, 20.0, 40.0)):
        plan = Plan(method="fed-cdp", rounds=rounds, per_round=clients, local_steps=1, batch_size=RECORDS // clients,
                    clip=0.25, learning_rate=4 * move, ema=0.8, record_sampling="partition", clip_mode="flat")  # fmt: skip
        yield Trial(f"Fed-CDP, one step on all records, {clients} clients", clients, plan)
    for clients in (10, 20, 40, 100, 400):
        bare = Plan(method="fed-sdp", per_round=clients, clip_mode="flat")
        for rounds, steps, rate, clip in product((6, 10), (20, 40), (10.0, 30.0), (4.0, 8.0)):
            plan = bare.but(rounds=rounds, local_steps=steps, batch_size=5, clip=clip, learning_rate=rate)
            yield Trial(f"Fed-SDP, {clients} clients", clients, plan)
        for (rounds, ema), clip in product(((10, 0.5), (20, 0.8), (40, 0.8)), (2.0, 4.0, 8.0)):
            plan = bare.but(rounds=rounds, local_steps=1, batch_size=RECORDS // clients, clip=clip, learning_rate=100.0,
                            ema=ema, record_sampling="partition")  # fmt: skip
            yield Trial(f"Fed-SDP, {clients} clients", clients, plan)


def main(target: Path) -> None:
    """Try all settings, then the demo's own on the validation digits."""
    commit = clean_commit()
    torch.set_num_threads(1)
    tried: dict[str, list[dict[str, Any]]] = {}
    for trial in map(Trial.calibrated, trials()):
        score = statistics.mean(trial.accuracy(seed, tuning=True) for seed in TUNING_SEEDS)
        tried.setdefault(trial.family, []).append({"score": round(score, 4)} | trial.told())
        print(f"{score:.4f} {trial.family} {trial.told()}", flush=True)
    best = {family: max(rows, key=lambda row: row["score"]) for family, rows in tried.items()}
    used = {}
    for method in METHODS:
        experiment = Demo(Path("unused")).experiment(method)
        trial = Trial(method, experiment.data.clients, experiment.plan)
        used[method] = trial.told() | {"accuracies": [trial.accuracy(seed, tuning=False) for seed in FINAL_SEEDS]}
    told = {"commit": commit, "best": best, "used": used, "tried": tried}
    target.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
