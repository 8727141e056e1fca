"""ε by privacy loss distributions: the default, pessimistic and nearly exact.

Built on `dp-accounting` (Connect-the-Dots discretisation, rounded up; interval 1e-4).
"""

from __future__ import annotations

import functools
import math
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.common import DifferentialPrivacyParameters
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fedcdp.accounting.mechanisms import (
    Draws,
    Gaussian,
    Lottery,
    Nothing,
    OverfullPoisson,
    PoissonGaussian,
    Release,
    Repeated,
    Sequence,
    SlottedPoisson,
    Unprotected,
    WithoutReplacement,
)

Distribution: TypeAlias = Any  # pld.PrivacyLossDistribution; the library carries no types

_FINEST = 1e-4
_NEGLIGIBLE = 1e-13
# Approximate number of losses in the table of one release. Overestimates ε by less than one per cent, except for weak noise
# at small rates: by 4.6 % at z = 0.7, a rate of 0.001 and 2,000 steps.
_POINTS = 8_000
_COARSEST = 1.0  # with a coarser grid, the table of losses would cost more ε than secret sampling saves
_SHARES = 64  # the least number of shares of the tail's probability; every lottery takes one
_TAIL = 1e-15  # probability that a composition may move to an infinite loss: far below any δ in use


@lru_cache(maxsize=4096)  # rows of a statement repeat releases; only ε is cached, since the tables take megabytes
def epsilon(release: Release, delta: float, points: int = _POINTS) -> float:
    """The smallest ε such that the release is (ε, δ)-differentially private; infinite if there is none.

    More `points` in the tables of losses give a smaller ε that also holds, and take longer.
    """
    if isinstance(release, Nothing):
        return 0.0
    if isinstance(release, Unprotected):
        return math.inf
    if isinstance(release, Gaussian):
        return gaussian_epsilon(release.z, delta)
    coarse = _epsilon_of_gaussians(release, delta)
    interval = _interval(release, points)
    if interval > _COARSEST:
        return coarse
    return min(coarse, float(_distribution(release, interval).get_epsilon_for_delta(delta)))


def _epsilon_of_gaussians(release: Release, delta: float) -> float:
    """An ε without amplification by secret sampling: a bound that holds for any noise, however weak.

    The number of draws of every lottery in the release is bounded, except with its share of δ/2. The drawn releases are then
    Gaussian. Under zero-out the record keeps its slot, so a slotted sum moves by one sensitivity, even when slots overflow.
    """
    lotteries = _lotteries(release)
    precision = _precision(release, 1, delta / 2 / max(lotteries, _SHARES))
    if precision == 0:  # except with probability δ/2, nothing is released
        return 0.0
    return gaussian_epsilon(1 / math.sqrt(precision), delta / 2 if lotteries else delta)


def _lotteries(release: Release) -> int:
    """The number of lotteries in a release, including nested ones: `_precision` spends one tail for each."""
    match release:
        case Lottery(inner):
            return 1 + _lotteries(inner)
        case Draws(inner) | Repeated(inner):
            return _lotteries(inner)
        case Sequence(parts):
            return sum(_lotteries(part) for part in parts)
    return 0


def _precision(release: Release, times: int, tail: float) -> float:
    """An upper bound on Σ 1/z² of `times` releases, which fails with probability `tail` for each lottery in the release."""
    match release:
        case Gaussian(z) | PoissonGaussian(_, z) | SlottedPoisson(_, _, _, z) | OverfullPoisson(_, _, z, _):
            return times / z**2
        case WithoutReplacement(_, half_z):
            return times / half_z**2
        case Lottery(inner, rate):
            return _precision(inner, int(binom.isf(tail, times, rate)), tail)
        case Draws(inner, probabilities):
            return _precision(inner, times * (len(probabilities) - 1), tail)
        case Repeated(inner, often):
            return _precision(inner, times * often, tail)
        case Sequence(parts):
            return sum(_precision(part, times, tail) for part in parts)
    return 0.0


def gaussian_epsilon(z: float, delta: float) -> float:
    """ε of one Gaussian release, by its exact privacy curve (Balle and Wang, 2018)."""
    if z == 0:
        return math.inf
    mu = 1 / z

    def excess(eps: float) -> float:
        return float(_gaussian_delta(np.array([eps]), mu)[0]) - delta

    if excess(0.0) <= 0:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1  # enough, by the tail bound of the loss
    return float(brentq(excess, 0.0, high, xtol=1e-9))


def _gaussian_delta(eps: NDArray[np.float64], mu: float) -> NDArray[np.float64]:
    """δ(ε) of a Gaussian release with mean shift μ in units of its noise."""
    second = np.exp(eps + norm.logcdf(-eps / mu - mu / 2))
    return np.asarray(np.clip(norm.cdf(-eps / mu + mu / 2) - second, 0.0, 1.0), dtype=np.float64)


def _interval(release: Release, points: int) -> float:
    """The grid spacing of the loss table: a fixed number of points over the range of the widest release."""
    z = _smallest_z(release)
    span = 16 / z + 12 / (z * z)
    return max(_FINEST, span / points)


def _smallest_z(release: Release) -> float:
    match release:
        case Gaussian(z) | PoissonGaussian(_, z) | SlottedPoisson(_, _, _, z) | OverfullPoisson(_, _, z, _):
            return z
        case WithoutReplacement(_, half_z):
            return half_z
        case Lottery(inner) | Draws(inner) | Repeated(inner):
            return _smallest_z(inner)
        case Sequence(parts):
            return min(_smallest_z(part) for part in parts)
    return math.inf


def _distribution(release: Release, interval: float) -> Distribution:
    """The privacy loss distribution. Compositions are not cached, because a running training never repeats one."""
    match release:
        case Repeated(inner, times):
            return _distribution(inner, interval).self_compose(times, _TAIL)
        case Sequence(parts):
            composed = [_distribution(part, interval) for part in parts]
            return functools.reduce(lambda left, right: left.compose(right, _TAIL), composed)
    return _of_one(release, interval)


@lru_cache(maxsize=16)
def _of_one(release: Release, interval: float) -> Distribution:
    match release:
        case Gaussian(z):
            return pld.from_gaussian_mechanism(z, value_discretization_interval=interval)
        case PoissonGaussian(rate, z):
            return pld.from_gaussian_mechanism(z, sampling_prob=rate, value_discretization_interval=interval)
        case SlottedPoisson(records, rate, slots, z):
            return pld.from_truncated_subsampled_gaussian_mechanism(
                records, rate, slots, z, value_discretization_interval=interval
            )
        case OverfullPoisson(rate, overflow, z, told):
            return _overfull(rate, overflow, z, told, interval)
        case WithoutReplacement(rate, half_z):
            return _without_replacement(rate, half_z, interval)
        case Lottery(inner, rate):
            return _distribution(inner, interval).compute_mixture(pld.identity(interval), rate)
        case Draws(inner, probabilities):
            return _draws(_distribution(inner, interval), probabilities, interval)
    raise TypeError(f"{release} has no privacy loss distribution")


def _overfull(rate: float, overflow: float, z: float, told: bool, interval: float) -> Distribution:
    """Poisson sampling, or, with the probability of an overflow, the release in an overflow.

    A record kept in an overflow must have been drawn, so `rate` also bounds the probability of keeping it.
    """
    plain = pld.from_gaussian_mechanism(z, sampling_prob=rate, value_discretization_interval=interval)
    if told:
        return _of_one(Lottery(Gaussian(z), rate), interval).compute_mixture(plain, overflow)
    replaced = pld.from_gaussian_mechanism(
        z / 2, sampling_prob=rate, value_discretization_interval=interval, neighboring_relation=pld.NeighborRel.REPLACE_ONE
    )
    return replaced.compute_mixture(plain, overflow)


def _without_replacement(rate: float, half_z: float, interval: float) -> Distribution:
    """Amplification by sampling without replacement under replace-one (Balle et al. 2018; Zhu et al. 2022).

    δ(ε) = q·δ_G(ε₀) with ε = ln(1 + q(e^ε₀ − 1)), in both directions; the curve below ε = 0 follows from the symmetry.
    """
    mu = 1 / half_z
    largest = mu * mu / 2 + 9 * mu
    points = np.arange(0, math.ceil(math.log1p(rate * math.expm1(min(largest, 700.0))) / interval) + 2)
    inner = np.log1p(np.expm1(points * interval) / rate)
    above = rate * _gaussian_delta(inner, mu)
    below = 1 - np.exp(-points[:0:-1] * interval) * (1 - above[:0:-1])
    losses = np.concatenate([-points[:0:-1], points])
    return pld.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots(interval, losses, np.concatenate([below, above]))
    )


def _draws(inner: Distribution, probabilities: tuple[float, ...], interval: float) -> Distribution:
    """A mixture over the number of times that `inner` happens, built up one term at a time.

    Negligibly likely small numbers count as the smallest non-negligible one, and large ones as a certain loss: both are
    pessimistic.
    """
    cumulative = np.cumsum(probabilities)
    least = int(np.searchsorted(cumulative, _NEGLIGIBLE))
    most = min(int(np.searchsorted(cumulative, 1 - _NEGLIGIBLE)), len(probabilities) - 1)
    weights = [cumulative[least], *probabilities[least + 1 : most + 1]]
    mixed = pld.from_privacy_parameters(DifferentialPrivacyParameters(0.0, 1.0), value_discretization_interval=interval)
    total = max(0.0, 1.0 - float(np.sum(weights)))
    for times, weight in enumerate(weights, start=least):
        if weight > 0:
            total += float(weight)
            drawn = pld.identity(interval) if times == 0 else inner if times == 1 else inner.self_compose(times, _TAIL)
            mixed = drawn.compute_mixture(mixed, min(1.0, float(weight) / total))
    return mixed
