"""Rows of the independent accountant: rounds, participations and copies of a record, and the ε of all of them together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy.stats import binom, hypergeom

from fedcdp.config.plan import Plan
from tests.support.independent.epsilon import UnresolvedError, epsilon
from tests.support.independent.losses import Chance, Release, Shift, gaussian_epsilon, together

Key = tuple[str, str, str]
Made = Callable[[float], Release]


@dataclass(frozen=True)
class Federation:
    """K clients, the different numbers of records that they hold, copies of a record, groups that are clipped apart."""

    clients: int
    sizes: tuple[int, ...]
    copies: int
    layers: int


@dataclass(frozen=True)
class Ledger:
    """Every released round, in any order, repeats included; and how often the most-used clients took part, descending."""

    rounds: tuple[int, ...]
    participations: tuple[int, ...]


@dataclass(frozen=True)
class Figures:
    """The three ε of a row, and what kind of row it is."""

    epsilon: float
    used: float | None
    worst: float
    kind: str


@dataclass(frozen=True)
class Row:
    """What one adversary sees of one unit in a round, as functions of the round's noise multiplier σ_t."""

    chosen: Made
    """Over the choice of the round's clients."""
    once: Made
    """One participation of one client that holds the unit."""
    every: Made
    """If as many clients that hold the unit as possible take part."""
    most: int = 1
    """How many clients that hold the unit may take part in one round."""
    holders: int = 1
    """How many clients hold the unit."""
    hidden: bool = False
    """Whether nobody knows who took part, so that `chosen` is also what a released round has cost."""


class Rows:
    """The rows of one plan in one federation: how they are made of rounds, and their ε."""

    def __init__(self, plan: Plan, federation: Federation) -> None:
        self.plan, self.federation = plan, federation
        self.client_rate = plan.per_round / federation.clients
        self.share = 1 / math.sqrt(plan.per_round - plan.colluders)  # of one client, where noise is on the sum of all
        self.draws = {
            "example": math.sqrt(plan.slots), "batch": 1.0, "cohort": 1 / plan.per_round, "sum": self.share,
        }[plan.noise]  # fmt: skip

    def figures(self, ledger: Ledger | None = None) -> dict[Key, Figures]:
        """Every row: the worst over clients of different size; of two rows that both hold, the smaller ε."""
        found: dict[Key, Figures] = {}
        for key, (kind, clients) in self.rows().items():
            each = [[self._evaluate(row, ledger, self.scaling(key)) for row in alternatives] for alternatives in clients]
            smallest = [[min(values) for values in zip(*client, strict=True)] for client in each]
            before, spent, worst = (max(values) for values in zip(*smallest, strict=True))
            found[key] = Figures(before, None if ledger is None else spent, worst, kind)
        return found

    # Rounds ----------------------------------------------------------------------------------------------------------

    def multiplier(self, round_: int) -> float:
        """σ_t: the noise of a round over its clip bound, exactly."""
        plan = self.plan
        if plan.noise_follows_clip:
            return plan.noise_multiplier
        return plan.noise_multiplier * plan.clip_at(0) / plan.clip_at(round_)

    def released(self, ledger: Ledger) -> list[float]:
        """The noise multiplier of every release in a ledger."""
        return [self.multiplier(round_) for round_ in ledger.rounds if round_ >= 0]

    def scaling(self, key: Key) -> float:
        """μ of noised means and variances, which every client releases once: a record's share of the sums over their noise.

        All of a client's records together; one record under its own share of the noise; a person at several clients.
        """
        if self.plan.scaling_noise is None:
            return 0.0
        who, unit, relation = key
        most = max(self.federation.sizes)
        mu = (2.0 if relation == "replace-one" else 1.0) / self.plan.scaling_noise
        mu *= most if unit == "client" else math.sqrt(most) if who == "example" else 1.0
        return mu * (math.sqrt(self.federation.copies) if unit == "unique" else 1.0)

    def _evaluate(self, row: Row | None, ledger: Ledger | None, scaling: float) -> tuple[float, float, float]:
        again = 1 if ledger is None else max(1, sum(round_ < 0 for round_ in ledger.rounds))
        extra, spent = ([(Shift(scaling), times)] if scaling else [] for times in (1, again))
        if row is None:  # nobody who did not take part has spent anything but this
            nothing = self.epsilon(together(spent)) if spent else 0.0
            return math.inf, math.inf if ledger and any(ledger.participations[:1]) else nothing, math.inf
        rounds = [self.multiplier(t) for t in range(self.plan.rounds)]
        worst = self._composed(row.every, rounds * self.plan.attempts, extra)
        # To take part in every round is the worst that can happen.
        before = min(self._composed(made, rounds, extra) for made in (row.chosen, row.every))
        if ledger is None:
            return before, math.nan, worst
        charged = sorted(self.released(ledger))
        if row.hidden:
            each = (self._composed(made, charged, spent) for made in (row.chosen, row.every))
            return before, min(each), worst
        taken = sum(ledger.participations[: row.holders])
        quietest = [sigma for sigma in charged for _ in range(row.most)][:taken]
        return before, self._composed(row.once, quietest, spent), worst

    def _composed(self, made: Made, sigmas: Sequence[float], extra: list[tuple[Shift, int]]) -> float:
        rounds: list[tuple[Release, int]] = [(made(sigma), count) for sigma, count in Counter(sigmas).items()]
        try:
            return self.epsilon(together([*rounds, *extra]))
        except UnresolvedError:  # millions of records of one client: next to their sums, the rounds do not count
            if not extra:
                raise
            return gaussian_epsilon(math.sqrt(sum(each.mu**2 * times for each, times in extra)), self.plan.delta)

    def epsilon(self, release: Release) -> float:
        """ε of a release at the plan's δ."""
        return epsilon(release, self.plan.delta)

    def rows(self) -> dict[Key, tuple[str, list[list[Row | None]]]]:
        """For each row its kind and, for each size of a client, those that hold; None: no guarantee."""
        raise NotImplementedError

    # What a round is made of -------------------------------------------------------------------------------------------

    def known(self, once: Made) -> Row:
        """A reader who may know which clients took part."""
        return Row(lambda sigma: lottery(once(sigma), self.client_rate), once, once)

    def unique(self, once: Made) -> Row:
        """One person, whose record lies at several clients."""
        copies, chosen = self.federation.copies, self.plan.per_round
        most = copies if self.plan.client_sampling == "poisson" else min(copies, chosen)
        shares = self._numbers(most)

        def drawn(sigma: float) -> Release:
            one = once(sigma)
            return Chance(tuple((share, together([(one, number)])) for number, share in enumerate(shares) if number))

        return Row(drawn, once, lambda sigma: together([(once(sigma), most)]), most, copies)

    def mixed(self, holders: list[Made]) -> Row:
        """Copies at clients that differ: whoever takes part is drawn evenly from all of them."""
        alike = self.unique(holders[0])
        shares = self._numbers(alike.most)

        def drawn(sigma: float) -> Release:
            cases = Counter[Release]()
            made = [once(sigma) for once in holders]
            for number, share in enumerate(shares[1:], start=1):
                chosen = list(combinations(made, number))
                for few in chosen:
                    cases[together([(each, 1) for each in few])] += share / len(chosen)  # type: ignore[assignment]
            return Chance(tuple((share, release) for release, share in cases.items()))

        def every(sigma: float) -> Release:
            return together([(once(sigma), 1) for once in holders[: alike.most]])

        return Row(drawn, alike.once, every, alike.most, alike.holders)

    def _numbers(self, most: int) -> list[float]:
        """How likely it is that 0, 1, … of the clients that hold a copy take part in a round."""
        clients, copies, chosen = self.federation.clients, self.federation.copies, self.plan.per_round
        poisson = self.plan.client_sampling == "poisson"
        law = binom(copies, self.client_rate) if poisson else hypergeom(clients, copies, chosen)
        return [float(law.pmf(number)) for number in range(most + 1)]

    def distance(self, sigma: float, weight: float, first: bool = True) -> float:
        """μ for noise of `weight` draws over the unit's examples; the first step also counts norms, under noise σ_b."""
        mu = math.sqrt(self.federation.layers) / (sigma * weight)
        return math.hypot(mu, 0.5 / (self.plan.quantile_noise * weight)) if first and self.plan.quantile else mu


def lottery(release: Release, rate: float) -> Release:
    return release if rate == 1 else Chance(((rate, release),))
