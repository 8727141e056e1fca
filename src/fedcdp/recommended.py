"""Recommended settings: the best accuracy found at an honest ε of about 1, 2 and 8, on disjoint data.

ε is the server's, for one record, at δ = 1e-5, over the whole training; `docs/recommended.md` says how the settings were
found, what each row of accuracy is, and what the search itself leaks. They share their mechanism:

- every client takes part in every round, with one local step on all its records, in which each gradient is clipped and
  carries noise (`example`). A record is used once a round at a known step: no assumption about secret sampling is needed,
  and ε is that of a plain Gaussian;
- only a linear layer on fixed features is trained, so that there are few weights to noise;
- a small clip bound, for the noise is proportional to it, and a moving average of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Federated:
    """A disjoint federation of a dataset."""

    dataset: str
    partition: str
    clients: int
    records: int
    network: str

    def settings(self, found: Found) -> dict[str, dict[str, Any]]:
        """The layers of an experiment, for `experiment.assemble`."""
        data = {
            "dataset": self.dataset,
            "scaling": "public",
            "partition": self.partition,
            "clients": self.clients,
            "records": self.records,
        }
        plan = {
            "method": "fed-cdp",
            "rounds": found.rounds,
            "per_round": self.clients,
            "local_steps": 1,
            "batch_size": self.records,
            "record_sampling": "partition",
            "noise": "example",
            "clip": found.clip,
            "noise_multiplier": found.noise_multiplier,
            "learning_rate": found.learning_rate,
            "ema": found.ema,
        }
        return {"data": data, "model": {"network": self.network}, "plan": plan}


@dataclass(frozen=True)
class Found:
    """What was tuned on a fifth of the training split, and the noise that gives the ε (rounded up)."""

    epsilon: float
    rounds: int
    clip: float
    noise_multiplier: float
    learning_rate: float
    ema: float


FEDERATIONS = {
    "mnist": Federated("mnist", "shards", 100, 500, "oriented-gradients"),
    "cifar10": Federated("cifar10", "shards", 100, 400, "oriented-gradients"),
    "lfw": Federated("lfw", "iid", 10, 226, "oriented-gradients"),
    "adult": Federated("adult", "iid", 100, 366, "linear"),
    "cancer": Federated("cancer", "iid", 10, 42, "linear"),
}

FOUND = {
    "mnist": (Found(1, 40, 0.25, 1.0554, 150.0, 0.8),),
}

RECOMMENDED: Mapping[str, tuple[Federated, Found]] = {
    f"{name}-eps{found.epsilon:g}": (FEDERATIONS[name], found) for name, all_found in FOUND.items() for found in all_found
}
"""By the name of the preset."""


def recommended(name: str) -> dict[str, dict[str, Any]]:
    """The settings of a recommended preset."""
    federated, found = RECOMMENDED[name]
    return federated.settings(found)
