"""Releases as value objects, and the releases that one participation of a client consists of.

Each release fully describes what an adversary sees, independently of the data. `z` is always the standard deviation of the
noise on a released sum divided by that sum's L2 sensitivity. The objects do not say how ε is computed: `pld` (privacy loss
distributions) and `rdp` do that, and refuse releases that they do not support. `Mechanism` is the noise on a client's
releases in a participation; `Records` says how often a record is used in it, and how secretly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.mechanism.clipping import sensitivity


@dataclass(frozen=True)
class Nothing:
    """No release."""


@dataclass(frozen=True)
class Unprotected:
    """A release without a finite guarantee, and the reason."""

    reason: str


@dataclass(frozen=True)
class Gaussian:
    """A sum with Gaussian noise that certainly includes the unit."""

    z: float


@dataclass(frozen=True)
class PoissonGaussian:
    """A sum with Gaussian noise that secretly includes the unit with probability `rate`."""

    rate: float
    z: float


@dataclass(frozen=True)
class SlottedPoisson:
    """Poisson sampling of `records` at `rate` into at most `slots` (the excess dropped at random), then Gaussian noise."""

    records: int
    rate: float
    slots: int
    z: float


@dataclass(frozen=True)
class OverfullPoisson:
    """A bound on every `SlottedPoisson` of at most this `rate` whose slots overflow with at most the probability `overflow`.

    One such bound covers many clients that hold different numbers of records. In an overflow the record may take another
    record's place. Either this stays secret and moves the sum by two sensitivities, or (`told`) the adversary is assumed to
    know whether the record is included, which then moves the sum by one: a zeroed record keeps its place.
    """

    rate: float
    overflow: float
    z: float
    told: bool = False


@dataclass(frozen=True)
class WithoutReplacement:
    """A fixed-size sample that secretly includes the unit with probability `rate`.

    Replacing the unit by another moves the sum by two sensitivities; `half_z` is the noise divided by that distance.
    """

    rate: float
    half_z: float


@dataclass(frozen=True)
class Lottery:
    """`inner` with probability `rate`, otherwise nothing; the adversary may know which."""

    inner: Release
    rate: float


@dataclass(frozen=True)
class Draws:
    """`inner` x times with probability `probabilities[x]`; the adversary may know x."""

    inner: Release
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Repeated:
    """`inner` repeated `times` times with fresh randomness; each release may depend on the ones before it."""

    inner: Release
    times: int


@dataclass(frozen=True)
class Sequence:
    """Several releases in sequence."""

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
    """`inner`, `times` times, in its simplest form."""
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
    """The releases in sequence, in their simplest form; one release without a guarantee leaves the whole without one.

    Composition does not depend on the order, so equal releases are grouped and all Gaussian releases become one.
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
    """The noise of a plan against a unit: `weight` is the noise in units of σC, divided by the unit's number of examples.

    A layer's sum carries that noise and moves by C for each of the unit's examples; M layers together move by √M times that.
    If the clip bound follows a quantile, the first step of a round also releases an indicator in [−½, ½] for every example,
    under separate noise.
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
        """A round of `steps` steps, the first of which may release more."""
        return lambda sigma: sequence([step(self.first_z(sigma)), repeated(step(self.z(sigma)), steps - 1)])


@dataclass(frozen=True)
class Records:
    """How often, and how secretly, a record is used in one participation of its client, which holds `held` records."""

    plan: Plan
    held: int
    overflow: float | None = None
    """If not None, this covers all clients with at least `held` records; it bounds the probability that slots overflow."""
    told: bool = False
    """Whether the adversary is assumed to know which records are included when slots overflow (`OverfullPoisson`)."""
    covered: int | None = None
    """If not None, this covers all clients with `held` to so many records."""

    @property
    def most(self) -> int | None:
        """The most records at a client that this covers; None: there is no limit."""
        return None if self.overflow is not None else self.covered or self.held

    @property
    def rate(self) -> float:
        """q_l: the share of a client's records in a step."""
        return min(1.0, self.plan.batch_size / self.held)

    @property
    def steps(self) -> int:
        """The number of steps of a round in which a record may be used."""
        if self.plan.record_sampling != "partition":
            return self.plan.local_steps
        return min(self.plan.local_steps, -(-self.plan.local_steps * self.plan.batch_size // self.held))

    @property
    def assumption(self) -> str:
        """The assumption behind the server's row."""
        if self.plan.record_sampling == "partition":
            times = "at most one step" if self.steps == 1 else f"at most {self.steps} steps"
            return f"the adversary knows which steps use a record ({times} per round), so ε gets no reduction from sampling"
        if self.rate == 1:
            return "every record is used in every step, so ε gets no reduction from sampling"
        how = "independently of each other" if self.plan.record_sampling == "poisson" else "without replacement"
        return (
            f"nobody sees which records a step draws ({how}, at rate {self.rate:.4g}); the adversary may know who takes part"
        )

    def hidden(self, z: float) -> Release:
        """A step's sum, for an adversary who does not see which records were drawn."""
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
        """A noised gradient, for an adversary who sees whether the record was drawn."""
        if self.plan.record_sampling == "partition" or self.rate == 1:
            return Gaussian(z)
        return Lottery(Gaussian(z), self.rate)


_EXACT_SIZES = 5


def sizes_that_count(plan: Plan, population: Population) -> list[Records]:
    """The client sizes that may have the largest ε, the smallest first.

    A record of a smaller client is used more often, so the smallest client is the worst case, with two exceptions:

    - Slots of a Poisson step overflow only if a client holds more than S records. The list therefore includes some of the
      smallest sizes above S, and one bound for all others above S, whose rate is that of the smallest among them.
    - In a fixed-size sample, another record can take a record's place only if a client holds more than B records. The list
      therefore includes the smallest size above B.

    With `noise_slots = held` the noise on an example falls with the size, up to S, so all sizes up to S are listed as well.
    """
    if plan.noise_slots == "held":
        return [*_by_slots(plan, population), *_larger(plan, population)]
    return [Records(plan, population.records), *_larger(plan, population)]


_BUCKETS = 24  # of client sizes, where the noise on an example depends on the size


def _by_slots(plan: Plan, population: Population) -> list[Records]:
    """All client sizes up to S and the smallest above, in ascending order.

    Many sizes share a few bounds: each has the rate of its smallest client and the noise of its largest.
    """
    if population.sizes is None:
        return [Records(plan, population.records, covered=max(population.records, plan.slots))]
    sizes = population.sizes or (population.records,)
    sizes = sizes[: 1 + sum(size <= plan.slots for size in sizes)]
    parts = np.array_split(np.array(sizes), min(len(sizes), _BUCKETS))
    return [Records(plan, int(part[0]), covered=int(part[-1])) for part in parts]


def _larger(plan: Plan, population: Population) -> list[Records]:
    """The sizes above the smallest that may have a larger ε."""
    slots = plan.slots
    if plan.record_sampling == "partition":
        return []
    if plan.record_sampling == "fixed":
        sizes = (population.records, plan.batch_size + 1) if population.sizes is None else population.sizes
        return [Records(plan, size) for size in sizes if size > max(plan.batch_size, population.records)][:1]
    if population.sizes is None:  # unknown sizes: all above, with the overflow probability in the limit of large clients
        from scipy.stats import poisson

        overflow = float(poisson.sf(slots - 1, plan.batch_size)) if slots > plan.batch_size else 1.0
        return [Records(plan, max(population.records, slots) + 1, overflow, told=True)]
    above = [size for size in population.sizes if size > max(slots, population.records)]
    exact = [Records(plan, size) for size in above[:_EXACT_SIZES]]
    return [*exact, *_all_of(plan, above[_EXACT_SIZES:])]


def of_any_size(plan: Plan, population: Population) -> Records:
    """One bound for all clients, because copies of one person's record may be stored at clients of different sizes.

    If the smallest client uses all its records in every step, this is a Gaussian. It also bounds the larger clients: a
    zeroed record keeps its place in the sample, so it moves the sum by one sensitivity, even for an adversary who knows the
    sample.
    """
    larger = _larger(plan, population)
    if not larger or plan.record_sampling != "poisson":
        return Records(plan, population.records)
    held = population.sizes or (population.records,)
    known = _all_of(plan, [size for size in held if size > plan.slots])
    overflow = max(each.overflow for each in (*larger, *known) if each.overflow is not None)
    return Records(plan, population.records, overflow)


def _all_of(plan: Plan, sizes: list[int]) -> list[Records]:
    """One bound for clients with these numbers of records, all above S."""
    if not sizes:
        return []
    from scipy.stats import binom

    held = np.array(sizes)
    overflow = binom.sf(plan.slots - 1, held - 1, np.minimum(1.0, plan.batch_size / held))
    return [Records(plan, sizes[0], float(overflow.max()))]
