"""Settings by name: the paper's benchmarks, and recommended settings.

A preset named after a dataset is the paper's setting (Table "Benchmark datasets and parameters"); `population` is the part
of it that also serves as the default for that dataset, so `fedcdp train --dataset mnist` trains the paper's federation
under this product's own sampling.

The recommended settings have the best accuracy found at an honest ε of about 1, 2 and 8, on disjoint data. ε is the
server's, for one record, at δ = 1e-5, over the whole training; `docs/recommended.md` says how the settings were
found, what each row of accuracy is, and what the search itself leaks. They share their mechanism:

- every client takes part in every round, with one local step on all its records, in which each gradient is clipped. A
  record is used once a round at a known step: no assumption about secret sampling is needed, and ε is that of a plain
  Gaussian. Each gradient carries noise (`example`) or, in the presets named `-sum-`, each client adds its share of the
  noise of a secure sum;
- only a linear layer on fixed features is trained, so few weights receive noise. The features know no real image and no
  private data;
- a small clip bound, because the noise is proportional to it, and a large learning rate that makes up for it; momentum at
  the server and a moving average, which cost no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcdp.errors import PlanError

Settings = dict[str, dict[str, Any]]


class WholeSettings(Settings):
    """Settings from a preset or a configuration file: a user who names one has chosen a plan (`default_recipe`)."""


@dataclass(frozen=True)
class Benchmark:
    """A dataset's federation and lengths, and the local learning rates found for it (`fedcdp reproduce accuracy`)."""

    train: int
    """Records in the training split."""
    partition: str
    clients: int
    per_round: int
    records: int | None
    local_steps: int
    batch_size: int
    rounds: int
    clean_rate: float
    """For methods whose local steps carry no or little noise: non-private, Fed-SDP, DSSGD, and `cohort` noise."""
    noisy_rate: float
    """For Fed-CDP with noise on each example or batch."""
    classes_per_client: int = 2


BENCHMARKS = {
    "mnist": Benchmark(50_000, "shards", 1000, 100, 500, 100, 5, 100, clean_rate=0.1, noisy_rate=1e-3),
    "cifar10": Benchmark(40_000, "shards", 1000, 100, 400, 100, 4, 100, clean_rate=0.05, noisy_rate=1e-3),
    "lfw": Benchmark(2267, "shards", 1000, 100, 300, 100, 3, 60, clean_rate=0.05, noisy_rate=1e-3, classes_per_client=15),
    "adult": Benchmark(36_631, "iid", 1000, 100, 300, 100, 3, 10, clean_rate=0.2, noisy_rate=2e-3),
    "cancer": Benchmark(426, "full", 1000, 100, None, 100, 4, 3, clean_rate=0.05, noisy_rate=1e-3),
    # Embedded in a package, for demonstrations and tests; not in the paper. Disjoint: 4,000 digits, 40 a client.
    "mnist5k": Benchmark(4000, "shards", 100, 10, 40, 100, 5, 20, clean_rate=0.1, noisy_rate=1e-3),
}

UNEQUAL = ("linear", "square", "exponential", "dirichlet-sizes", "dirichlet-classes")
"""The partition schemes whose clients differ in size, so they take no number of records."""

_PAPER_MECHANISM = {"record_sampling": "partition", "noise": "example", "noise_multiplier": 6.0}


def population(dataset: str | None) -> Settings:
    """The default federation, lengths and learning rate for a dataset; a user's own data are dealt out disjointly."""
    if dataset is None:
        return {"data": {"partition": "iid", "clients": 10}, "plan": {"per_round": 10, "rounds": 20}}
    found = BENCHMARKS.get(dataset)
    if found is None:
        return {"plan": {"per_round": 100}}
    data = {"partition": found.partition, "clients": found.clients, "classes_per_client": found.classes_per_client}
    if found.records is not None:
        data["records"] = found.records
    plan = {name: getattr(found, name) for name in ("per_round", "local_steps", "batch_size", "rounds")}
    return {"data": data, "plan": plan}


def learning_rate(dataset: str | None, plan: dict[str, Any]) -> float | None:
    """The learning rate found for a dataset under a plan's method and noise, if the dataset is a benchmark."""
    found = BENCHMARKS.get(dataset or "")
    if found is None:
        return None
    noisy = str(plan.get("method", "fed-cdp")).startswith("fed-cdp") and plan.get("noise", "example") != "cohort"
    return found.noisy_rate if noisy else found.clean_rate


# What `fedcdp demo` trains under Fed-CDP, at ε = 3 against the server: a linear layer on fixed features. Clipping the whole
# gradient at once makes ε the same for any network.
_DEMO: Settings = {
    "data": {"dataset": "mnist5k", "partition": "iid", "clients": 10, "records": 400},
    "model": {"network": "oriented-gradients"},
    "plan": {
        "method": "fed-cdp",
        "clip": 0.25,
        "clip_mode": "flat",
        "noise_multiplier": 0.2922,
        "rounds": 120,
        "per_round": 10,
        "local_steps": 20,
        "batch_size": 5,
        "learning_rate": 1.6,
        "ema": 0.9,
    },
}


def preset(name: str) -> Settings:
    """The paper's setting for a dataset: its population, the authors' record order, σ = 6, C = 4 (decay: linear 6 → 2).

    `demo` is what `fedcdp demo` trains under Fed-CDP; those of `recommended` carry their ε, as in `mnist-eps1`.
    """
    if name in RECOMMENDED:
        return WholeSettings(recommended(name))
    if name == "demo":
        return WholeSettings({section: dict(settings) for section, settings in _DEMO.items()})
    if name not in BENCHMARKS or name == "mnist5k":
        known = [*(each for each in BENCHMARKS if each != "mnist5k"), "demo", *RECOMMENDED]
        raise PlanError(f"preset: {name!r} is not one of {', '.join(known)}")
    settings = population(name)
    return WholeSettings(data={"dataset": name} | settings["data"], plan=settings["plan"] | _PAPER_MECHANISM)


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

    def settings(self, found: Found, *, on_sum: bool = False) -> dict[str, dict[str, Any]]:
        """The layers of an experiment, for `experiment.assemble`; with `on_sum`, the server reads the sum of a round."""
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
        if found.server_momentum:
            plan |= {"server_optimizer": "momentum", "server_momentum": found.server_momentum}
        if on_sum:  # the one colluder may be a client who reads the model
            plan |= {"noise": "sum", "secure_aggregation": True, "colluders": 1}
        return {"data": data, "model": {"network": found.network or self.network}, "plan": plan}


@dataclass(frozen=True)
class Found:
    """What was tuned on a fifth of the training split, and the noise that gives the ε (rounded up)."""

    epsilon: float
    rounds: int
    clip: float
    noise_multiplier: float
    learning_rate: float
    ema: float = 0.9
    server_momentum: float = 0.9
    network: str | None = None
    """None: the federation's."""


_DIGITS = "scattering+oriented-gradients"
"""Better than oriented gradients alone for digits, but with eleven times as many weights: not under much noise."""

FEDERATIONS = {
    "mnist": Federated("mnist", "shards", 100, 500, "oriented-gradients"),
    "cifar10": Federated("cifar10", "shards", 100, 400, "random-process"),
    "lfw": Federated("lfw", "iid", 10, 226, "random-process+mirrored-gradients"),
    "adult": Federated("adult", "iid", 100, 366, "linear"),
    "cancer": Federated("cancer", "iid", 10, 42, "linear"),
    # The paper's largest population: a hundred clients hold each image, so a person has a different ε (`unique`).
    "mnist-10k": Federated("mnist", "shards", 10_000, 500, "oriented-gradients", per_round=500),
}

FOUND = {
    "mnist": (
        Found(1, 80, 0.03, 1.4923, 133.3),
        Found(2, 160, 0.05, 1.1279, 60.0),
        Found(8, 320, 0.05, 0.4802, 120.0, network=_DIGITS),
    ),
    "cifar10": (
        Found(1, 50, 0.2, 1.319, 20.0),
        Found(2, 100, 0.2, 0.997, 15.0),
        Found(8, 200, 0.2, 0.4245, 20.0),
    ),
    "lfw": (
        Found(1, 40, 0.5, 1.5695, 1.0),
        Found(2, 80, 0.5, 1.1863, 2.0),
        Found(8, 160, 0.1, 0.5051, 20.0),
    ),
    "adult": (
        Found(1, 40, 0.25, 1.2337, 80.0, 0.8, 0.0),
        Found(2, 40, 0.25, 0.6594, 160.0, 0.8, 0.0),
        Found(8, 160, 0.5, 0.397, 40.0, 0.8, 0.0),
    ),
    "cancer": (
        Found(1, 10, 0.25, 1.821, 16.0, 0.5, 0.0),
        Found(2, 20, 0.25, 1.3763, 16.0, 0.5, 0.0),
        Found(8, 40, 0.25, 0.586, 32.0, 0.5, 0.0),
    ),
    "mnist-10k": (Found(1, 100, 0.1, 0.4463, 800.0, 0.8, 0.0),),
}
"""Settings for a server that reads each update."""

FOUND_FOR_SUMS = {
    "mnist": (
        Found(1, 800, 0.1, 105.5182, 40.0, network=_DIGITS),
        Found(2, 800, 0.05, 56.3936, 120.0, network=_DIGITS),
        Found(8, 800, 0.03, 16.9771, 1600.0, network=_DIGITS),
    ),
    "cifar10": (
        Found(1, 200, 0.2, 52.7591, 45.0),
        Found(2, 400, 0.1, 39.8763, 90.0),
        Found(8, 400, 0.2, 12.0046, 90.0),
    ),
    "lfw": (
        Found(1, 200, 0.25, 52.7591, 2.0),
        Found(2, 200, 0.1, 28.1968, 10.0),
        Found(8, 800, 0.1, 16.9771, 10.0),
    ),
    "adult": (
        Found(1, 300, 0.25, 64.6165, 40.0),
        Found(2, 300, 0.25, 34.5339, 40.0),
        Found(8, 300, 0.25, 10.3963, 40.0),
    ),
    "cancer": (
        Found(1, 50, 0.25, 26.3796, 1.2),
        Found(2, 50, 0.25, 14.0984, 4.0),
        Found(8, 50, 0.25, 4.2443, 4.0),
    ),
}
"""Settings for a server that reads the sum of a round."""


@dataclass(frozen=True)
class Recommended:
    """A recommended preset."""

    federated: Federated
    found: Found
    on_sum: bool
    """Whether the server reads only the sum of a round."""


RECOMMENDED: Mapping[str, Recommended] = {
    f"{name}{kind}-eps{found.epsilon:g}": Recommended(FEDERATIONS[name], found, on_sum=bool(kind))
    for kind, tuned in (("", FOUND), ("-sum", FOUND_FOR_SUMS))
    for name, all_found in tuned.items()
    for found in all_found
}
"""By the name of the preset."""


def recommended(name: str) -> dict[str, dict[str, Any]]:
    """The settings of a recommended preset."""
    chosen = RECOMMENDED[name]
    return chosen.federated.settings(chosen.found, on_sum=chosen.on_sum)
