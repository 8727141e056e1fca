"""ε by Rényi differential privacy: looser than `tight`, but familiar to reviewers. Refuses releases that it cannot bound."""

from __future__ import annotations

import math
from fractions import Fraction

import dp_accounting
import numpy as np
from dp_accounting import rdp
from numpy.typing import NDArray
from scipy.special import logsumexp

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
from fedcdp.errors import PlanError

Curve = NDArray[np.float64]

ORDERS: Curve = np.array([1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024], dtype=np.float64)


def epsilon(release: Release, delta: float) -> float:
    """An ε such that the release is (ε, δ)-differentially private; infinite if there is none."""
    if isinstance(release, Nothing):
        return 0.0
    if isinstance(release, Unprotected):
        return math.inf
    return float(rdp.compute_epsilon(ORDERS, _curve(release), delta)[0])


def _curve(release: Release) -> Curve:
    match release:
        case Gaussian(z):
            return ORDERS / (2 * z * z)
        case PoissonGaussian(rate, z):
            event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
            return curve_of_event(event, ORDERS, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        case WithoutReplacement(rate, half_z):
            # The accountant uses the noise multiplier as given: `half_z` already includes the doubled distance. A float is a
            # fraction of whole numbers, so the rate is passed on exactly, however small.
            sample = Fraction(rate)
            event = dp_accounting.SampledWithoutReplacementDpEvent(
                sample.denominator, sample.numerator, dp_accounting.GaussianDpEvent(half_z)
            )
            return curve_of_event(event, ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
        case Lottery(inner, rate):
            return _mixture(_curve(inner), (1 - rate, rate))
        case Draws(inner, probabilities):
            return _mixture(_curve(inner), probabilities)
        case Repeated(inner, times):
            return times * _curve(inner)
        case Sequence(parts):
            return np.asarray(np.sum([_curve(part) for part in parts], axis=0), dtype=np.float64)
        case SlottedPoisson() | OverfullPoisson():
            raise PlanError(
                "mode: rdp does not support Poisson record sampling with slots; use mode tight, or another record sampling"
            )
    raise TypeError(f"{release} has no Rényi divergence")


def curve_of_event(event: dp_accounting.DpEvent, orders: Curve, relation: dp_accounting.NeighboringRelation) -> Curve:
    """The Rényi divergences of one of dp-accounting's events."""
    accountant = rdp.RdpAccountant(orders, relation)
    accountant.compose(event)
    return np.asarray(accountant.rdp, dtype=np.float64)


def _mixture(inner: Curve, probabilities: tuple[float, ...]) -> Curve:
    """x times `inner` with probability `probabilities[x]`, known to the adversary: ln(Σ p_x e^{(α−1)·x·rdp}) / (α−1)."""
    times = np.arange(len(probabilities))[:, None]
    weights = np.asarray(probabilities, dtype=np.float64)[:, None]
    with np.errstate(over="ignore"):
        mixed = logsumexp(times * inner * (ORDERS - 1), b=weights, axis=0) / (ORDERS - 1)
    return np.asarray(mixed, dtype=np.float64)
