"""Recipes: what each method shows to each adversary, as releases (docs/guarantees.md).

Every row is provable by itself, and carries the sentence that it rests on. z is the noise on a released sum over that
sum's sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from scipy.stats import binom, hypergeom, poisson

from fedcdp.accounting.adversaries import Adversary, Relation, Unit, View
from fedcdp.accounting.population import Population
from fedcdp.accounting.releases import (
    Draws,
    Gaussian,
    Lottery,
    OverfullPoisson,
    PoissonGaussian,
    Release,
    SlottedPoisson,
    Unprotected,
    WithoutReplacement,
    repeated,
    sequence,
)
from fedcdp.errors import PlanError
from fedcdp.plan import Plan


def views(plan: Plan, population: Population) -> list[View]:
    """Every row of the privacy table of a plan."""
    plan.check_clients(population.clients)
    if plan.secure_aggregation and plan.client_sampling == "poisson":
        raise PlanError(
            "secure_aggregation: with Poisson client sampling the energy of the noise shows the size of the cohort, so that "
            "nothing can be credited; use client_sampling fixed"
        )
    if plan.method in ("nonprivate", "dssgd"):
        reason = "nothing is noised" if plan.method == "nonprivate" else "the largest entries are shared as they are"
        return [_without(adversary, reason) for adversary in get_args(Adversary)]
    if plan.noise_multiplier == 0:
        reason = "the noise multiplier is 0, and clipping alone protects nothing"
        return [_without(adversary, reason) for adversary in get_args(Adversary)]
    if plan.method == "fed-sdp":
        return _fed_sdp(plan, population)
    smallest, *larger = (_fed_cdp(plan, population, records) for records in _sizes_that_count(plan, population))
    return [replace(row, others=tuple(same)) for row, *same in zip(smallest, *larger, strict=True)]


# One participation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mechanism:
    """The noise of a plan against a unit: `weight` is the number of noise draws' deviations over the unit's examples.

    A layer's sum then has noise σ·C·draws and moves by C for each of the unit's examples; M layers move together by √M.
    Where the clip bound follows a quantile, the first step of a round also shows an indicator in [−½, ½] for every example,
    under noise of its own.
    """

    plan: Plan
    layers: int
    weight: float

    def z(self, sigma: float) -> float:
        """z of an ordinary step."""
        return sigma * self.weight / math.sqrt(self.layers)

    def first_z(self, sigma: float) -> float:
        """z of a round's first step."""
        z = self.z(sigma)
        if self.plan.quantile is None:
            return z
        indicator = 2 * self.plan.quantile_noise * self.weight
        return 1 / math.sqrt(1 / z**2 + 1 / indicator**2)

    def participation(self, step: Callable[[float], Release], steps: int) -> Callable[[float], Release]:
        """So many steps of a round, the first of which may show more."""
        return lambda sigma: sequence([step(self.first_z(sigma)), repeated(step(self.z(sigma)), steps - 1)])


@dataclass(frozen=True)
class _Records:
    """How often, and how secretly, a record is used in one participation of its client, which holds `held` records."""

    plan: Plan
    held: int
    overflow: float | None = None
    """Not None: this stands for all clients with at least `held` records; their slots overflow with at most this chance."""

    @property
    def rate(self) -> float:
        """q_l: the share of a client's records in a step."""
        return min(1.0, self.plan.batch_size / self.held)

    @property
    def steps(self) -> int:
        """In how many of a round's steps a record may be used."""
        if self.plan.record_sampling != "partition":
            return self.plan.local_steps
        return min(self.plan.local_steps, -(-self.plan.local_steps * self.plan.batch_size // self.held))

    @property
    def assumption(self) -> str:
        """What the server's row rests on."""
        if self.plan.record_sampling == "partition":
            return f"a record is used at known steps, at most {self.steps} a round: no amplification"
        if self.rate == 1:
            return "every record is used in every step: no amplification"
        how = "independently of each other" if self.plan.record_sampling == "poisson" else "without replacement"
        return f"nobody sees which records a step draws ({how}, at rate {self.rate:.4g}); who takes part may be known"

    def hidden(self, z: float) -> Release:
        """A step's sum, for a reader who does not see which records were drawn."""
        plan = self.plan
        if plan.record_sampling == "partition" or self.rate == 1:
            return Gaussian(z)
        if plan.record_sampling == "fixed":
            return WithoutReplacement(self.rate, z / 2)
        if self.overflow is not None:
            return OverfullPoisson(self.rate, self.overflow, z)
        if self.held <= plan.slots:
            return PoissonGaussian(self.rate, z)
        return SlottedPoisson(self.held, self.rate, plan.slots, z)

    def seen(self, z: float) -> Release:
        """A noised gradient, for a reader who sees whether the record was drawn."""
        if self.plan.record_sampling == "partition" or self.rate == 1:
            return Gaussian(z)
        return Lottery(Gaussian(z), self.rate)


_EXACT_SIZES = 5


def _sizes_that_count(plan: Plan, population: Population) -> list[_Records]:
    """The clients that may be worst off, the one with the fewest records first.

    A record of a smaller client is used more often, so the smallest client is the worst off, with two exceptions:

    - Slots of a Poisson step overflow only where a client holds more than S records. Hence some of the smallest above S, and
      one bound for all others above S, whose rate is that of the smallest among them.
    - In a sample of fixed size another record may stand in a record's place only where a client holds more than B records.
      Hence the smallest above B.
    """
    smallest, slots = _Records(plan, population.records), plan.slots
    if plan.record_sampling == "partition":
        return [smallest]
    if plan.record_sampling == "fixed":
        sizes = (population.records, plan.batch_size + 1) if population.sizes is None else population.sizes
        return [smallest, *(_Records(plan, size) for size in sizes if size > max(plan.batch_size, population.records))][:2]
    if population.sizes is None:  # sizes that are not known: all above, with the overflow of the limit of large clients
        overflow = float(poisson.sf(slots - 1, plan.batch_size)) if slots > plan.batch_size else 1.0
        return [smallest, _Records(plan, max(population.records, slots) + 1, overflow)]
    above = [size for size in population.sizes if size > max(slots, population.records)]
    exact = [_Records(plan, size) for size in above[:_EXACT_SIZES]]
    return [smallest, *exact, *_all_of(plan, above[_EXACT_SIZES:])]


def _of_any_size(plan: Plan, population: Population) -> _Records:
    """A bound for every client at once: the copies of one person may lie at clients of different size.

    Where the smallest client uses all its records in every step, this is a Gaussian. It bounds the larger clients, too: a
    zeroed record keeps its place in the sample, so it moves the sum by one sensitivity, whoever knows the sample.
    """
    smallest, *larger = _sizes_that_count(plan, population)
    if not larger or plan.record_sampling != "poisson":
        return smallest
    held = population.sizes or (population.records,)
    known = _all_of(plan, [size for size in held if size > plan.slots])
    overflow = max(each.overflow for each in (*larger, *known) if each.overflow is not None)
    return _Records(plan, population.records, overflow)


def _all_of(plan: Plan, sizes: list[int]) -> list[_Records]:
    """One bound for clients that hold so many records each, all above S."""
    if not sizes:
        return []
    held = np.array(sizes)
    overflow = binom.sf(plan.slots - 1, held - 1, np.minimum(1.0, plan.batch_size / held))
    return [_Records(plan, sizes[0], float(overflow.max()))]


@dataclass(frozen=True)
class _Clients:
    """How a client's participation, and that of those who hold copies of a record, becomes a round."""

    plan: Plan
    population: Population

    @property
    def rate(self) -> float:
        """q_c: the share of clients in a round."""
        return self.plan.per_round / self.population.clients

    @property
    def most_copies(self) -> int:
        """How many clients with a copy may take part in one round."""
        copies = self.population.copies
        return copies if self.plan.client_sampling == "poisson" else min(copies, self.plan.per_round)

    def view(
        self, adversary: Adversary, unit: Unit, relation: Relation, assumption: str, taken: Callable[[float], Release]
    ) -> View:
        """A row whose adversary may know who took part: with probability q_c a participation, otherwise nothing."""
        if unit != "unique":
            return View(adversary, unit, relation, assumption, lambda sigma: _lottery(taken(sigma), self.rate), taken)
        copies, probabilities = self.population.copies, self._copies_in_a_round()
        return View(
            adversary,
            unit,
            relation,
            f"one person, stored at {copies} clients; {assumption}",
            lambda sigma: _draws(taken(sigma), probabilities),
            lambda sigma: repeated(taken(sigma), self.most_copies),
            participation=taken,
            at_once=self.most_copies,
        )

    def _copies_in_a_round(self) -> tuple[float, ...]:
        clients, copies, chosen = self.population.clients, self.population.copies, self.plan.per_round
        law = binom(copies, self.rate) if self.plan.client_sampling == "poisson" else hypergeom(clients, copies, chosen)
        return tuple(float(law.pmf(times)) for times in range(self.most_copies + 1))


def _lottery(inner: Release, rate: float) -> Release:
    return inner if rate == 1 or isinstance(inner, Unprotected) else Lottery(inner, rate)


def _draws(inner: Release, probabilities: tuple[float, ...]) -> Release:
    return inner if isinstance(inner, Unprotected) else Draws(inner, probabilities)


def _without(adversary: Adversary, reason: str, unit: Unit = "record") -> View:
    def nothing_holds(_: float) -> Release:
        return Unprotected(reason)

    return View(adversary, unit, "zero-out", reason, nothing_holds, nothing_holds)


# Fed-CDP -------------------------------------------------------------------------------------------------------------


def _fed_cdp(plan: Plan, population: Population, records: _Records) -> list[View]:
    """Every row, for clients that hold so many records."""
    clients = _Clients(plan, population)

    def mechanism(weight: float) -> _Mechanism:
        return _Mechanism(plan, population.layers, weight)

    in_the_sum = mechanism(plan.noise_on_sum).participation(records.hidden, records.steps)
    server = clients.view("server", "record", "zero-out", records.assumption, in_the_sum)
    rows = [server, replace(server, adversary="update")]
    if population.copies > 1:
        copied = mechanism(plan.noise_on_sum).participation(_of_any_size(plan, population).hidden, records.steps)
        rows.append(clients.view("server", "unique", "zero-out", records.assumption, copied))
    rows.append(_model_of_fed_cdp(plan, population, server, records))
    if plan.noise == "example":
        exposed = mechanism(1.0).participation(records.seen, records.steps)
        replaced = mechanism(0.5).participation(records.seen, records.steps)
        rows.append(clients.view("example", "record", "zero-out", _ONE_BY_ONE, exposed))
        rows.append(clients.view("example", "record", "replace-one", _ONE_BY_ONE, replaced))
        if population.copies > 1:
            rows.append(clients.view("example", "unique", "zero-out", _ONE_BY_ONE, exposed))
    else:
        rows.append(_without("example", f"{plan.noise} noise goes onto the batch's sum; single gradients are only clipped"))
    whole = mechanism(plan.noise_on_sum / plan.slots).participation(Gaussian, plan.local_steps)
    client = clients.view("server", "client", "zero-out", "all of a client's records, in every slot of every step", whole)
    return [*rows, client, _model_of_fed_cdp(plan, population, client, records)]


_ONE_BY_ONE = (
    "every noised gradient of the record is seen, and that it is the record's; only where each gradient is noised before "
    "the sum: in a tapped simulation, or on a deployed client whose policy names `example`"
)


def _model_of_fed_cdp(plan: Plan, population: Population, server: View, records: _Records) -> View:
    """The model alone: as the server's view, unless a single step under secure aggregation lets others' noise count."""
    reason = _why_others_do_not_count(plan)
    if plan.local_steps > 1:
        reason = "over several local steps a client can repeat what it saw, so other clients' noise does not count"
    elif reason is None and population.records < plan.batch_size:
        reason = (
            "a client with fewer than B records divides by their number, so the energy of the sum's noise shows whether it "
            "took part, and other clients' noise does not count"
        )
    if reason is not None:
        return replace(server, adversary="model", assumption=f"as the server's row: {reason}")
    noise = plan.noise_on_sum * math.sqrt(plan.per_round)  # on the cohort's sum
    known, secret = 1.0, plan.per_round / population.clients
    if server.unit == "client":
        known = float(plan.slots)
    elif plan.record_sampling != "partition":  # a batch in a fixed order is used in every participation
        secret *= records.rate
    return _with_the_others(
        server,
        everyone=plan.per_round == population.clients,
        chosen=secret,
        taken=_Mechanism(plan, population.layers, noise / known),
        replaced=_Mechanism(plan, population.layers, noise / (2 * plan.slots)),
    )


def _why_others_do_not_count(plan: Plan) -> str | None:
    """Why the noise of other clients cannot be credited to the model, if it cannot, for any method that noises updates."""
    if not plan.secure_aggregation:
        return "without secure aggregation other clients' noise does not count"
    if plan.compression:
        return "each client prunes its own noise before the sum, so other clients' noise does not count"
    return None


_SUM_ALONE = "secure aggregation holds, and the reader, who is none of the clients, does not know single updates"


def _with_the_others(server: View, everyone: bool, chosen: float, taken: _Mechanism, replaced: _Mechanism) -> View:
    """The model's row with the noise of the whole cohort on the sum, which secure aggregation does not open.

    | clients in a round | who must not know what | release |
    | --- | --- | --- |
    | all of them | nobody sees a single update | Gaussian: nothing is chosen, so nothing is amplified |
    | a fixed number | nor who took part | sampling without replacement: another client may stand in the unit's place |
    """
    if everyone:

        def together(sigma: float) -> Release:
            return Gaussian(taken.first_z(sigma))

        assumption = f"{_SUM_ALONE}; every client takes part in every round: no amplification"
        return replace(server, adversary="model", assumption=assumption, a_priori=together, taken=together, fallback=server)
    return replace(
        server,
        adversary="model",
        assumption=f"{_SUM_ALONE}, and who took part",
        a_priori=lambda sigma: WithoutReplacement(chosen, replaced.first_z(sigma)),
        hidden=True,
        fallback=server,
    )


# Fed-SDP -------------------------------------------------------------------------------------------------------------


def _fed_sdp(plan: Plan, population: Population) -> list[View]:
    """A client that is zeroed out moves the sum by C·√M; a record, by twice that: it may turn its client's update around."""
    rows = _fed_sdp_of("client", plan, population, _Mechanism(plan, population.layers, 1.0))
    halved = _Mechanism(plan, population.layers, 0.5)
    rows += _fed_sdp_of("record", plan, population, halved)
    if population.copies > 1:
        rows.append(_copies_of_fed_sdp(plan, population, halved))
    return [*rows, _without("example", "local training is not private: every gradient in it is raw")]


_TURNED = "a record may turn its client's update around, over twice the distance; "


def _fed_sdp_of(unit: Unit, plan: Plan, population: Population, mechanism: _Mechanism) -> list[View]:
    clients, turned = _Clients(plan, population), _TURNED if unit == "record" else ""

    def update(sigma: float) -> Gaussian:
        return Gaussian(mechanism.first_z(sigma))

    if plan.noise_at == "client":
        whole = f"{turned}the whole update of a client is clipped and noised before it leaves"
        server = clients.view("server", unit, "zero-out", whole, update)
        return [server, replace(server, adversary="update"), _model_of_noisy_clients(plan, clients, server, mechanism)]
    reads_raw = "the server adds the noise after it has read the raw updates"
    trusted = f"{turned}the server is trusted with raw updates and adds the noise; nobody else knows who took part"
    model = View("model", unit, "zero-out", trusted, lambda sigma: _amplified(unit, clients, update(sigma)), update, True)
    return [_without("server", reads_raw, unit), _without("update", reads_raw, unit), model]


def _amplified(unit: Unit, clients: _Clients, update: Gaussian) -> Release:
    """The server's noised sum, for whoever does not know who took part."""
    if clients.rate == 1:
        return update
    if unit == "record":  # its update is another one, in either way of choosing clients: `update.z` is over that distance
        return WithoutReplacement(clients.rate, update.z)
    if clients.plan.client_sampling == "poisson":
        return PoissonGaussian(clients.rate, update.z)
    return WithoutReplacement(clients.rate, update.z / 2)


def _model_of_noisy_clients(plan: Plan, clients: _Clients, server: View, mechanism: _Mechanism) -> View:
    reason = _why_others_do_not_count(plan)
    if reason is not None:
        return replace(server, adversary="model", assumption=f"as the server's row: {reason}")
    noise = math.sqrt(plan.per_round)  # on the cohort's sum
    return _with_the_others(
        server,
        everyone=clients.rate == 1,
        chosen=clients.rate,
        taken=replace(mechanism, weight=noise * mechanism.weight),
        # Of a client as of a record: whoever else is drawn in its place moves the sum by twice its sensitivity.
        replaced=replace(mechanism, weight=noise / 2),
    )


def _copies_of_fed_sdp(plan: Plan, population: Population, mechanism: _Mechanism) -> View:
    clients = _Clients(plan, population)
    if plan.noise_at == "client":
        whole = f"{_TURNED}the whole update of a client is clipped and noised before it leaves"
        return clients.view("server", "unique", "zero-out", whole, lambda sigma: Gaussian(mechanism.first_z(sigma)))

    def together(sigma: float) -> Release:  # several clients move one sum: the distance grows with their number
        return Gaussian(mechanism.first_z(sigma) / clients.most_copies)

    assumption = f"{_TURNED}one person, stored at {population.copies} clients, of which any may take part together"
    return View("model", "unique", "zero-out", assumption, together, together, hidden=True)
