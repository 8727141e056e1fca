"""What an adversary is shown, as value objects: each fully describes one kind of release, and nothing of the data.

`z` is always the standard deviation of the noise on a released sum over that sum's L2 sensitivity. The objects say nothing
of how ε is computed; `tight` (privacy loss distributions) and `renyi` do that, and refuse what they do not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


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
