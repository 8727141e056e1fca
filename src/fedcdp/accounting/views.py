"""Recipes: what each method shows to each adversary, as releases (docs/guarantees.md).

Every row is provable by itself, and carries the sentence that it rests on. z is the noise on a released sum over that
sum's sensitivity.

Who sees what: for every adversary of the threat model, the releases that a plan shows it (design: docs/guarantees.md).

| adversary | reads |
| --- | --- |
| `example` (type-2) | every example's gradient as the method releases it inside local training, and whose it is |
| `update` (type-1) | a client's update before it leaves |
| `server` (type-0) | every client's update as received |
| `model` | the global model after every round, and nothing else |

Units: a `record`, a `client` (all of its records), and `unique`: one person whose record is stored at several clients.
Relations: `zero-out` (the unit's contribution is replaced by nothing) and `replace-one` (by another's).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from scipy.stats import binom, hypergeom

from fedcdp.accounting.mechanisms import (
    Draws,
    Gaussian,
    Lottery,
    Mechanism,
    PoissonGaussian,
    Records,
    Release,
    Unprotected,
    WithoutReplacement,
    of_any_size,
    repeated,
    sequence,
    sizes_that_count,
)
from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError


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
    smallest, *larger = (_fed_cdp(plan, population, records) for records in sizes_that_count(plan, population))
    return [replace(row, others=tuple(same)) for row, *same in zip(smallest, *larger, strict=True)]


# The choice of clients ------------------------------------------------------------------------------------------------


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


def _fed_cdp(plan: Plan, population: Population, records: Records) -> list[View]:
    """Every row, for clients that hold so many records."""
    clients = _Clients(plan, population)

    def mechanism(weight: float) -> Mechanism:
        return Mechanism(plan, population.layers, weight)

    in_the_sum = mechanism(plan.noise_on_sum).participation(records.hidden, records.steps)
    server = clients.view("server", "record", "zero-out", records.assumption, in_the_sum)
    rows = [server, replace(server, adversary="update")]
    if population.copies > 1:
        copied = mechanism(plan.noise_on_sum).participation(of_any_size(plan, population).hidden, records.steps)
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


def _model_of_fed_cdp(plan: Plan, population: Population, server: View, records: Records) -> View:
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
        taken=Mechanism(plan, population.layers, noise / known),
        replaced=Mechanism(plan, population.layers, noise / (2 * plan.slots)),
    )


def _why_others_do_not_count(plan: Plan) -> str | None:
    """Why the noise of other clients cannot be credited to the model, if it cannot, for any method that noises updates."""
    if not plan.secure_aggregation:
        return "without secure aggregation other clients' noise does not count"
    if plan.compression:
        return "each client prunes its own noise before the sum, so other clients' noise does not count"
    return None


_SUM_ALONE = "secure aggregation holds, and the reader, who is none of the clients, does not know single updates"


def _with_the_others(server: View, everyone: bool, chosen: float, taken: Mechanism, replaced: Mechanism) -> View:
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
    rows = _fed_sdp_of("client", plan, population, Mechanism(plan, population.layers, 1.0))
    halved = Mechanism(plan, population.layers, 0.5)
    rows += _fed_sdp_of("record", plan, population, halved)
    if population.copies > 1:
        rows.append(_copies_of_fed_sdp(plan, population, halved))
    return [*rows, _without("example", "local training is not private: every gradient in it is raw")]


_TURNED = "a record may turn its client's update around, over twice the distance; "


def _fed_sdp_of(unit: Unit, plan: Plan, population: Population, mechanism: Mechanism) -> list[View]:
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


def _model_of_noisy_clients(plan: Plan, clients: _Clients, server: View, mechanism: Mechanism) -> View:
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


def _copies_of_fed_sdp(plan: Plan, population: Population, mechanism: Mechanism) -> View:
    clients = _Clients(plan, population)
    if plan.noise_at == "client":
        whole = f"{_TURNED}the whole update of a client is clipped and noised before it leaves"
        return clients.view("server", "unique", "zero-out", whole, lambda sigma: Gaussian(mechanism.first_z(sigma)))

    def together(sigma: float) -> Release:  # several clients move one sum: the distance grows with their number
        return Gaussian(mechanism.first_z(sigma) / clients.most_copies)

    assumption = f"{_TURNED}one person, stored at {population.copies} clients, of which any may take part together"
    return View("model", "unique", "zero-out", assumption, together, together, hidden=True)


Adversary = Literal["server", "update", "example", "model"]
Unit = Literal["record", "client", "unique"]
Relation = Literal["zero-out", "replace-one"]

# A clip bound that decays under noise that stays gives every round its own noise multiplier. Multipliers are rounded down to
# at most this many values, so that a long run composes few distinct releases. Rounding down makes the printed ε larger.
_DISTINCT = 24
_DISTINCT_GAUSSIANS = 4096  # Gaussian releases add up in closed form


@dataclass(frozen=True)
class View:
    """What one adversary sees of one unit in one round, as a function of the round's noise multiplier σ_t = noise / C_t."""

    adversary: Adversary
    unit: Unit
    relation: Relation
    assumption: str
    a_priori: Callable[[float], Release]
    """Over the choice of the round's clients."""
    taken: Callable[[float], Release]
    """If the unit is known to take part."""
    hidden: bool = False
    """Whether `a_priori` rests on nobody knowing who took part, so that it is also what a round has cost."""
    participation: Callable[[float], Release] | None = None
    """One participation of one client, where `taken` is that of several."""
    at_once: int = 1
    """How many clients that hold the unit may take part in one round."""
    fallback: View | None = None
    """A row that holds as well; the smaller ε of the two is printed."""
    others: tuple[View, ...] = ()
    """The same row for clients that hold other numbers of records; the largest ε of all is printed."""

    def before(self, multipliers: Iterable[float]) -> Release:
        """All that rounds with these noise multipliers will show, before it is known who takes part."""
        return _over_rounds(self.a_priori, Counter(multipliers))

    def worst(self, multipliers: Iterable[float]) -> Release:
        """The same if the unit takes part in every round."""
        return _over_rounds(self.taken, Counter(multipliers))

    def used(self, multipliers: Iterable[float], participations: int) -> Release:
        """What so many participations have shown: those with the least noise, as it is not said which they were."""
        if self.hidden:
            return self.before(multipliers)
        counted, left = Counter[float](), participations
        for sigma, rounds in sorted(Counter(multipliers).items()):
            counted[sigma] = min(left, rounds * self.at_once)
            left -= counted[sigma]
        return _over_rounds(self.participation or self.taken, counted)


def noise_multipliers(plan: Plan, rounds: int | Iterable[int] | None = None) -> list[float]:
    """σ_t, noise over the clip bound, of each released round.

    `rounds` lists the released rounds, and a round that was released twice stands there twice. A number stands for the
    first so many rounds; the default is all rounds of the plan. A round beyond the plan counts as the costliest.
    """
    rounds = plan.rounds if rounds is None else rounds
    released = range(rounds) if isinstance(rounds, int) else list(rounds)
    if plan.noise_follows_clip:
        return [plan.noise_multiplier] * len(released)
    of_round = [plan.noise_scale_at(t) / plan.clip_at(t) for t in range(plan.rounds)]
    return [of_round[t] if t < plan.rounds else min(of_round) for t in released]


def _over_rounds(release: Callable[[float], Release], counted: Counter[float]) -> Release:
    """The releases of all rounds, one after the other; `counted` holds how many rounds have each noise multiplier."""
    counted = +counted  # without the multipliers of no round
    if not counted:
        return sequence([])
    gaussian = isinstance(release(next(iter(counted))), Gaussian)
    few = _rounded_down(counted, _DISTINCT_GAUSSIANS if gaussian else _DISTINCT)
    return sequence([repeated(release(sigma), times) for sigma, times in few.items()])


def _rounded_down(counted: Counter[float], most: int) -> Counter[float]:
    """The same counts with at most `most` distinct multipliers: each is rounded down to a step of a geometric ladder."""
    if len(counted) <= most:
        return counted
    values = np.array(list(counted))
    least, largest = values.min(), values.max()
    step = np.log(largest / least) / most
    rungs = np.minimum(np.floor(np.log(values / least) / step), most - 1)
    rounded = np.minimum(least * np.exp(rungs * step), values)
    few = Counter[float]()
    for value, times in zip(rounded.tolist(), counted.values(), strict=True):
        few[value] += times
    return few
