"""The mistakes of the first release's accountant, each in the independent accountant: a check is worth something only if it
finds them."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from scipy.stats import binom

from fedcdp.config.plan import Plan
from tests.support.independent.losses import (
    Chance,
    Exchanged,
    Release,
    Sampled,
    Several,
    Shift,
    Swapped,
    Times,
    gaussian_epsilon,
)
from tests.support.independent.plans import Case
from tests.support.independent.recipes import Recipes
from tests.support.independent.rows import Federation, Ledger, Row


class AmplifiedInAFixedOrder(Recipes):
    """Secure aggregation amplifies by B/N also where the same batch is used in every participation."""

    def cohort_rate(self, size: int) -> float:
        """q_c·q_l under any record sampling."""
        return self.others_rate * self.record_rate(size)


class CreditedDespitePruning(Recipes):
    """Other clients' noise counts although they prune it."""

    def pruned(self) -> bool:
        """Never."""
        return False


class CreditedDespiteSmallClients(Recipes):
    """Other clients' noise counts although its energy shows who took part."""

    def uneven(self) -> bool:
        """Never."""
        return False


class RepeatsAsLaterRounds(Recipes):
    """A round that was released twice counts as the round after it."""

    def released(self, ledger: Ledger) -> list[float]:
        """The first rounds of the plan, as many as there were releases."""
        return [self.multiplier(min(count, self.plan.rounds - 1)) for count in range(len(ledger.rounds))]


class FewestRecordsIsWorst(Recipes):
    """Only the smallest client counts."""

    def __init__(self, plan: Plan, federation: Federation) -> None:
        super().__init__(plan, replace(federation, sizes=federation.sizes[:1]))


class CopiesAtOneSize(Recipes):
    """All copies of a record lie at clients that hold equally many records."""

    def _copied(self) -> list[list[Row | None]]:
        return super()._copied()[: len(self.federation.sizes)]


class RatesOfWholeMillionths(Recipes):
    """A rate is the nearest fraction with a denominator of at most a million: below half a millionth, nothing."""

    def epsilon(self, release: Release) -> float:
        """Of the release at the nearest rates."""
        return super().epsilon(_nearest(release))


class TailSpentOnce(Recipes):
    """Also a bound that gives up the secrecy of lotteries, in which the tail of an inner one is spent only once."""

    def epsilon(self, release: Release) -> float:
        """The smaller of the true ε and that bound."""
        delta, lotteries = self.plan.delta, 64
        precision = _precision(release, 1, delta / 2 / lotteries)
        return min(super().epsilon(release), gaussian_epsilon(math.sqrt(precision), delta / 2))


def _nearest(release: Release) -> Release:
    match release:
        case Exchanged(rate, mu):
            sample = Fraction(rate).limit_denominator(10**6)
            return Exchanged(float(sample), mu) if sample else Shift(0.0)
        case Chance(cases):
            return Chance(tuple((share, _nearest(each)) for share, each in cases))
        case Times(inner, count):
            return Times(_nearest(inner), count)
        case Several(parts):
            return Several(tuple(_nearest(part) for part in parts))
        case Shift() | Sampled() | Swapped():
            return release


def _precision(release: Release, times: int, tail: float) -> float:
    """Σ μ² of so many times, "at most, but for the tail"."""
    match release:
        case Shift(mu) | Sampled(_, mu) | Swapped(_, mu) | Exchanged(_, mu):
            return times * mu * mu
        case Times(inner, often):
            return _precision(inner, times * often, tail)
        case Several(parts):
            return times * sum(_precision(part, 1, tail) for part in parts)
        case Chance(((rate, inner),)):
            return _precision(inner, 1, tail) * float(binom.isf(tail, times, rate))
        case Chance(cases):
            return times * max(_precision(inner, 1, tail) for _, inner in cases)


_SECURE = {"local_steps": 1, "secure_aggregation": True, "record_sampling": "partition"}

MISTAKES: dict[type[Recipes], Case] = {
    AmplifiedInAFixedOrder: Case(
        Plan(**_SECURE, rounds=1, per_round=4, batch_size=1, noise_multiplier=0.5),
        Federation(clients=8, sizes=(10_000,), copies=1, layers=3),
        Ledger((0,), (1,)),
        "tight",
    ),
    CreditedDespitePruning: Case(
        Plan(**_SECURE, rounds=1, per_round=100, batch_size=1, noise_multiplier=0.2, compression=0.9999, delta=0.01),
        Federation(clients=100, sizes=(1,), copies=1, layers=1),
        Ledger((0,), (1,)),
        "tight",
    ),
    CreditedDespiteSmallClients: Case(
        Plan(**_SECURE, rounds=3, per_round=10, batch_size=8, noise_multiplier=2.0),
        Federation(clients=20, sizes=(2, 40), copies=1, layers=3),
        Ledger((0, 1, 2), (3,)),
        "tight",
    ),
    RepeatsAsLaterRounds: Case(
        Plan(local_steps=1, record_sampling="partition", rounds=12, per_round=5, clip="linear(6, 1)",
             noise_follows_clip=False, noise_multiplier=3.0),
        Federation(clients=10, sizes=(50,), copies=1, layers=3),
        Ledger((0, 0, 0, 0, 1, 1, 1, 2), (8,)),
        "tight",
    ),
    FewestRecordsIsWorst: Case(
        Plan(local_steps=1, rounds=1, per_round=5, batch_size=5, slots=10, noise="batch", noise_multiplier=0.6),
        Federation(clients=5, sizes=(10, 11), copies=1, layers=1),
        Ledger((0,), (1,)),
        "tight",
    ),
    RatesOfWholeMillionths: Case(
        Plan(local_steps=1, rounds=12, per_round=5, batch_size=1, record_sampling="fixed", noise_multiplier=0.15,
             delta=1e-8),
        Federation(clients=10, sizes=(3_000_000,), copies=1, layers=1),
        Ledger((0,), (1,)),
        "rdp",
    ),
    TailSpentOnce: Case(
        Plan(local_steps=1, rounds=20_000, per_round=100, batch_size=1, clip="quantile(0.5, 4)", quantile_noise=0.001),
        Federation(clients=1000, sizes=(20_000_000,), copies=1, layers=3),
        Ledger((0,), (0,)),
        "tight",
    ),
}  # fmt: skip
"""For each mistake a plan in which it shows: the corners of the specification."""

COPIES = Case(
    Plan(local_steps=1, rounds=1, per_round=2, batch_size=2, slots=3, noise="batch", noise_multiplier=0.937, delta=7.4e-8),
    Federation(clients=2, sizes=(3, 53), copies=2, layers=1),
    Ledger((0,), (1, 1)),
    "tight",
)
"""A person at two clients, one of whose slots never overflow: 8.13, where two copies at either cost 7.62."""
