"""The recipes of the accountant's specification, written a second time: a plan's fields to releases, releases to ε.

Nothing is imported from fedcdp.accounting. Of a `Plan` only plain fields and `clip_at` are read. A subclass of `Recipes` may
do one thing wrong on purpose; the tests compare it with this one.

μ is 1/z: the sensitivity of a released sum over the noise on it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from independent_epsilon import epsilon
from independent_losses import Chance, Exchanged, Release, Sampled, Shift, slotted, together
from scipy.stats import binom, hypergeom

from fedcdp.plan import Plan

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


class Recipes:
    """The rows of one plan in one federation."""

    def __init__(self, plan: Plan, federation: Federation) -> None:
        self.plan, self.federation = plan, federation
        self.client_rate = plan.per_round / federation.clients
        self.draws = {"example": math.sqrt(plan.slots), "batch": 1.0, "cohort": 1 / plan.per_round}[plan.noise]

    def figures(self, ledger: Ledger | None = None) -> dict[Key, Figures]:
        """Every row: the worst over clients of different size; of two rows that both hold, the smaller ε."""
        found: dict[Key, Figures] = {}
        for key, (kind, clients) in self._rows().items():
            each = [[self._evaluate(row, ledger) for row in alternatives] for alternatives in clients]
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
        return [self.multiplier(round_) for round_ in ledger.rounds]

    def _evaluate(self, row: Row | None, ledger: Ledger | None) -> tuple[float, float, float]:
        if row is None:  # nobody who did not take part has spent anything
            return math.inf, math.inf if ledger and any(ledger.participations[:1]) else 0.0, math.inf
        rounds = [self.multiplier(t) for t in range(self.plan.rounds)]
        worst = self._composed(row.every, rounds)
        before = min(self._composed(row.chosen, rounds), worst)  # to take part in every round is the worst that can happen
        if ledger is None:
            return before, math.nan, worst
        charged = sorted(self.released(ledger))
        if row.hidden:
            return before, self._composed(row.chosen, charged), worst
        taken = sum(ledger.participations[: row.holders])
        quietest = [sigma for sigma in charged for _ in range(row.most)][:taken]
        return before, self._composed(row.once, quietest), worst

    def _composed(self, made: Made, sigmas: Sequence[float]) -> float:
        return self.epsilon(together([(made(sigma), count) for sigma, count in Counter(sigmas).items()]))

    def epsilon(self, release: Release) -> float:
        """ε of a release at the plan's δ."""
        return epsilon(release, self.plan.delta)

    # Rows ------------------------------------------------------------------------------------------------------------

    def _rows(self) -> dict[Key, tuple[str, list[list[Row | None]]]]:
        """For each row its kind and, for each size of a client, those that hold; None: no guarantee."""
        plan = self.plan
        if plan.method in ("nonprivate", "dssgd") or plan.noise_multiplier == 0:
            return {(who, "record", "zero-out"): ("none", [[None]]) for who in ("server", "update", "example", "model")}
        return self._fed_sdp() if plan.method == "fed-sdp" else self._fed_cdp()

    def _for_sizes(self, make: Callable[[int], list[Row | None]]) -> list[list[Row | None]]:
        return [make(size) for size in self.federation.sizes]

    def known(self, once: Made) -> Row:
        """A reader who may know which clients took part."""
        return Row(lambda sigma: _lottery(once(sigma), self.client_rate), once, once)

    def unique(self, once: Made) -> Row:
        """One person, whose record lies at several clients."""
        clients, copies, chosen = self.federation.clients, self.federation.copies, self.plan.per_round
        poisson = self.plan.client_sampling == "poisson"
        most = copies if poisson else min(copies, chosen)
        law = binom(copies, self.client_rate) if poisson else hypergeom(clients, copies, chosen)
        shares = [float(law.pmf(number)) for number in range(most + 1)]

        def drawn(sigma: float) -> Release:
            one = once(sigma)
            return Chance(tuple((share, together([(one, number)])) for number, share in enumerate(shares) if number))

        return Row(drawn, once, lambda sigma: together([(once(sigma), most)]), most, copies)

    def distance(self, sigma: float, weight: float, first: bool = True) -> float:
        """μ for noise of `weight` draws over the unit's examples; the first step also counts norms, under noise σ_b."""
        mu = math.sqrt(self.federation.layers) / (sigma * weight)
        return math.hypot(mu, 0.5 / (self.plan.quantile_noise * weight)) if first and self.plan.quantile else mu

    # Fed-CDP ---------------------------------------------------------------------------------------------------------

    def _fed_cdp(self) -> dict[Key, tuple[str, list[list[Row | None]]]]:
        plan = self.plan
        exposed = [("example", 1.0, "zero-out"), ("example", 0.5, "replace-one")] if plan.noise == "example" else []
        rows: dict[Key, tuple[str, list[list[Row | None]]]] = {}
        summed = self._for_sizes(lambda size: [self.known(once) for once in self.summed(size)])
        rows["server", "record", "zero-out"] = rows["update", "record", "zero-out"] = "server", summed
        credit = "credited" if self.credited() else "server"
        rows["model", "record", "zero-out"] = (
            credit,
            self._for_sizes(lambda size: self._model(self.summed(size), self.cohort_rate(size), 1.0)),
        )
        whole = self.known(self._every_step(self.draws / plan.slots))
        rows["server", "client", "zero-out"] = "client", [[whole]]
        rows["model", "client", "zero-out"] = credit, [self._model([whole.once], self.client_rate, plan.slots)]
        for who, weight, relation in exposed:
            rows[who, "record", relation] = (
                "seen",
                self._for_sizes(lambda size, weight=weight: [self.known(self._steps(size, weight, self._seen))]),
            )
        if not exposed:
            rows["example", "record", "zero-out"] = "none", [[None]]
        if self.federation.copies > 1:
            rows["server", "unique", "zero-out"] = (
                "unique",
                self._for_sizes(lambda size: [self.unique(once) for once in self.summed(size)]),
            )
            if exposed:
                rows["example", "unique", "zero-out"] = (
                    "unique",
                    self._for_sizes(lambda size: [self.unique(self._steps(size, 1.0, self._seen))]),
                )
        return rows

    def record_rate(self, size: int) -> float:
        """q_l."""
        return min(1.0, self.plan.batch_size / size)

    def _uses(self, size: int) -> int:
        """In how many steps of a round a record may be."""
        steps, batch = self.plan.local_steps, self.plan.batch_size
        return min(steps, -(-steps * batch // size)) if self.plan.record_sampling == "partition" else steps

    def _steps(self, size: int, weight: float, step: Callable[[int, float], Release]) -> Made:
        """One participation: as many steps as may hold the record."""

        def participation(sigma: float) -> Release:
            first, later = (step(size, self.distance(sigma, weight, is_first)) for is_first in (True, False))
            return together([(first, 1), (later, self._uses(size) - 1)])

        return participation

    def summed(self, size: int) -> list[Made]:
        """One participation in the sums of its steps: with secret sampling; and with sampling that is known.

        A record that is zeroed out keeps its slot, so that known sampling moves a sum by one sensitivity. The dominating
        pairs of `fixed` sampling and of slots that overflow move it by two, and may cost more than secrecy saves.
        """
        secret = self._steps(size, self.draws, self._hidden)
        plan = self.plan
        if plan.record_sampling == "fixed" or (plan.record_sampling == "poisson" and size > plan.slots):
            return [secret, self._steps(size, self.draws, lambda _, mu: Shift(mu))]
        return [secret]

    def _every_step(self, weight: float) -> Made:
        def participation(sigma: float) -> Release:
            first, later = (Shift(self.distance(sigma, weight, is_first)) for is_first in (True, False))
            return together([(first, 1), (later, self.plan.local_steps - 1)])

        return participation

    def _hidden(self, size: int, mu: float) -> Release:
        """A step's sum, for a reader who does not know which records are in it."""
        rate = self.record_rate(size)
        if self.plan.record_sampling == "partition" or rate == 1:
            return Shift(mu)
        if self.plan.record_sampling == "fixed":
            return Exchanged(rate, 2 * mu)
        return slotted(size, rate, self.plan.slots, mu)

    def _seen(self, size: int, mu: float) -> Release:
        """A noised gradient, for a reader who knows whose it is."""
        rate = 1.0 if self.plan.record_sampling == "partition" else self.record_rate(size)
        return _lottery(Shift(mu), rate)

    # Secure aggregation ----------------------------------------------------------------------------------------------

    def credited(self) -> bool:
        """Whether the noise of the other clients counts for whoever reads the model alone."""
        plan = self.plan
        if not plan.secure_aggregation or self.pruned():
            return False
        return plan.method == "fed-sdp" or (plan.local_steps == 1 and not self.uneven())

    def pruned(self) -> bool:
        """Whether clients prune their own noise."""
        return self.plan.compression > 0

    def uneven(self) -> bool:
        """Whether the noise of a small client, divided by fewer records than B, shows that it took part."""
        return min(self.federation.sizes) < self.plan.batch_size

    def cohort_rate(self, size: int) -> float:
        """How often a record is in a round's sum, in secret: under `partition`, whenever its client is."""
        secret = 1.0 if self.plan.record_sampling == "partition" else self.record_rate(size)
        return self.client_rate * secret

    def _model(self, participations: list[Made], rate: float, examples: float) -> list[Row | None]:
        """The server's rows, and where others' noise counts one more. In full participation a unit moves the sum by its own
        `examples`; otherwise whoever is drawn in its client's place moves it by two whole steps of S."""
        server: list[Row | None] = [self.known(once) for once in participations]
        if not self.credited():
            return server
        weight = self.draws * math.sqrt(self.plan.per_round)
        if self.client_rate == 1:
            return [*server, self.known(lambda sigma: Shift(self.distance(sigma, weight / examples)))]
        slots, once = 2 * self.plan.slots, participations[0]
        return [*server, self._secret(rate, lambda sigma: self.distance(sigma, weight / slots), once)]

    def _secret(self, rate: float, mu: Callable[[float], float], once: Made) -> Row:
        return Row(lambda sigma: Exchanged(rate, mu(sigma)), once, once, hidden=True)

    # Fed-SDP ---------------------------------------------------------------------------------------------------------

    def _fed_sdp(self) -> dict[Key, tuple[str, list[list[Row | None]]]]:
        plan = self.plan
        rows: dict[Key, tuple[str, list[list[Row | None]]]] = {("example", "record", "zero-out"): ("none", [[None]])}
        for unit, weight in (("client", 1.0), ("record", 0.5)):
            update = self._update(weight)
            if plan.noise_at == "client":
                server: list[Row | None] = [self.known(update)]
                rows["server", unit, "zero-out"] = rows["update", unit, "zero-out"] = "server", [server]
                rows["model", unit, "zero-out"] = (
                    ("credited" if self.credited() else "server"),
                    [self._noisy_sum(update, weight)],
                )
                continue
            rows["server", unit, "zero-out"] = rows["update", unit, "zero-out"] = "none", [[None]]
            rows["model", unit, "zero-out"] = "hidden", [[Row(self._amplified(unit, update), update, update, hidden=True)]]
        if self.federation.copies > 1:
            if plan.noise_at == "client":
                rows["server", "unique", "zero-out"] = "unique", [[self.unique(self._update(0.5))]]
            else:
                most = self.unique(self._update(0.5)).most
                moved = self._update(0.5 / most)
                rows["model", "unique", "zero-out"] = "unique", [[Row(moved, moved, moved, hidden=True)]]
        return rows

    def _update(self, weight: float) -> Made:
        return lambda sigma: Shift(self.distance(sigma, weight))

    def _amplified(self, unit: str, update: Made) -> Made:
        """Noise at the server: its sum, for whoever does not know who took part."""

        def summed(sigma: float) -> Release:
            moved = update(sigma)
            if self.client_rate == 1 or not isinstance(moved, Shift):
                return moved
            if unit == "record":  # its client's update is another one: `update` is over that distance already
                return Exchanged(self.client_rate, moved.mu)
            if self.plan.client_sampling == "poisson":
                return Sampled(self.client_rate, moved.mu)
            return Exchanged(self.client_rate, 2 * moved.mu)

        return summed

    def _noisy_sum(self, update: Made, weight: float) -> list[Row | None]:
        """Noise at the clients, of which only the sum is seen."""
        server = self.known(update)
        if not self.credited():
            return [server]
        all_noise = math.sqrt(self.plan.per_round)
        if self.client_rate == 1:
            return [server, self.known(self._update(weight * all_noise))]
        return [server, self._secret(self.client_rate, lambda sigma: self.distance(sigma, all_noise / 2), update)]


def _lottery(release: Release, rate: float) -> Release:
    return release if rate == 1 else Chance(((rate, release),))
