"""The noise multiplier that Opacus' adaptive clipping really has (opacus 1.6, `AdaClipDPOptimizer`).

A step clips at C, adds noise σ_Δ·C to the sum, and then multiplies C by exp(−η(f − γ)). f is the noised share of unclipped
gradients: their number, with noise of standard deviation s, divided by the size of the drawn batch. C scales the noise of
the next step, so an adversary reads C from that noise: f is released. Opacus takes σ_Δ = (σ⁻² − (2s)⁻²)^−½ from Theorem 1
of Andrew et al. (2021), where one record moves the number by 1/2, because f is divided by a constant.

In Opacus, one record more turns a batch of b records, n of them unclipped, into one of b + 1. In units of the noise:

| | without the record | with the record | bound |
| --- | --- | --- | --- |
| the sum | N(0, 1) | N(1/σ_Δ, 1) | the sum moves by C |
| f | N(0, 1) | N(m, τ²), τ = b/(b + 1) | m ≤ b/((b + 1)·s), not 1/(2s) |

m is largest where all other gradients are clipped and the record is not, or the other way round. The overlap of two
symmetric unimodal densities falls with their distance (Anderson 1955), so the largest m is the worst case.
`effective_noise` finds the Gaussian mechanism whose privacy curve lies above that of this pair, except for a small
probability. By Blackwell's theorem this mechanism dominates the pair, also under Poisson sampling and in composition (Zhu et
al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
_REACH = 10.0  # standard deviations of the integral over the count's noise; less than 1e-22 lies outside
_NODES = np.linspace(-_REACH, _REACH, 401)
_WEIGHTS = np.exp(-(_NODES**2) / 2) / math.sqrt(2 * math.pi) * (_NODES[1] - _NODES[0])
_CELL = 1.1  # batch sizes within this ratio are bounded together
_LEAST_MEAN = 0.1  # of the sum's distance over the count's: below it, the integral would need more nodes
_PRECISION = 1e-4
_MOST = 25.0  # from here on, ε of one step is in the hundreds, and the curves leave the range of floats
_SPACING = np.linspace(0, 1, 500) ** 1.5


def split_noise(sigma: float, count_std: float) -> float:
    """σ_Δ: the noise multiplier of the sum, by Theorem 1."""
    return float((sigma**-2 - (2 * count_std) ** -2) ** -0.5)


def public_size_noise(sigma: float, count_std: float) -> float:
    """The noise multiplier where the sizes of batches are public: one record moves the number of unclipped ones by 1."""
    return float((split_noise(sigma, count_std) ** -2 + count_std**-2) ** -0.5)


@lru_cache(maxsize=256)
def effective_noise(sigma: float, count_std: float, records: int, rate: float, tail: float) -> float:
    """The z of a Gaussian that dominates a step on a Poisson batch, except with probability `tail`; 0 if none is known.

    The other records of the batch are drawn alike with the record and without it. The privacy curve is therefore at most the
    mean of the curves over the sizes of batches (joint convexity). Without others, the batch of the record alone is compared
    with an empty one, which nothing bounds.
    """
    mean = max(1 / split_noise(sigma, count_std), _LEAST_MEAN / count_std)
    cells = list(_cells(records - 1, rate, tail))

    def curve(grid: Numbers) -> Numbers:
        found = np.full_like(grid, max(0.0, 1 - sum(chance for _, _, chance in cells)))
        for least, last, chance in cells:
            tau, widest = least / (least + 1), last / (last + 1)
            # N(m, τ'²) with a τ' above τ is N(m/a, τ²), times a, plus noise: a² = (1 − τ'²)/(1 − τ²) keeps N(0, 1) as it is.
            shift = widest / count_std * math.sqrt((1 - tau**2) / (1 - widest**2))
            found += chance * _curve(grid, mean, shift, tau)
        return found

    reach = math.hypot(mean, 2 / count_std)
    if reach > _MOST:
        return 0.0
    coarse = np.geomspace(1e-2 * reach, 2 * reach**2 + 2 * _REACH * (reach + 2 * _REACH), 60)
    ends = coarse[curve(coarse) <= tail]
    if not len(ends):
        return 0.0
    grid = float(ends[0]) * _SPACING
    return 1 / _dominating(grid, curve(grid), tail, mean)


def _cells(others: int, rate: float, tail: float) -> Iterator[tuple[int, int, float]]:
    """Ranges of the number of other records in a batch, from 1 on, and their probabilities."""
    from scipy.stats import binom

    least = max(1, int(binom.ppf(tail / 10, others, rate)))
    largest = int(binom.isf(tail / 10, others, rate))
    while least <= largest:
        last = min(max(least, math.floor(_CELL * least)), largest)
        yield least, last, float(binom.cdf(last, others, rate) - binom.cdf(least - 1, others, rate))
        least = last + 1


def _curve(grid: Numbers, mean: float, shift: float, tau: float) -> Numbers:
    """δ at each ε of the pair, in its worse direction: the sum's curve, averaged over the losses of the count."""
    there, back = _NODES * tau + shift, (_NODES - shift) / tau
    losses = (-math.log(tau) - _NODES**2 / 2 + there**2 / 2, math.log(tau) - _NODES**2 / 2 + back**2 / 2)
    first, second = (_gaussian(grid[:, None] - loss[None], mean) @ _WEIGHTS for loss in losses)
    worse: Numbers = np.maximum(first, second)
    return worse


def _gaussian(epsilon: Numbers, mu: float) -> Numbers:
    """δ of N(0, 1) against N(μ, 1) at any ε, also below 0 (Balle and Wang 2018)."""
    from scipy.special import log_ndtr, ndtr

    found: Numbers = ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return found


def _dominating(grid: Numbers, curve: Numbers, tail: float, mean: float) -> float:
    """The least μ of a Gaussian curve that lies above `curve`, except for `tail`, and that is at most `tail` at its end.

    Both curves are convex in e^ε. Between two points, one lies below its chord, and the other one above its tangent.
    """
    from scipy.special import log_ndtr

    def is_above(mu: float) -> bool:
        there = _gaussian(grid, mu)
        falls = np.expm1(np.diff(grid)) * np.exp(grid[:-1] + log_ndtr(-mu / 2 - grid[:-1] / mu))
        tangent = np.append(there[:-1] - falls, 0.0)
        return bool((curve <= tail + (1 - tail) * there).all() and (curve[1:] <= tail + (1 - tail) * tangent[:-1]).all())

    low, high = mean, mean
    while not is_above(high):
        low, high = high, 1.1 * high
    while high > low * (1 + _PRECISION):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high
