"""Random plans over all options, and the comparison of what is printed for them with what is recomputed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Mode, Privacy, Usage, state
from fedcdp.config.plan import SCALING, Plan
from fedcdp.errors import PlanError
from tests.support.independent.recipes import Recipes
from tests.support.independent.rows import Federation, Figures, Key, Ledger

BELOW = 0.005
"""The share by which a printed ε may stay below the recomputed one: the error of the numerics on both sides."""
ABOVE = 0.1
_TINY = 1e-6  # an ε below is as good as none, and tables of losses do not resolve it


@dataclass(frozen=True)
class Case:
    """A plan, the federation that it trains, and what its ledger counts."""

    plan: Plan
    federation: Federation
    ledger: Ledger
    mode: Mode

    def printed(self) -> Privacy | None:
        """The statement of the package; None where `rdp` refuses the slotted Poisson."""
        sizes = self.federation.sizes
        population = Population(
            clients=self.federation.clients,
            records=sizes[0],
            copies=self.federation.copies,
            layers=self.federation.layers,
            sizes=sizes if len(sizes) > 1 else (),
        )
        try:
            usage = Usage(self.ledger.rounds, self.ledger.participations)
            return state(self.plan, population, mode=self.mode, usage=usage)
        except PlanError as error:
            if self.mode == "rdp" and "slots" in str(error) and self._drops():
                return None
            raise

    def recomputed(self, recipes: type[Recipes] = Recipes) -> dict[Key, Figures]:
        """The same rows by the independent accountant."""
        return recipes(self.plan, self.federation).figures(self.ledger)

    def _drops(self) -> bool:
        return self.plan.record_sampling == "poisson" and self.federation.sizes[-1] > self.plan.slots


@dataclass(frozen=True)
class Comparison:
    """One printed ε beside the recomputed one."""

    key: Key
    figure: str
    kind: str
    printed: float
    recomputed: float

    @property
    def ratio(self) -> float:
        """Printed over recomputed; 1 where both are infinite or too small to matter."""
        if self.printed == self.recomputed or max(self.printed, self.recomputed) <= _TINY:
            return 1.0
        return self.printed / self.recomputed if self.recomputed > 0 else math.inf

    @property
    def too_small(self) -> bool:
        """Whether the print claims more privacy than there is."""
        return self.printed < self.recomputed * (1 - BELOW) - _TINY

    @property
    def loose(self) -> bool:
        """Whether the print claims much less than there is."""
        return self.ratio > 1 + ABOVE


def compare(printed: dict[Key, tuple[float, float | None, float]], recomputed: dict[Key, Figures]) -> list[Comparison]:
    """Every figure of every row. A row that one side lacks is an error."""
    if printed.keys() != recomputed.keys():
        raise AssertionError(f"rows differ: {sorted(printed.keys() ^ recomputed.keys())}")
    found = []
    for key, theirs in printed.items():
        mine = recomputed[key]
        for figure, value, other in zip(
            ("epsilon", "used", "worst"), theirs, (mine.epsilon, mine.used, mine.worst), strict=True
        ):
            if value is None or other is None:
                raise AssertionError(f"{key}: {figure} is missing")
            found.append(Comparison(key, figure, mine.kind, value, other))
    return found


def rows_of(privacy: Privacy) -> dict[Key, tuple[float, float | None, float]]:
    """The figures of a statement, by row."""
    return {
        (row.adversary, row.unit, row.relation): (row.epsilon, row.epsilon_used, row.epsilon_worst) for row in privacy.rows
    }


def rows_of_recipes(figures: dict[Key, Figures]) -> dict[Key, tuple[float, float | None, float]]:
    """The figures of recipes (sabotaged ones, say) as if they had been printed."""
    return {key: (each.epsilon, each.used, each.worst) for key, each in figures.items()}


# Random plans ---------------------------------------------------------------------------------------------------------


def random_case(random: Random, rounds: Sequence[int] = (1, 2, 5, 12, 30)) -> Case:
    """Any plan that is allowed, with corners more often than chance would have them; and one of these numbers of rounds."""
    clients = random.choice([2, 3, 8, 20, 40])
    per_round = clients if random.random() < 0.35 else random.randint(1, clients)
    layers = random.choice([1, 2, 3, 5])
    plan = _plan(random, random.choice(rounds), per_round, layers)
    federation = Federation(
        clients=clients,
        sizes=_sizes(random, plan),
        copies=1 if random.random() < 0.6 else random.randint(1, min(clients, 4)),
        layers=layers if plan.clip_mode == "layer" else 1,
    )
    few = plan.noise_follows_clip or plan.rounds <= 2  # distinct releases: dp_accounting takes seconds for each in `rdp`
    mode: Mode = "rdp" if few and random.random() < 0.15 else "tight"
    return Case(plan, federation, _ledger(random, plan), mode)


def _plan(random: Random, rounds: int, per_round: int, layers: int) -> Plan:
    method = random.choice(["fed-cdp"] * 10 + ["fed-cdp-decay"] * 3 + ["fed-sdp"] * 7 + ["nonprivate", "dssgd"])
    batch = random.choice([1, 1, 2, 3, 5, 8])
    sampling = random.choice(["poisson", "poisson", "fixed", "partition"])
    noise = random.choice(["example", "example", "batch", "cohort"])
    clip = random.choice(_CLIPS[:3] if method == "fed-cdp-decay" else _CLIPS)
    quantile = clip.startswith("quantile")
    secure = random.random() < 0.6
    fields: dict[str, Any] = {
        "method": method,
        "rounds": rounds,
        "per_round": per_round,
        "local_steps": 1 if random.random() < 0.6 else random.choice([2, 5, 20]),
        "batch_size": batch,
        "clip": clip,
        "clip_mode": random.choice(["layer", "layer", "flat"]),
        "noise": noise,
        "noise_at": random.choice(["server", "client"]),
        "noise_follows_clip": quantile or random.random() < 0.5,
        "quantile_noise": 10 ** random.uniform(-1, 1.5),
        "client_sampling": "fixed" if secure else random.choice(["fixed", "poisson"]),
        "record_sampling": sampling,
        "slots": random.randint(batch, 4 * batch) if sampling == "poisson" else batch,
        "learning_rate": random.choice(["0.1", "linear(0.1, 0.05)"]),
        "server_learning_rate": random.choice([1.0, 0.5]),  # drawn anew below
        "momentum": random.choice([0.0, 0.9]),
        "ema": random.choice([0.0, 0.9]),
        "aggregation": random.choice(["fedsgd", "fedaveraging"]),
        "compression": random.choice([0.0, 0.0, 0.0, 0.3, 0.999]),
        "secure_aggregation": secure,
        "delta": 10 ** random.uniform(-8, -2),
        "secure_noise": random.random() < 0.2,
    }
    # σ such that z of the smallest of the plan's mechanisms lies within what matters
    draws = (
        1.0 if method == "fed-sdp" else {"example": math.sqrt(fields["slots"]), "batch": 1.0, "cohort": 1 / per_round}[noise]
    )
    if random.random() < 0.4:
        fields |= {"weighting": "records", "mean_records": random.choice([None, 7.5])}
    if method.startswith("fed-cdp") and noise == "example" and random.random() < 0.5:
        fields["noise_slots"] = "held"
    if method.startswith("fed") and random.random() < 0.3:
        fields["scaling_noise"] = math.exp(random.uniform(math.log(0.5), math.log(20)))
    fields |= _post_processing(Random(repr(fields)), fields)
    if secure and random.random() < 0.6:
        fields["colluders"] = random.randint(0, per_round - 1)
        if method != "nonprivate" and method != "dssgd" and per_round > 1 and random.random() < 0.6:
            fields |= _on_the_sum(random, fields)
            draws = 1 / math.sqrt(per_round - fields["colluders"])
    z = math.exp(random.uniform(math.log(0.4), math.log(12)))
    multiplier = z * math.sqrt(layers) / draws
    return Plan(**fields, noise_multiplier=0.0 if random.random() < 0.02 else multiplier)


def _on_the_sum(random: Random, fields: dict[str, Any]) -> dict[str, Any]:
    """The same plan with its noise on the sum of all clients, as far as that is allowed."""
    clip = fields["clip"] if not fields["clip"].startswith("quantile") else "4"
    steps = {"local_steps": 1} if fields["method"].startswith("fed-cdp") else {"noise_at": "client"}
    return steps | {
        "noise": "sum", "noise_slots": "all", "clip": clip, "compression": 0.0, "aggregation": "fedsgd",
        "attempts": random.choice([1, 1, 3]),
    }  # fmt: skip


def _post_processing(random: Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Options on which no ε depends. They have randomness of their own: a plan's number stands for the same mechanism."""
    options = {
        "server_optimizer": random.choice(["sgd", "momentum", "adam", "yogi"]),
        "server_learning_rate": random.choice([1.0, 0.5, "linear(1, 0.1)", "cosine(0.5, 0.01)"]),
        "server_momentum": random.choice([0.0, 0.9]),
        "server_beta2": random.choice([0.0, 0.99]),
        "server_epsilon": random.choice([1e-9, 1e-3, 1.0]),
        "proximal": random.choice([0.0, 0.0, 0.1, 5.0]),
    }
    at_server = fields["method"] == "fed-sdp" and fields["noise_at"] == "server"
    sparse = fields["method"] == "dssgd" or fields["compression"] > 0
    if fields["secure_aggregation"] or at_server or sparse or fields.get("weighting") == "records":
        return options
    groups = random.randint(1, fields["per_round"])
    return options | {
        "aggregator": random.choice(["mean", "trimmed-mean", "median-of-means"]),
        "trim": random.choice([0.01, 0.2, 0.49]),
        "median_groups": groups,
    }


_CLIPS = [
    "linear(6, 2)",
    "exponential(6, 2)",
    "cosine(6, 2)",
    "4",
    "4",
    "linear(2, 6)",
    "proportional(4)",
    "quantile(0.5, 4)",
]


def _sizes(random: Random, plan: Plan) -> tuple[int, ...]:
    """Fewer records than a batch, about as many, just more than the slots, and many more."""
    batch, slots = plan.batch_size, plan.slots
    kinds = [lambda: random.randint(1, batch), lambda: random.randint(batch, 2 * slots), lambda: slots + 1]
    kinds += [lambda: random.randint(batch, 100 * batch)] * 2 + [lambda: int(10 ** random.uniform(3, 7))]
    return tuple(sorted({random.choice(kinds)() for _ in range(random.choice([1, 1, 2, 3]))}))


def _ledger(random: Random, plan: Plan) -> Ledger:
    """Some rounds from the first on, each released once or, after a crash under secure noise, several times."""
    done = random.randint(0, plan.rounds)
    again = (3, 1, 2) if random.random() < 0.5 else (1,)
    rounds = tuple(t for t in range(done) for _ in range(random.choice(again)))
    if plan.scaling_noise is not None:
        rounds = (SCALING,) * random.choice((1, 1, 2)) + rounds
    counts = sorted((random.randint(0, sum(round_ >= 0 for round_ in rounds)) for _ in range(4)), reverse=True)
    return Ledger(rounds, tuple(counts))
