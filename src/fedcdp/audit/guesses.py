"""The lower bound on ε that right guesses about many canaries of one training prove.

Theorem (Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023, Theorem 5.2 and
Corollary 5.4). Each of m canaries is included in the input of a mechanism with probability ½, independently of the others
and of all else. From the output, and without the inclusions, an adversary guesses for r of them, of its choice, whether they
are included, and abstains from the others. If the mechanism is (ε, δ)-private when any one canary is added or zeroed out,
the number V of right guesses satisfies, for every v,

    P[V ≥ v] ≤ P[B ≥ v] + 2·m·δ · max over 1 ≤ i ≤ v of P[v > B ≥ v − i] / i,    B ~ Binomial(r, e^ε / (1 + e^ε)).

For v right guesses, the right side is a p-value of the claim "(ε, δ)-private". The bound is the smallest ε whose p-value
reaches 1 − confidence: every smaller ε is refuted. It needs no assumption about the mechanism or the attack.

Several rules for guessing (how many, on which statistic) may be tried on the same output if their p-values share the level
(Bonferroni): `prove` does that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcdp.audit.intervals import Numbers
from fedcdp.errors import PlanError
from fedcdp.mechanism.randomness import numpy_generator

_HALVINGS = 6  # numbers of guesses that are tried: m, m/2, m/4, ...
_FEWEST = 4
_STEPS = 50  # of the bisection


@dataclass(frozen=True)
class Guesses:
    """The guesses that prove most."""

    epsilon: float
    """The lower bound on ε."""
    guesses: int
    """r, the number of canaries that were guessed."""
    correct: int
    """v, the number of right guesses."""
    statistic: int
    """The number of the statistic that they were made on."""
    rules: int
    """How many rules for guessing were tried, and share the level."""


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The probability bound of the theorem above, for `correct` right ones out of `guesses` guesses.

    Raises:
        PlanError: The numbers are not 0 ≤ correct ≤ guesses ≤ canaries, or ε or δ is out of range.
    """
    from scipy.special import expit
    from scipy.stats import binom

    if not 0 <= correct <= guesses <= canaries:
        raise PlanError(f"guesses: {correct} right of {guesses} guesses about {canaries} canaries are not possible")
    if epsilon < 0 or not 0 <= delta <= 1:
        raise PlanError(f"epsilon, delta: {epsilon} and {delta} are not allowed; ε must be at least 0, and δ from 0 to 1")
    if correct == 0:
        return 1.0
    right = float(expit(epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    fewer = binom.pmf(np.arange(correct - 1, -1, -1), guesses, right).cumsum()  # P[v > B ≥ v − i] for i = 1, 2, ...
    slack = float((fewer / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * slack)


def epsilon_of_guesses(canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """The smallest ε whose p-value reaches `level`, rounded down; 0 if that of 0 does."""
    if p_value(canaries, guesses, correct, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(canaries, guesses, correct, high, delta) < level:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        below = p_value(canaries, guesses, correct, middle, delta) < level
        low, high = (middle, high) if below else (low, middle)
    return low


def prove(
    scores: Numbers, included: np.ndarray, delta: float, confidence: float, *, guesses: int | None = None, seed: int = 0
) -> Guesses:
    """Guess from scores [statistics, canaries], high for canaries that seem included, and return what that proves.

    Every statistic is tried with several numbers of guesses r (or with `guesses` alone), in two ways: for the r scores that
    lie farthest from the middle, "included" above it and "left out" below it; and for the r highest scores, "included". The
    middle is halfway between the 10th and the 90th percentile. All these rules share the level 1 − confidence. Equal scores
    are put in a random order.
    """
    count = len(included)
    if guesses is not None and not 1 <= guesses <= count:
        raise PlanError(f"guesses: {guesses} is not allowed; it must be from 1 to the number of canaries, {count}")
    numbers = (
        [guesses] if guesses is not None else [count >> n for n in range(_HALVINGS) if count >> n >= _FEWEST] or [count]
    )
    rules = [(r, far) for r in numbers for far in (True, False) if far or 2 * r <= count]
    level = (1 - confidence) / (len(rules) * len(scores))
    best = Guesses(0.0, 0, 0, 0, len(rules) * len(scores))
    for statistic, score in enumerate(np.nan_to_num(scores)):
        mixed = numpy_generator(seed, "audit-ties", statistic).permutation(count)
        low, high = np.quantile(score, (0.1, 0.9))
        middle = low / 2 + high / 2
        right = (score > middle) == included
        for r, far in rules:
            chosen = mixed[np.argsort(-np.abs(score - middle)[mixed] if far else -score[mixed], kind="stable")[:r]]
            correct = int((right if far else included)[chosen].sum())
            epsilon = epsilon_of_guesses(count, r, correct, delta, level)
            if epsilon > best.epsilon or not best.guesses:
                best = Guesses(epsilon, r, correct, statistic, best.rules)
    return best
