"""Releases and their privacy losses, from the mathematics alone: nothing of fedcdp.accounting or dp_accounting.

A release is a pair of distributions (P, Q), or several composed. Noise has deviation 1, and μ is the distance between the
means, 1/z. The privacy loss is L = ln P/Q under P. `table` gives its distribution as cells of (loss, probability):

| release | P and Q (removing the unit; adding it exchanges them) |
| --- | --- |
| `Shift(μ)` | N(μ), N(0) |
| `Sampled(q, μ)` | (1−q)·N(0) + q·N(μ), N(0) |
| `Swapped(q, μ)` | (1−q)·N(0) + q·N(μ), (1−q)·N(0) + q·N(−μ) |
| `Exchanged(q, μ)` | the pair with the curve δ(ln(1 + q(e^x − 1))) = q·δ_G(x), the same in both directions |
| `Chance` | one of several releases; which of them does not depend on the data and is known |
| `Times`, `Several` | compositions |

`slotted` builds the release of Poisson sampling into S slots out of these. Its docstring says which neighbour it covers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

Numbers = NDArray[np.float64]
Direction = Literal["remove", "add"]

_REACH = 9.5  # standard deviations; 1e-21 lies beyond
_CELLS = 12_000


@dataclass(frozen=True)
class Shift:
    """A Gaussian whose mean moves by μ."""

    mu: float


@dataclass(frozen=True)
class Sampled:
    """A Gaussian whose mean moves by μ with a secret probability."""

    rate: float
    mu: float


@dataclass(frozen=True)
class Swapped:
    """A Gaussian whose mean moves by μ in one world and by −μ in the other, with a secret probability."""

    rate: float
    mu: float


@dataclass(frozen=True)
class Exchanged:
    """Sampling without replacement; whoever is in the unit's place moves the mean by up to μ."""

    rate: float
    mu: float


@dataclass(frozen=True)
class Chance:
    """(probability, release), adding up to at most one; with the rest of the probability, nothing."""

    cases: tuple[tuple[float, Release], ...]


@dataclass(frozen=True)
class Times:
    """The same release afresh, again and again."""

    release: Release
    count: int


@dataclass(frozen=True)
class Several:
    """One release after another."""

    releases: tuple[Release, ...]


Base = Shift | Sampled | Swapped | Exchanged
Release = Base | Chance | Times | Several


def slotted(records: int, rate: float, slots: int, mu: float) -> Release:
    """Poisson sampling of `records` into `slots`, those beyond dropped at random; a Gaussian of distance μ for one record.

    Both neighbours are covered: the record's gradient becomes zero and keeps its slot (fedcdp's zero-out), or the record
    is not in the list at all. Let U be the number of *other* records drawn. U does not depend on the record and may be
    known.

    - U < S: nobody is dropped. The record joins with probability q: `Sampled(q, μ)`.
    - U ≥ S: by symmetry the other records of a full step are a uniform set T of S of them. With probability
      c = P(record kept | U ≥ S) one of T, chosen at random, makes room for the record. Around the sum of T the mean moves,
      with probability c, by r − e in one world and by −e (slot kept) or 0 (record not in the list) in the other, where
      |r|, |e| ≤ μ. All these lie within 2μ of 0, so that `Swapped(c, 2μ)` dominates them.
    """
    if records <= slots:
        return Sampled(rate, mu)
    full = float(binom.sf(slots - 1, records - 1, rate))
    if full == 0:
        return Sampled(rate, mu)
    drawn = np.arange(slots, min(records, slots + 1000 + int(40 * math.sqrt(records * rate))))
    kept = float(np.sum(binom.pmf(drawn, records - 1, rate) * rate * slots / (drawn + 1))) / full
    return Chance(((1 - full, Sampled(rate, mu)), (full, Swapped(kept, 2 * mu))))


@lru_cache(maxsize=128)
def table(release: Base, direction: Direction) -> tuple[Numbers, Numbers]:
    """The losses, ascending, and the probability of each."""
    match release:
        case Shift(mu):
            return _of_mixtures(((1.0, mu),), ((1.0, 0.0),))
        case Sampled(rate, mu):
            drawn, alone = ((1 - rate, 0.0), (rate, mu)), ((1.0, 0.0),)
            return _of_mixtures(drawn, alone) if direction == "remove" else _of_mixtures(alone, drawn)
        case Swapped(rate, mu):
            return _of_mixtures(((1 - rate, 0.0), (rate, mu)), ((1 - rate, 0.0), (rate, -mu)))
        case Exchanged(rate, mu):
            return _exchanged(rate, mu)


Mixture = tuple[tuple[float, float], ...]


def _of_mixtures(upper: Mixture, lower: Mixture) -> tuple[Numbers, Numbers]:
    """ln P/Q in cells of x, for mixtures of (weight, mean) of Gaussians of deviation 1."""
    means = [mean for _, mean in upper + lower]
    edges = _edges(min(means), max(means))
    probability = np.sum([weight * _between(edges - mean) for weight, mean in upper], axis=0)
    middle = (edges[1:] + edges[:-1]) / 2
    loss = _log_density(middle, upper) - _log_density(middle, lower)
    order = np.argsort(loss, kind="stable")
    return loss[order], probability[order]


def _edges(least: float, most: float) -> Numbers:
    if most - least < 4 * _REACH:
        return np.linspace(least - _REACH, most + _REACH, _CELLS + 1)
    around = [np.linspace(mean - _REACH, mean + _REACH, _CELLS // 2 + 1) for mean in (least, most)]
    between = np.linspace(least + _REACH, most - _REACH, _CELLS // 4 + 1)[1:-1]
    return np.concatenate([around[0], between, around[1]])


def _between(edges: Numbers) -> Numbers:
    """Probability of a standard normal value between neighbouring edges, exact in both tails."""
    below, above = ndtr(edges), ndtr(-edges)
    return np.where(edges[:-1] < 0, np.diff(below), -np.diff(above))


def _log_density(x: Numbers, mixture: Mixture) -> Numbers:
    """Up to the same constant for all."""
    terms = [math.log(weight) - (x - mean) ** 2 / 2 for weight, mean in mixture if weight > 0]
    return np.logaddexp.reduce(terms, axis=0)


def _exchanged(rate: float, mu: float) -> tuple[Numbers, Numbers]:
    """P(L > t) = q·Φ(μ/2 − y) + (1−q)·Φ(−μ/2 − y) and P(L < −t) = Φ(−μ/2 − y), y = ln(1 + (e^t − 1)/q)/μ; the rest is 0."""
    edges = np.linspace(0.0, mu / 2 + _REACH, _CELLS // 2 + 1)
    far = _between(-edges[::-1] - mu / 2)[::-1]
    near = _between(mu / 2 - edges[::-1])[::-1]
    middle = (edges[1:] + edges[:-1]) / 2
    loss = np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + mu * middle)
    up = rate * near + (1 - rate) * far
    atom = 1 - rate * ndtr(mu / 2) - (2 - rate) * ndtr(-mu / 2)
    return np.concatenate([-loss[::-1], [0.0], loss]), np.concatenate([far[::-1], [max(0.0, float(atom))], up])


def gaussian_delta(epsilon: float, mu: float) -> float:
    """δ(ε) of a Gaussian whose mean moves by μ (Balle and Wang, 2018)."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε at which that curve is δ."""
    if mu == 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, mu) > delta else (low, middle)
    return high


def together(parts: list[tuple[Release, int]]) -> Release:
    """(release, how often) composed: Gaussians into one, equal releases gathered."""
    squares, counted = 0.0, dict[Release, int]()
    stack = list(parts)
    while stack:
        release, count = stack.pop()
        match release:
            case Shift(mu):
                squares += count * mu * mu
            case Times(inner, often):
                stack.append((inner, count * often))
            case Several(inner_parts):
                stack.extend((each, count) for each in inner_parts)
            case _:
                counted[release] = counted.get(release, 0) + count
    gathered: list[Release] = [Times(release, count) for release, count in counted.items() if count]
    if squares or not gathered:
        gathered.append(Shift(math.sqrt(squares)))
    return gathered[0] if len(gathered) == 1 else Several(tuple(gathered))
