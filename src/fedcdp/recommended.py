"""Recommended settings: the best accuracy found at an honest ε of about 1, 2 and 8, on disjoint data.

ε is the server's, for one record, at δ = 1e-5, over the whole training; `docs/recommended.md` says how the settings were
found, what each row of accuracy is, and what the search itself leaks. They share their mechanism:

- every client takes part in every round, with one local step on all its records, in which each gradient is clipped and
  carries noise (`example`). A record is used once a round at a known step: no assumption about secret sampling is needed,
  and ε is that of a plain Gaussian;
- only a linear layer on fixed features is trained, so that there are few weights to noise;
- a small clip bound, for the noise is proportional to it, and a large learning rate that makes up for it; a moving average.
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
    per_round: int | None = None
    """Clients in a round; None: all of them."""

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
            "per_round": self.per_round or self.clients,
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
    # The paper's largest population: every image lies at a hundred clients, so that ε of a person is another (`unique`).
    "mnist-10k": Federated("mnist", "shards", 10_000, 500, "oriented-gradients", per_round=500),
}

FOUND = {
    "mnist": (
        Found(1, 20, 0.1, 0.7464, 800.0, 0.8),
        Found(2, 40, 0.1, 0.5642, 800.0, 0.8),
        Found(8, 160, 0.1, 0.3397, 800.0, 0.8),
    ),
    "cifar10": (
        Found(1, 40, 0.5, 1.1801, 40.0, 0.8),
        Found(2, 40, 0.5, 0.6307, 80.0, 0.8),
        Found(8, 80, 0.25, 0.2686, 320.0, 0.8),
    ),
    "lfw": (
        Found(1, 40, 0.25, 1.57, 20.0, 0.8),
        Found(2, 40, 0.25, 0.8391, 40.0, 0.8),
        Found(8, 80, 0.25, 0.3573, 160.0, 0.8),
    ),
    "adult": (
        Found(1, 40, 0.25, 1.2337, 80.0, 0.8),
        Found(2, 40, 0.25, 0.6594, 160.0, 0.8),
        Found(8, 160, 0.5, 0.397, 40.0, 0.8),
    ),
    "cancer": (
        Found(1, 10, 0.25, 1.821, 16.0, 0.5),
        Found(2, 20, 0.25, 1.3763, 16.0, 0.5),
        Found(8, 40, 0.25, 0.586, 32.0, 0.5),
    ),
    "mnist-10k": (Found(1, 100, 0.1, 0.4463, 800.0, 0.8),),
}

RECOMMENDED: Mapping[str, tuple[Federated, Found]] = {
    f"{name}-eps{found.epsilon:g}": (FEDERATIONS[name], found) for name, all_found in FOUND.items() for found in all_found
}
"""By the name of the preset."""


def recommended(name: str) -> dict[str, dict[str, Any]]:
    """The settings of a recommended preset."""
    federated, found = RECOMMENDED[name]
    return federated.settings(found)
