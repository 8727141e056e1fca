"""The total cost of releases, computed independently: nothing here reads a ledger or imports the package's accountant.

A release is what the witness in `client` saw a client do. All releases of a sequence are composed into one privacy
loss distribution: Gaussian ones exactly, sampled ones with dp-accounting's own tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.stats import norm

_INTERVAL = 1e-3


@dataclass(frozen=True)
class Release:
    """One participation, as it really was: every number is the one that the training would have used."""

    adversary: str
    unit: str
    method: str
    noise: str
    noise_at: str
    sampling: str
    sigma: float
    """Noise of one draw over the clip bound of this round."""
    quantile_noise: float | None
    records: int
    batch: int
    slots: int
    steps: int
    per_round: int
    layers: int
    secret: bool
    """Whether the noise came from the operating system: noise from a published seed protects nobody."""
    others: int = 0
    """A share of a sum: how many honest members the masks are shared with, apart from this client."""
    shares: int = 1
    """A share of a sum: into how many shares the noise was divided."""


@dataclass(frozen=True)
class Moments:
    """Noised moments of a client's inputs, each time with values that had not been released before."""

    adversary: str
    unit: str
    records: int
    noise: float
    """On the sums, over what one record moves them by."""
    secret: bool


@dataclass(frozen=True)
class Loss:
    """Total precision of Gaussian releases (Σ 1/z²), and counts of sampled ones: (records, rate, slots, z)."""

    precision: float
    sampled: tuple[tuple[int, float, int, float], ...] = ()


def loss_of(seen: Release | Moments) -> Loss:
    """What one release reveals to the adversary of its policy."""
    if isinstance(seen, Moments):
        # All records move the sums N times as far; the noise of a single record's values is √N times less.
        moved = {"client": seen.records**2}.get(seen.unit, seen.records if seen.adversary == "example" else 1)
        return Loss(moved / seen.noise**2 if seen.secret else math.inf)
    root = math.sqrt(seen.layers)
    if not seen.secret or seen.sigma == 0 or seen.method not in ("fed-cdp", "fed-cdp-decay", "fed-sdp"):
        return Loss(math.inf)
    if seen.method == "fed-sdp":
        if seen.noise_at == "server" or seen.adversary == "example":
            return Loss(math.inf)
        reach = 2 if seen.unit == "record" else 1  # a record may reverse its client's clipped update
        return Loss((reach * root / seen.sigma) ** 2)
    on_sum = {"example": math.sqrt(seen.slots), "batch": 1.0, "cohort": 1 / seen.per_round,
              "sum": math.sqrt((1 + seen.others) / seen.shares)}[seen.noise]  # fmt: skip
    if seen.unit == "client":
        return Loss(_steps(seen, seen.steps, on_sum / seen.slots, root))
    if seen.adversary == "example" and seen.noise != "example":
        return Loss(math.inf)
    weight = 1.0 if seen.adversary == "example" else on_sum
    if seen.sampling == "partition":
        uses = min(seen.steps, math.ceil(seen.steps * seen.batch / seen.records))
        return Loss(_steps(seen, uses, weight, root))
    assert seen.sampling == "poisson"
    assert seen.adversary == "server"
    assert seen.quantile_noise is None
    assert seen.records > seen.slots
    one = (seen.records, seen.batch / seen.records, seen.slots, seen.sigma * weight / root)
    return Loss(0.0, (one,) * seen.steps)


def _steps(seen: Release, steps: int, weight: float, root: float) -> float:
    """Steps with noise of σ·weight·C; the first may also reveal an indicator of half a unit per example."""
    indicator = 0.0 if seen.quantile_noise is None else 1 / (2 * seen.quantile_noise * weight) ** 2
    return steps * (root / (seen.sigma * weight)) ** 2 + indicator


def total_epsilon(releases: Iterable[Release | Moments], delta: float) -> float:
    """ε of all releases together at δ."""
    losses = [loss_of(each) for each in releases]
    sampled = Counter(one for loss in losses for one in loss.sampled)
    return _epsilon(round(math.fsum(loss.precision for loss in losses), 12), tuple(sorted(sampled.items())), delta)


@lru_cache(maxsize=100_000)
def _epsilon(precision: float, sampled: tuple[tuple[tuple[int, float, int, float], int], ...], delta: float) -> float:
    if precision == math.inf:
        return math.inf
    if not sampled:
        return _gaussian(math.sqrt(precision), delta)
    parts = [_table(*one).self_compose(times) for one, times in sampled]
    if precision:
        parts.append(pld.from_gaussian_mechanism(1 / math.sqrt(precision), value_discretization_interval=_INTERVAL))
    composed = parts[0]
    for part in parts[1:]:
        composed = composed.compose(part)
    return float(composed.get_epsilon_for_delta(delta))


@lru_cache(maxsize=100)
def _table(records: int, rate: float, slots: int, z: float) -> Any:
    return pld.from_truncated_subsampled_gaussian_mechanism(records, rate, slots, z, value_discretization_interval=_INTERVAL)


def _gaussian(mu: float, delta: float) -> float:
    """ε of a Gaussian with mean shift μ (Balle and Wang, 2018)."""
    if mu == 0:
        return 0.0

    def excess(eps: float) -> float:
        return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)) - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, mu * mu + 10 * mu, xtol=1e-10))
