"""Releases as value objects, and what one participation of a client consists of.

Each release fully describes what an adversary is shown, and nothing of the data. `z` is always the standard deviation of
the noise on a released sum over that sum's L2 sensitivity. The objects say nothing of how ε is computed: `pld` (privacy loss
distributions) and `rdp` do that, and refuse what they do not know. `Mechanism` is the noise on what a client releases in a
participation, `Records` how often and how secretly a record is used in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom, poisson

from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.mechanism.clipping import sensitivity


@dataclass(frozen=True)
class Nothing:
    """No release at all."""


@dataclass(frozen=True)
class Unprotected:
    """A release without a finite guarantee, and why."""

    reason: str


@dataclass(frozen=True)
class Gaussian:
    """A sum with Gaussian noise, in which the unit takes part for sure."""

    z: float


@dataclass(frozen=True)
class PoissonGaussian:
    """A sum with Gaussian noise, in which the unit takes part with probability `rate`, in secret."""

    rate: float
    z: float


@dataclass(frozen=True)
class SlottedPoisson:
    """Poisson sampling of `records` at `rate` into at most `slots`, those beyond dropped at random; then Gaussian noise."""

    records: int
    rate: float
    slots: int
    z: float


@dataclass(frozen=True)
class OverfullPoisson:
    """A bound on every `SlottedPoisson` of at most this `rate` whose slots overflow with at most this probability.

    One such bound covers many clients that hold different numbers of records. In an overflow the record may take another's
    place. Either that stays secret and moves the sum by two sensitivities, or (`told`) the reader is taken to know whether
    the record is in, which then moves the sum by one: a zeroed record keeps its place.
    """

    rate: float
    overflow: float
    z: float
    told: bool = False


@dataclass(frozen=True)
class WithoutReplacement:
    """A fixed-size sample that holds the unit with probability `rate`, in secret; replacing the unit by another moves the
    sum by two sensitivities. `half_z` is the noise over that distance."""

    rate: float
    half_z: float


@dataclass(frozen=True)
class Lottery:
    """`inner` with probability `rate`, otherwise nothing; which of the two may be known to the adversary."""

    inner: Release
    rate: float


@dataclass(frozen=True)
class Draws:
    """`inner` a random number of times: `probabilities[x]` is that of x times; the number may be known."""

    inner: Release
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Repeated:
    """`inner`, afresh, a number of times, each choice of what to show next depending on what was shown."""

    inner: Release
    times: int


@dataclass(frozen=True)
class Sequence:
    """Several releases, one after the other."""

    parts: tuple[Release, ...]


Release = (
    Nothing
    | Unprotected
    | Gaussian
    | PoissonGaussian
    | SlottedPoisson
    | OverfullPoisson
    | WithoutReplacement
    | Lottery
    | Draws
    | Repeated
    | Sequence
)


def repeated(inner: Release, times: int) -> Release:
    """`inner` so many times, in its simplest form."""
    if times == 0 or isinstance(inner, Nothing):
        return Nothing()
    if times == 1 or isinstance(inner, Unprotected):
        return inner
    match inner:
        case Gaussian(z):  # Gaussian releases add up exactly
            return Gaussian(z / math.sqrt(times))
        case Repeated(once, often):
            return Repeated(once, often * times)
        case Sequence(parts):
            return sequence([repeated(part, times) for part in parts])
    return Repeated(inner, times)


def sequence(parts: list[Release]) -> Release:
    """The releases one after the other, in their simplest form; one without a guarantee leaves the whole without.

    Composition does not depend on the order, so equal releases are gathered and all Gaussian ones become one.
    """
    precision, counted = 0.0, dict[Release, int]()
    for part in _flat(parts):
        inner, times = (part.inner, part.times) if isinstance(part, Repeated) else (part, 1)
        if isinstance(inner, Unprotected):
            return inner
        if isinstance(inner, Gaussian):
            precision += times / inner.z**2
        elif not isinstance(inner, Nothing):
            counted[inner] = counted.get(inner, 0) + times
    gathered = [repeated(inner, times) for inner, times in counted.items()]
    if precision:
        gathered.append(Gaussian(1 / math.sqrt(precision)))
    if not gathered:
        return Nothing()
    return gathered[0] if len(gathered) == 1 else Sequence(tuple(gathered))


def _flat(parts: Iterable[Release]) -> Iterator[Release]:
    for part in parts:
        if isinstance(part, Sequence):
            yield from _flat(part.parts)
        else:
            yield part


@dataclass(frozen=True)
class Mechanism:
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
        return sigma * self.weight / sensitivity(1.0, self.layers)

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
class Records:
    """How often, and how secretly, a record is used in one participation of its client, which holds `held` records."""

    plan: Plan
    held: int
    overflow: float | None = None
    """Not None: this stands for all clients with at least `held` records; their slots overflow with at most this chance."""
    told: bool = False
    """Whether the reader is taken to know who is in where slots overflow (`OverfullPoisson`)."""

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
            return OverfullPoisson(self.rate, self.overflow, z, self.told)
        if self.held <= plan.slots:
            return PoissonGaussian(self.rate, z)
        return SlottedPoisson(self.held, self.rate, plan.slots, z)

    def seen(self, z: float) -> Release:
        """A noised gradient, for a reader who sees whether the record was drawn."""
        if self.plan.record_sampling == "partition" or self.rate == 1:
            return Gaussian(z)
        return Lottery(Gaussian(z), self.rate)


_EXACT_SIZES = 5


def sizes_that_count(plan: Plan, population: Population) -> list[Records]:
    """The clients that may be worst off, the one with the fewest records first.

    A record of a smaller client is used more often, so the smallest client is the worst off, with two exceptions:

    - Slots of a Poisson step overflow only where a client holds more than S records. Hence some of the smallest above S, and
      one bound for all others above S, whose rate is that of the smallest among them.
    - In a sample of fixed size another record may stand in a record's place only where a client holds more than B records.
      Hence the smallest above B.
    """
    smallest, slots = Records(plan, population.records), plan.slots
    if plan.record_sampling == "partition":
        return [smallest]
    if plan.record_sampling == "fixed":
        sizes = (population.records, plan.batch_size + 1) if population.sizes is None else population.sizes
        return [smallest, *(Records(plan, size) for size in sizes if size > max(plan.batch_size, population.records))][:2]
    if population.sizes is None:  # sizes that are not known: all above, with the overflow of the limit of large clients
        overflow = float(poisson.sf(slots - 1, plan.batch_size)) if slots > plan.batch_size else 1.0
        return [smallest, Records(plan, max(population.records, slots) + 1, overflow, told=True)]
    above = [size for size in population.sizes if size > max(slots, population.records)]
    exact = [Records(plan, size) for size in above[:_EXACT_SIZES]]
    return [smallest, *exact, *_all_of(plan, above[_EXACT_SIZES:])]


def of_any_size(plan: Plan, population: Population) -> Records:
    """A bound for every client at once: the copies of one person may lie at clients of different size.

    Where the smallest client uses all its records in every step, this is a Gaussian. It bounds the larger clients, too: a
    zeroed record keeps its place in the sample, so it moves the sum by one sensitivity, whoever knows the sample.
    """
    smallest, *larger = sizes_that_count(plan, population)
    if not larger or plan.record_sampling != "poisson":
        return smallest
    held = population.sizes or (population.records,)
    known = _all_of(plan, [size for size in held if size > plan.slots])
    overflow = max(each.overflow for each in (*larger, *known) if each.overflow is not None)
    return Records(plan, population.records, overflow)


def _all_of(plan: Plan, sizes: list[int]) -> list[Records]:
    """One bound for clients that hold so many records each, all above S."""
    if not sizes:
        return []
    held = np.array(sizes)
    overflow = binom.sf(plan.slots - 1, held - 1, np.minimum(1.0, plan.batch_size / held))
    return [Records(plan, sizes[0], float(overflow.max()))]
