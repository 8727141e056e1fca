"""The lower bound on ε that an attack's error rates prove."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.999

Numbers = NDArray[np.float64]


def choose_attack(absent: Numbers, present: Numbers, held_out: int, delta: float) -> tuple[int, float]:
    """The attack and threshold with the largest expected bound for `held_out` held-out trials."""
    best, chosen = -math.inf, (0, 0.0)
    for attack, (low, high) in enumerate(zip(np.sort(absent.T), np.sort(present.T), strict=True)):
        pooled = np.sort(np.concatenate([low, high]))
        ends = np.unique(np.geomspace(1, len(low), 200).astype(np.int64))
        places = np.concatenate([ends - 1, len(pooled) - 1 - ends, [np.diff(pooled).argmax()]])
        thresholds = (pooled[places] + pooled[places + 1]) / 2
        counts = (len(low) - np.searchsorted(low, thresholds, "right"), np.searchsorted(high, thresholds, "right"))
        # Rates somewhat worse than counted, so a lucky tail is not mistaken for a good one.
        rates = [upper_limit(count, len(low), 0.05) for count in counts]
        promised = epsilon_of_errors(rates[0] * held_out, rates[1] * held_out, held_out, delta)
        if promised.max() > best:
            best, chosen = promised.max(), (attack, float(thresholds[promised.argmax()]))
    return chosen


def upper_limit(errors: Any, trials: int, level: float) -> Numbers:
    """The Clopper–Pearson upper limit of an error rate, which is too low with probability at most `level`."""
    from scipy.special import betaincinv

    fewer = np.minimum(np.asarray(errors, dtype=np.float64), trials - 1)
    return np.where(np.greater_equal(errors, trials), 1.0, betaincinv(fewer + 1, trials - fewer, 1 - level))


def epsilon_of_errors(false_alarms: Any, misses: Any, trials: int, delta: float) -> Numbers:
    """The ε that a test proves by its numbers of errors, each kind out of `trials`.

    (ε, δ)-privacy implies e^ε·α + β ≥ 1 − δ and α + e^ε·β ≥ 1 − δ. Both rates are bounded simultaneously.
    """
    alpha, beta = (upper_limit(errors, trials, (1 - CONFIDENCE) / 2) for errors in (false_alarms, misses))
    ratio = np.maximum((1 - delta - beta) / alpha, (1 - delta - alpha) / beta)
    return np.log(np.maximum(ratio, 1.0))


def gaussian_epsilon(shift: float, delta: float) -> float:
    """ε of a Gaussian release whose mean moves by `shift` standard deviations (Balle and Wang, 2018).

    This is not the accountant's function, because an audit must not depend on what it audits.
    """
    from scipy.special import log_ndtr, ndtr

    if shift <= 0:
        return 0.0
    low, high = 0.0, shift * shift / 2 + shift * math.sqrt(2 * math.log(1 / delta)) + 1
    if not math.isfinite(high):
        return math.inf
    for _ in range(100):
        middle = (low + high) / 2
        excess = ndtr(shift / 2 - middle / shift) - math.exp(middle + log_ndtr(-shift / 2 - middle / shift))
        low, high = (middle, high) if excess > delta else (low, middle)
    return low


def mean_shift(absent: Numbers, present: Numbers) -> float:
    """The distance of the means in pooled standard deviations, minus the margin for 99.9 % confidence."""
    from scipy.special import ndtri

    spread = math.sqrt((absent.var() + present.var()) / 2)
    distance = abs(float(present.mean() - absent.mean()))
    if spread <= 1e-6 * distance:
        return math.inf if distance else 0.0
    shift = distance / spread
    return float(shift - ndtri(CONFIDENCE) * math.sqrt((2 + shift * shift / 4) / len(absent)))
