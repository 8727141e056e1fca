"""What each method shows to each adversary: a table with a line for each method, noise placement, adversary and unit.

Each line is a claim that can be checked on its own (docs/guarantees.md has the proofs). It says how far the unit can move
the release (`sensitivity`, in units of C·√M), how much noise the release carries (`noise`, standard deviation in units of
σC), what the adversary does not know (`sampling`), where the line applies (`where`), and the lemma that turns these into a
release.

z, the noise over the sensitivity, is σ · noise / (sensitivity · √M). S: noise slots of a local step; S_i: those that carry a
client's noise; K_t: clients in a round, t of whom may collude; R: clients that hold a copy of a record and may take part in
one round; n: the noise on the sum of a local step under the plan's convention (√S for `example`, 1 for `batch`, 1/K_t for
`cohort`, 1/√(K_t − t) for `sum`); u: the noise on an update of Fed-SDP (1, and 1/√(K_t − t) for `sum`).

Under secure aggregation the server reads a round's sum, which carries the noise of K_t − t clients that the server does not
know. Who must not know what: nobody but a client itself may know its noise, and nobody may read a single update. A client
that reads the model knows its own noise, so against `model` at most K_t − max(t, 1) clients' noise counts. A round of one
client has only that client's noise, which no other client knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from fedcdp.accounting.adversaries import Adversary, Relation, Unit, View
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
            "secure_aggregation: with Poisson client sampling the energy of the noise reveals the size of the cohort, so "
            "nothing can be credited; use client_sampling fixed"
        )
    if plan.method in _UNPROTECTED or plan.noise_multiplier == 0:
        reason = _UNPROTECTED.get(plan.method, "the noise multiplier is 0, and clipping alone protects nothing")
        rows = [_unprotected(adversary, "record", reason) for adversary in get_args(Adversary)]
        if plan.scaling_noise is None:
            return rows
        # What was released before the first round counts for a client that has taken part in none.
        return [Setting(plan, population, Records(plan, population.records)).with_scaling(row) for row in rows]
    if plan.method == "fed-sdp":
        return Setting(plan, population, Records(plan, population.records)).views()
    smallest, *larger = (Setting(plan, population, size).views() for size in sizes_that_count(plan, population))
    return [replace(row, others=tuple(same)) for row, *same in zip(smallest, *larger, strict=True)]


def view_of_client(plan: Plan, population: Population, held: int) -> View:
    """The server's row for a record of a client that holds so many; credit is that of the whole population."""
    if plan.noise_multiplier == 0:
        return views(plan, population)[0]
    return Setting(plan, population, Records(plan, held)).server_row("record")


_UNPROTECTED: dict[str, str] = {
    "nonprivate": "nothing is noised",
    "dssgd": "the largest entries are shared as they are",
}


@dataclass(frozen=True)
class Setting:
    """A plan, its population, and the client size for which the lines are stated."""

    plan: Plan
    population: Population
    records: Records

    @property
    def rate(self) -> float:
        """q_c: the share of clients in a round."""
        return self.plan.per_round / self.population.clients

    @property
    def copies(self) -> int:
        """R: how many clients with a copy of a record may take part in one round."""
        copies = self.population.copies
        return copies if self.plan.client_sampling == "poisson" else min(copies, self.plan.per_round)

    def noise_of_a_slot(self, held: int | None) -> float:
        """The noise on one example at a client with `held` records under `example` noise, in units of σC.

        Under `noise_slots = held`, it is √(S/N_i) at a client with N_i < S records. A client of unknown size has 1.
        """
        slots = self.plan.slots
        return 1.0 if self.plan.noise_slots == "all" or held is None else math.sqrt(slots / min(slots, held))

    def lines(self) -> list[Line]:
        """The lines of the table that apply to this setting."""
        method = "fed-cdp" if self.plan.per_example else "fed-sdp"
        placement = self.plan.noise if self.plan.per_example else self.plan.noise_at
        return [
            line for line in TABLE if line.method == method and line.placement in ("any", placement) and line.where(self)
        ]

    def views(self) -> list[View]:
        """The rows from these lines."""
        return [self.view(line) for line in self.lines()]

    def view(self, line: Line) -> View:
        """The row of a line."""
        weight = line.noise.of(self) / line.sensitivity.of(self)
        view = line.sampling(self, line, Mechanism(self.plan, self.population.layers, weight))
        return view if self.plan.scaling_noise is None else self.with_scaling(view)

    def with_scaling(self, view: View) -> View:
        """The row with the release of noised means and variances, in which every client takes part.

        The noise of a client's sums is `scaling_noise` times what one record moves them by. Each record carries its share of
        it, √N_i times less. All N_i records of a client move the sums by N_i records' worth, and a person's copies are in
        the sums of as many clients.
        """
        z, largest = self.plan.scaling_noise, self.population.largest
        assert z is not None
        if view.unit == "client" or view.adversary == "example":
            if largest is None:
                return replace(view, scaling=Unprotected("the most records that a client holds are unknown"))
            z /= largest if view.unit == "client" else math.sqrt(largest)
        z /= 2 if view.relation == "replace-one" else 1
        copies = self.population.copies if view.unit == "unique" else 1
        fallback = None if view.fallback is None else self.with_scaling(view.fallback)
        return replace(view, scaling=repeated(Gaussian(z), copies), fallback=fallback)

    def server_row(self, unit: Unit) -> View:
        """The server's row for a unit, which always holds for an adversary who sees only the model."""
        return next(self.view(line) for line in self.lines() if (line.adversary, line.unit) == ("server", unit))

    @property
    def unknown_to_a_client(self) -> int:
        """The clients of a round whose noise is unknown to one of them and to the colluders."""
        return max(1, self.plan.per_round - max(self.plan.colluders, 1))

    @property
    def noise_of_an_update(self) -> float:
        """The noise that a client adds to its update under Fed-SDP, in units of σC."""
        return 1 / math.sqrt(self.plan.honest) if self.plan.sums else 1.0

    def why_alone(self) -> str | None:
        """Why other clients' noise cannot be credited against an adversary who sees only a round's sum; None if it can.

        With noise on the sum, clients send undivided sums with equal noise, whatever they hold: the plan refuses the rest.
        """
        plan = self.plan
        if plan.sums:
            return None
        if plan.per_example and plan.local_steps > 1:
            return "over several local steps a client can repeat what it saw, so other clients' noise is not credited"
        if not plan.secure_aggregation:
            return "without secure aggregation other clients' noise is not credited"
        if plan.compression:
            return "each client prunes its own noise before the sum, so other clients' noise is not credited"
        if plan.per_example and plan.weighting == "records":
            largest = self.population.largest
            if largest is None or largest > plan.batch_size:
                return (
                    "a client with more than B records weighs more, noise included, so other clients' noise is not credited"
                )
        elif plan.per_example and self.population.records < plan.batch_size:
            return (
                "a client with fewer than B records divides by their number, so the energy of the sum's noise shows whether "
                "it took part, and other clients' noise is not credited"
            )
        return None


class Amount(NamedTuple):
    """A sensitivity in units of C·√M, or the standard deviation of noise in units of σC."""

    symbol: str
    of: Callable[[Setting], float]


_ONE = Amount("1", lambda _: 1.0)
_TWO = Amount("2", lambda _: 2.0)
_SLOT = Amount("√(S/S_i)", lambda on: on.noise_of_a_slot(on.records.most))
_SLOT_OF_ANY = Amount("√(S/max S_i)", lambda on: on.noise_of_a_slot(on.population.largest))
_SLOTS = Amount("S", lambda on: float(on.plan.slots))
_TWICE_SLOTS = Amount("2·S", lambda on: float(2 * on.plan.slots))
_COPIES = Amount("R", lambda on: float(on.copies))
_TWICE_COPIES = Amount("2·R", lambda on: float(2 * on.copies))
_STEP = Amount("n", lambda on: on.plan.noise_on_sum)
_HONEST_STEPS = Amount("n·√(K_t − t)", lambda on: on.plan.noise_on_sum * math.sqrt(on.plan.honest))
_OTHERS_STEPS = Amount("n·√(K_t − max(t, 1))", lambda on: on.plan.noise_on_sum * math.sqrt(on.unknown_to_a_client))
_UPDATE = Amount("u", lambda on: on.noise_of_an_update)
_HONEST_UPDATES = Amount("u·√(K_t − t)", lambda on: on.noise_of_an_update * math.sqrt(on.plan.honest))
_OTHERS_UPDATES = Amount("u·√(K_t − max(t, 1))", lambda on: on.noise_of_an_update * math.sqrt(on.unknown_to_a_client))

Method = Literal["fed-cdp", "fed-sdp"]
Placement = Literal["any", "example", "batch", "cohort", "sum", "server", "client"]
Sampling = Callable[[Setting, "Line", Mechanism], View]
Where = Callable[[Setting], bool]


@dataclass(frozen=True)
class Line:
    """One line of the table; see the module docstring."""

    method: Method
    placement: Placement
    """Where the noise is added: the convention of Fed-CDP, or the server or the client under Fed-SDP."""
    adversary: Adversary
    unit: Unit
    relation: Relation
    sensitivity: Amount
    noise: Amount
    sampling: Sampling
    where: Where
    lemma: str


# Where a line applies ------------------------------------------------------------------------------------------------


def always(_: Setting) -> bool:
    """Under every plan of the method and placement."""
    return True


def copied(on: Setting) -> bool:
    """A record may be stored at several clients."""
    return on.population.copies > 1


def alone(on: Setting) -> bool:
    """Other clients' noise does not count."""
    return on.why_alone() is not None


def copied_alone(on: Setting) -> bool:
    """A record may be stored at several clients, and other clients' noise does not count."""
    return copied(on) and alone(on)


def together(on: Setting) -> bool:
    """Other clients' noise counts."""
    return not alone(on)


def copied_together(on: Setting) -> bool:
    """A record may be stored at several clients, and other clients' noise counts."""
    return copied(on) and together(on)


def all_together(on: Setting) -> bool:
    """Other clients' noise counts, and every client takes part in every round."""
    return on.why_alone() is None and on.rate == 1


def some_together(on: Setting) -> bool:
    """Other clients' noise counts, and only some of the clients take part in a round."""
    return on.why_alone() is None and on.rate < 1


# What the adversary does not know: how a line becomes a row ------------------------------------------------------------


def records_hidden(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: which records a step draws. Who takes part may be known."""
    return _public_choice(on, line, on.records.assumption, mechanism.participation(on.records.hidden, on.records.steps))


def records_and_updates_hidden(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: which records a step draws, and single updates. Who takes part may be known."""
    assumption = f"{_sum_alone(on, line)}; {on.records.assumption}"
    return _public_choice(on, line, assumption, mechanism.participation(on.records.hidden, on.records.steps))


def copies_hidden(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """The same, for copies stored at clients of any size."""
    hidden = of_any_size(on.plan, on.population).hidden
    return _public_choice(on, line, on.records.assumption, mechanism.participation(hidden, on.records.steps))


def nothing_in_a_step(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: nothing. Each noised gradient is seen, and whose it is. Whether a record is drawn is a public lottery."""
    return _public_choice(on, line, _ONE_BY_ONE, mechanism.participation(on.records.seen, on.records.steps))


def nothing_of_a_client(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: nothing. All of a client's records are in every slot of every step."""
    return _public_choice(on, line, _WHOLE_CLIENT, mechanism.participation(Gaussian, on.plan.local_steps))


def updates_of_a_client_hidden(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: single updates. All of a client's records are in every slot of every step."""
    assumption = f"{_sum_alone(on, line)}; {_WHOLE_CLIENT}"
    return _public_choice(on, line, assumption, mechanism.participation(Gaussian, on.plan.local_steps))


def nothing_of_an_update(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: nothing. The update is seen, and whose it is."""
    whole = f"{_turned(line)}each client clips and noises its whole update before it sends it"
    return _public_choice(on, line, whole, lambda sigma: Gaussian(mechanism.first_z(sigma)))


def updates_hidden(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: single updates, each clipped and noised as a whole. Who takes part may be known."""
    whole = f"{_turned(line)}{_sum_alone(on, line)}"
    return _public_choice(on, line, whole, lambda sigma: Gaussian(mechanism.first_z(sigma)))


def as_the_server(on: Setting, line: Line, _: Mechanism) -> View:
    """Unknown: only what the server does not know either."""
    assumption = f"same ε as against the server: {on.why_alone()}"
    return replace(on.server_row(line.unit), adversary=line.adversary, assumption=assumption)


def cohort_and_updates_hidden(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: single updates, and who took part. Another client may take the unit's place.

    Colluders, and a client that reads the model, know whether they took part themselves, which tells a little about the
    others: of K − max(t, 1) other clients at most K_t took part. The fallback is the row of a reader who knows the cohort.
    """
    plan = on.plan
    chosen = min(1.0, plan.per_round / max(1, on.population.clients - max(plan.colluders, 1)))
    if plan.per_example and line.unit == "record" and plan.record_sampling != "partition":
        chosen *= on.records.rate  # a batch in a fixed order is used in every participation
    known = on.view(next(each for each in _KNOWN_COHORT if (each.method, each.unit) == (line.method, line.unit)))
    return replace(
        known,
        assumption=f"{_sum_alone(on, line)}, nor who took part",
        a_priori=lambda sigma: WithoutReplacement(chosen, mechanism.first_z(sigma)),
        hidden=True,
        fallback=known,
    )


def cohort_hidden(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: who took part. The server is trusted with that and with raw updates."""

    def update(sigma: float) -> Gaussian:
        return Gaussian(mechanism.first_z(sigma))

    def amplified(sigma: float) -> Release:
        z = mechanism.first_z(sigma)
        if on.rate == 1:
            return Gaussian(z)
        if line.unit == "record":  # zeroing it replaces its client's update, in both samplings; z is over that distance
            return WithoutReplacement(on.rate, z)
        return PoissonGaussian(on.rate, z) if on.plan.client_sampling == "poisson" else WithoutReplacement(on.rate, z / 2)

    trusted = (
        f"{_turned(line)}the server is trusted with raw updates and adds the noise; only the server knows who took part"
    )
    return View(line.adversary, line.unit, line.relation, trusted, amplified, update, hidden=True)


def copies_together(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: nothing that is credited. All clients with a copy may take part together and move one sum."""

    def moved(sigma: float) -> Release:
        return Gaussian(mechanism.first_z(sigma))

    stored = (
        f"covers a person whose record is stored at {on.population.copies} clients, which may all take part in one round"
    )
    return View(line.adversary, line.unit, line.relation, f"{_turned(line)}{stored}", moved, moved, hidden=True)


def copies_in_the_sum(on: Setting, line: Line, mechanism: Mechanism) -> View:
    """Unknown: single updates. The copies move one sum together. The fallback is the row of a reader of single updates."""
    row = copies_together(on, line, mechanism)
    single = next(each for each in _SINGLE_COPIES if each.method == line.method)
    return replace(row, assumption=f"{_sum_alone(on, line)}; {row.assumption}", fallback=on.view(single))


def raw(on: Setting, line: Line, _: Mechanism) -> View:
    """Unknown: nothing. What is seen carries no noise, so no ε holds."""
    return _unprotected(line.adversary, line.unit, line.lemma.format(noise=on.plan.noise))


def _public_choice(on: Setting, line: Line, assumption: str, taken: Callable[[float], Release]) -> View:
    """A row whose adversary may know who took part: a participation with probability q_c, otherwise nothing."""
    if line.unit != "unique":
        return View(
            line.adversary, line.unit, line.relation, assumption, lambda sigma: _lottery(taken(sigma), on.rate), taken
        )
    population, chosen = on.population, on.plan.per_round
    poisson = on.plan.client_sampling == "poisson"
    from scipy.stats import binom, hypergeom

    law = binom(population.copies, on.rate) if poisson else hypergeom(population.clients, population.copies, chosen)
    probabilities = tuple(float(law.pmf(times)) for times in range(on.copies + 1))
    return View(
        line.adversary,
        line.unit,
        line.relation,
        f"covers a person whose record is stored at {population.copies} clients; {assumption}",
        lambda sigma: Draws(taken(sigma), probabilities),
        lambda sigma: repeated(taken(sigma), on.copies),
        participation=taken,
        at_once=on.copies,
    )


def _lottery(inner: Release, rate: float) -> Release:
    return inner if rate == 1 else Lottery(inner, rate)


def _unprotected(adversary: Adversary, unit: Unit, reason: str) -> View:
    def nothing_holds(_: float) -> Release:
        return Unprotected(reason)

    return View(adversary, unit, "zero-out", reason, nothing_holds, nothing_holds)


def _turned(line: Line) -> str:
    return _TURNED if line.method == "fed-sdp" and line.unit in ("record", "unique") else ""


def _sum_alone(on: Setting, line: Line) -> str:
    """What secure aggregation promises, with the number of clients that may collude."""
    most = on.plan.colluders
    some = f"at most {most} of all clients collude" if most > 1 else "at most one client colludes" if most else ""
    if line.adversary == "model":
        rest = f"{some}, itself included" if some else "no other client colludes"
        return f"secure aggregation holds; the adversary may be a client of the round, which knows its own noise; {rest}"
    return f"secure aggregation holds: the server reads only the sum of a round, and {some or 'no client colludes'} with it"


_TURNED = "changing one record may reverse its client's whole update, so twice the clip bound is assumed; "
_WHOLE_CLIENT = "covers all records of a client at once, in every slot of every step"
_ONE_BY_ONE = (
    "the adversary sees each noised gradient and knows whose it is; holds only where gradients are noised before the sum: "
    "in a tapped simulation, or on a deployed client whose policy names `example`"
)

# The lemmas (docs/guarantees.md) ---------------------------------------------------------------------------------------

_SUBSAMPLED = "subsampled Gaussian, composed over the steps; a public lottery over clients"
_COPIED = "as for one record, composed over the copies in a round, whose number is public"
_SEEN = "Gaussian in a public lottery over records, composed over the steps; a public lottery over clients"
_GAUSSIAN_STEPS = "Gaussian, composed over the steps; a public lottery over clients"
_GAUSSIAN_UPDATE = "Gaussian; a public lottery over clients"
_SERVER = "post-processing of what the server sees"
_SUM = "Gaussian on the cohort's sum, whose noise adds up in variance; a public lottery over clients"
_SUBSAMPLED_SUM = "subsampled Gaussian on the cohort's sum, whose noise adds up in variance; a public lottery over clients"
_SUM_OF_SOME = "sampling without replacement on the cohort's sum, whose noise adds up in variance"
_HIDDEN = "subsampled Gaussian on the server's sum: Poisson, or without replacement"
_GROUP = "Gaussian at the distance of all copies together"
_ONLY_CLIPPED = "{noise} noise goes onto the batch's sum; single gradients are only clipped"
_ONLY_IN_THE_SUM = "the noise is on the sum of all clients; single gradients are only clipped"
_READ_RAW = "the server adds the noise after it has read the raw updates"
_LOCAL_RAW = "local training is not private: every gradient in it is raw"

# fmt: off
TABLE: tuple[Line, ...] = (
    # method, placement, adversary, unit, relation, sensitivity, noise, what the adversary does not know, where, lemma
    Line("fed-cdp", "any", "server", "record", "zero-out", _ONE, _STEP, records_hidden, alone, _SUBSAMPLED),
    Line("fed-cdp", "any", "server", "record", "zero-out", _ONE, _HONEST_STEPS, records_and_updates_hidden, together,
         _SUBSAMPLED_SUM),
    Line("fed-cdp", "any", "update", "record", "zero-out", _ONE, _STEP, records_hidden, always, _SUBSAMPLED),
    Line("fed-cdp", "any", "server", "unique", "zero-out", _ONE, _STEP, copies_hidden, copied_alone, _COPIED),
    Line("fed-cdp", "any", "server", "unique", "zero-out", _COPIES, _HONEST_STEPS, copies_in_the_sum, copied_together,
         _GROUP),
    Line("fed-cdp", "any", "model", "record", "zero-out", _ONE, _STEP, as_the_server, alone, _SERVER),
    Line("fed-cdp", "any", "model", "record", "zero-out", _ONE, _OTHERS_STEPS, records_and_updates_hidden, all_together,
         _SUBSAMPLED_SUM),
    Line("fed-cdp", "any", "model", "record", "zero-out", _TWICE_SLOTS, _OTHERS_STEPS, cohort_and_updates_hidden,
         some_together, _SUM_OF_SOME),
    Line("fed-cdp", "example", "example", "record", "zero-out", _ONE, _SLOT, nothing_in_a_step, always, _SEEN),
    Line("fed-cdp", "example", "example", "record", "replace-one", _TWO, _SLOT, nothing_in_a_step, always, _SEEN),
    Line("fed-cdp", "example", "example", "unique", "zero-out", _ONE, _SLOT_OF_ANY, nothing_in_a_step, copied, _COPIED),
    Line("fed-cdp", "batch", "example", "record", "zero-out", _ONE, _ONE, raw, always, _ONLY_CLIPPED),
    Line("fed-cdp", "cohort", "example", "record", "zero-out", _ONE, _ONE, raw, always, _ONLY_CLIPPED),
    Line("fed-cdp", "sum", "example", "record", "zero-out", _ONE, _ONE, raw, always, _ONLY_IN_THE_SUM),
    Line("fed-cdp", "any", "server", "client", "zero-out", _SLOTS, _STEP, nothing_of_a_client, alone, _GAUSSIAN_STEPS),
    Line("fed-cdp", "any", "server", "client", "zero-out", _SLOTS, _HONEST_STEPS, updates_of_a_client_hidden, together,
         _SUM),
    Line("fed-cdp", "any", "model", "client", "zero-out", _SLOTS, _STEP, as_the_server, alone, _SERVER),
    Line("fed-cdp", "any", "model", "client", "zero-out", _SLOTS, _OTHERS_STEPS, updates_of_a_client_hidden, all_together,
         _SUM),
    Line("fed-cdp", "any", "model", "client", "zero-out", _TWICE_SLOTS, _OTHERS_STEPS, cohort_and_updates_hidden,
         some_together, _SUM_OF_SOME),

    Line("fed-sdp", "client", "server", "client", "zero-out", _ONE, _UPDATE, nothing_of_an_update, alone, _GAUSSIAN_UPDATE),
    Line("fed-sdp", "client", "server", "client", "zero-out", _ONE, _HONEST_UPDATES, updates_hidden, together, _SUM),
    Line("fed-sdp", "client", "update", "client", "zero-out", _ONE, _UPDATE, nothing_of_an_update, always, _GAUSSIAN_UPDATE),
    Line("fed-sdp", "client", "model", "client", "zero-out", _ONE, _UPDATE, as_the_server, alone, _SERVER),
    Line("fed-sdp", "client", "model", "client", "zero-out", _ONE, _OTHERS_UPDATES, updates_hidden, all_together, _SUM),
    Line("fed-sdp", "client", "model", "client", "zero-out", _TWO, _OTHERS_UPDATES, cohort_and_updates_hidden,
         some_together, _SUM_OF_SOME),
    Line("fed-sdp", "client", "server", "record", "zero-out", _TWO, _UPDATE, nothing_of_an_update, alone, _GAUSSIAN_UPDATE),
    Line("fed-sdp", "client", "server", "record", "zero-out", _TWO, _HONEST_UPDATES, updates_hidden, together, _SUM),
    Line("fed-sdp", "client", "update", "record", "zero-out", _TWO, _UPDATE, nothing_of_an_update, always, _GAUSSIAN_UPDATE),
    Line("fed-sdp", "client", "model", "record", "zero-out", _TWO, _UPDATE, as_the_server, alone, _SERVER),
    Line("fed-sdp", "client", "model", "record", "zero-out", _TWO, _OTHERS_UPDATES, updates_hidden, all_together, _SUM),
    Line("fed-sdp", "client", "model", "record", "zero-out", _TWO, _OTHERS_UPDATES, cohort_and_updates_hidden,
         some_together, _SUM_OF_SOME),
    Line("fed-sdp", "client", "server", "unique", "zero-out", _TWO, _UPDATE, nothing_of_an_update, copied_alone, _COPIED),
    Line("fed-sdp", "client", "server", "unique", "zero-out", _TWICE_COPIES, _HONEST_UPDATES, copies_in_the_sum,
         copied_together, _GROUP),

    Line("fed-sdp", "server", "server", "client", "zero-out", _ONE, _ONE, raw, always, _READ_RAW),
    Line("fed-sdp", "server", "update", "client", "zero-out", _ONE, _ONE, raw, always, _READ_RAW),
    Line("fed-sdp", "server", "model", "client", "zero-out", _ONE, _ONE, cohort_hidden, always, _HIDDEN),
    Line("fed-sdp", "server", "server", "record", "zero-out", _TWO, _ONE, raw, always, _READ_RAW),
    Line("fed-sdp", "server", "update", "record", "zero-out", _TWO, _ONE, raw, always, _READ_RAW),
    Line("fed-sdp", "server", "model", "record", "zero-out", _TWO, _ONE, cohort_hidden, always, _HIDDEN),
    Line("fed-sdp", "server", "model", "unique", "zero-out", _TWICE_COPIES, _ONE, copies_together, copied, _GROUP),
    Line("fed-sdp", "any", "example", "record", "zero-out", _ONE, _ONE, raw, always, _LOCAL_RAW),
)

# Rows on which others rest: of a reader of a round's sum who knows the cohort, and of a reader of single updates.
_KNOWN_COHORT = (
    Line("fed-cdp", "any", "model", "record", "zero-out", _ONE, _OTHERS_STEPS, records_and_updates_hidden, together,
         _SUBSAMPLED_SUM),
    Line("fed-cdp", "any", "model", "client", "zero-out", _SLOTS, _OTHERS_STEPS, updates_of_a_client_hidden, together, _SUM),
    Line("fed-sdp", "client", "model", "record", "zero-out", _TWO, _OTHERS_UPDATES, updates_hidden, together, _SUM),
    Line("fed-sdp", "client", "model", "client", "zero-out", _ONE, _OTHERS_UPDATES, updates_hidden, together, _SUM),
)
_SINGLE_COPIES = (
    Line("fed-cdp", "any", "server", "unique", "zero-out", _ONE, _STEP, copies_hidden, copied, _COPIED),
    Line("fed-sdp", "client", "server", "unique", "zero-out", _TWO, _UPDATE, nothing_of_an_update, copied, _COPIED),
)
# fmt: on
