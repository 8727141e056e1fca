"""ε of a release by the characteristic function of its privacy loss, on a circle of losses.

Mixtures, powers and products of releases are those of their characteristic functions. So a whole plan, however nested, is
one formula a frequency, and one inverse Fourier transform gives the distribution of its loss:

    Shift, Sampled, …: Σ p·e^{iωℓ}     Times(r, k): φ^k     Several: Π φ     Chance: 1 − Σ p + Σ p·φ

A loss above the circle's end counts as infinite: it is left out of φ, and 1 − φ(0) is its probability. Chernoff's bound
chooses the circle, so that the sum of the finite losses wraps around with a probability far below δ. The probability of a
cell goes onto three neighbouring points, with the mean and the variance of the cell. The number of points doubles until ε
stays the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tests.support.independent.losses import (
    Base,
    Chance,
    Direction,
    Exchanged,
    Numbers,
    Release,
    Sampled,
    Several,
    Shift,
    Swapped,
    Times,
    gaussian_epsilon,
    table,
)

Spectrum = NDArray[np.complex128]

PRECISION = 1e-3
"""Two circles of n and 2n points must agree to this, relative, or to 1e-6; the error stays well below half a per cent."""
_NEGLIGIBLE = 1e-4  # share of δ that may wrap around, or be counted as infinite though it is not
_POINTS = (2**14, 2**21)
_GROUP = 24
_DOWN, _UP = -np.geomspace(1e-6, 4096.0, 32), np.geomspace(1e-7, 16384.0, 72)
_EXPONENTS = np.concatenate([_DOWN, _UP])


class UnresolvedError(ArithmeticError):
    """The circle cannot be made both wide and fine enough."""


@lru_cache(maxsize=4096)
def epsilon(release: Release, delta: float) -> float:
    """The smallest ε such that the release is (ε, δ)-differentially private, in both directions."""
    if isinstance(release, Shift):
        return gaussian_epsilon(release.mu, delta)
    removed = _epsilon(release, delta, "remove")
    return max(removed, _epsilon(release, delta, "add", removed)) if _one_sided(release) else removed


def _one_sided(release: Release) -> bool:
    match release:
        case Sampled(rate, _):
            return rate < 1
        case Chance(cases):
            return any(_one_sided(each) for _, each in cases)
        case Times(inner, _):
            return _one_sided(inner)
        case Several(parts):
            return any(_one_sided(each) for each in parts)
    return False


def _epsilon(release: Release, delta: float, direction: Direction, matters: float = 0.0) -> float:
    """ε in one direction; need not be exact far below what `matters`."""
    before, points = math.nan, _POINTS[0]
    low, high, certain = _window(release, delta, direction)
    while points <= _POINTS[1]:
        circle = Circle(points, (high - low) / points, low, high)
        found = circle.epsilon(_spectrum(release, circle, direction), delta)
        if not certain and found > high - 8 * (1 + 0.01 * high):  # infinite losses that are not, so far up: a wider circle
            low, high, certain = _window(release, delta, direction, 2 * high)
            before, points = math.nan, _POINTS[0]
            continue
        if abs(found - before) <= PRECISION * before + 1e-6 or max(found, before) < 0.5 * matters:
            return found
        before, points = found, 2 * points
    raise UnresolvedError(f"{str(release)[:200]} at δ = {delta}: {before} and {found}")


@dataclass(frozen=True)
class Circle:
    """So many points of losses, `step` apart, from `low` to `high`."""

    points: int
    step: float
    low: float
    high: float

    def spectrum(self, losses: Numbers, probabilities: Numbers) -> Spectrum:
        """The characteristic function of the losses below the end."""
        finite = losses < self.high
        place = np.maximum(losses[finite], self.low) / self.step
        nearest = np.rint(place)
        off, weight, index = place - nearest, probabilities[finite], nearest.astype(np.int64)
        density = np.zeros(self.points)
        for neighbour, share in ((-1, (off * off - off) / 2), (0, 1 - off * off), (1, (off * off + off) / 2)):
            density += np.bincount((index + neighbour) % self.points, weights=weight * share, minlength=self.points)
        return np.asarray(np.fft.rfft(density), dtype=np.complex128)

    def epsilon(self, spectrum: Spectrum, delta: float) -> float:
        """The ε at which E[(1 − e^(ε−L))₊] = δ."""
        first = math.ceil(self.low / self.step)
        density = np.roll(np.fft.irfft(spectrum, self.points), -first)
        losses = (first + np.arange(self.points)) * self.step
        infinite = 1 - float(spectrum[0].real)
        positive = losses > 0
        losses, density = losses[positive], density[positive]

        def spent(index: int) -> float:  # δ at ε = losses[index]
            return infinite + float(-np.expm1(losses[index] - losses[index:]) @ density[index:])

        if infinite + float(-np.expm1(-losses) @ density) <= delta:
            return 0.0
        if infinite >= delta:
            return math.inf
        low, high = -1, len(losses) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if spent(middle) > delta else (low, middle)
        above = infinite + float(density[high:].sum()) - delta
        scaled = float(np.exp(losses[high] - losses[high:]) @ density[high:])
        return max(0.0, float(losses[high]) + math.log(above / scaled)) if above > 0 < scaled else float(losses[high])


def _spectrum(release: Release, circle: Circle, direction: Direction) -> Spectrum:
    match release:
        case Chance(cases):
            rest = np.full(circle.points // 2 + 1, 1 - math.fsum(share for share, _ in cases), dtype=np.complex128)
            for share, each in cases:
                rest += share * _spectrum(each, circle, direction)
            return rest
        case Times(inner, count):
            return np.asarray(_spectrum(inner, circle, direction) ** count, dtype=np.complex128)
        case Several(parts):
            product = np.ones(circle.points // 2 + 1, dtype=np.complex128)
            for part in parts:
                product *= _spectrum(part, circle, direction)
            return product
        case Shift() | Sampled() | Swapped() | Exchanged():
            return _of_base(release, circle, direction)


@lru_cache(maxsize=64)
def _of_base(release: Base, circle: Circle, direction: Direction) -> Spectrum:
    return circle.spectrum(*table(release, direction))


# The circle -----------------------------------------------------------------------------------------------------------


def _window(release: Release, delta: float, direction: Direction, least: float = 0.0) -> tuple[float, float, bool]:
    """The losses that the circle must hold; and whether no more than a negligible probability lies above its end."""
    cap, negligible = max(least, 1e-6), math.log(_NEGLIGIBLE * delta)
    while True:
        moments = _log_moments(release, cap, direction)
        bounds = (moments - negligible) / np.abs(_EXPONENTS)
        below, above = float(bounds[_EXPONENTS < 0].min()), float(bounds[_EXPONENTS > 0].min())
        infinite = -math.expm1(_log_kept(release, cap, direction))
        fits = above <= cap and (infinite <= _NEGLIGIBLE * delta or least > 0 or infinite < delta / 2)
        if fits:
            high = max(above, least, 1e-6) if infinite <= _NEGLIGIBLE * delta else cap
            return -max(below, 0.02 * high), 1.02 * high, infinite <= _NEGLIGIBLE * delta
        cap *= 3
        if cap > 1e12:
            raise UnresolvedError(f"no circle holds {str(release)[:200]}")


def _log_kept(release: Release, cap: float, direction: Direction) -> float:
    """ln of the probability that no single loss lies above the cap."""
    match release:
        case Chance(cases):
            lost = math.fsum(-share * math.expm1(_log_kept(each, cap, direction)) for share, each in cases)
            return math.log1p(-min(lost, 1 - 1e-300)) if lost < 1 else -math.inf
        case Times(inner, count):
            return count * _log_kept(inner, cap, direction)
        case Several(parts):
            return math.fsum(_log_kept(each, cap, direction) for each in parts)
        case Shift() | Sampled() | Swapped() | Exchanged():
            losses, probabilities = table(release, direction)
            lost = float(probabilities[np.searchsorted(losses, cap) :].sum())
            return math.log1p(-lost) if lost < 1 else -math.inf


def _log_moments(release: Release, cap: float, direction: Direction) -> Numbers:
    """ln E[e^{sL}; every single loss below the cap], for each exponent s."""
    match release:
        case Chance(cases):
            rest = max(0.0, 1 - math.fsum(share for share, _ in cases))
            terms = [math.log(share) + _log_moments(each, cap, direction) for share, each in cases if share > 0]
            return np.logaddexp.reduce([np.full(len(_EXPONENTS), math.log(rest) if rest else -math.inf), *terms], axis=0)
        case Times(inner, count):
            return count * _log_moments(inner, cap, direction)
        case Several(parts):
            return np.sum([_log_moments(each, cap, direction) for each in parts], axis=0)
        case Shift() | Sampled() | Swapped() | Exchanged():
            return _base_moments(release, cap, direction)


@lru_cache(maxsize=1024)
def _base_moments(release: Base, cap: float, direction: Direction) -> Numbers:
    least, most, probabilities = _coarse(release, direction)
    kept = np.where(least < cap, probabilities, 0.0)
    sides = [np.minimum(each, cap) * exponents[:, None] for each, exponents in ((least, _DOWN), (most, _UP))]
    return np.concatenate([_log_sums(side, kept) for side in sides])


def _log_sums(exponents: Numbers, weights: Numbers) -> Numbers:
    most = exponents.max(axis=1)
    return np.asarray(np.log(np.maximum(np.exp(exponents - most[:, None]) @ weights, 1e-300)) + most, dtype=np.float64)


@lru_cache(maxsize=128)
def _coarse(release: Base, direction: Direction) -> tuple[Numbers, Numbers, Numbers]:
    """Groups of cells: the least and the largest loss in each, and its probability."""
    losses, probabilities = table(release, direction)
    first = np.arange(0, len(losses), _GROUP)
    last = np.minimum(first + _GROUP, len(losses)) - 1
    return losses[first], losses[last], np.add.reduceat(probabilities, first)
