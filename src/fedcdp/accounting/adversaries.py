"""The adversaries of the threat model, and what each sees over the rounds of a training.

| adversary | reads |
| --- | --- |
| `example` (type-2) | every example's gradient as the method releases it inside local training, and whose it is |
| `update` (type-1) | a client's update before it is sent |
| `server` (type-0) | every client's update as received |
| `model` | the global model after every round, and nothing else |

Units: a `record`, a `client` (all of its records), and `unique`: one person whose record is stored at several clients.
Relations: `zero-out` (the unit's contribution is replaced by nothing) and `replace-one` (by another unit's).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcdp.accounting.mechanisms import Gaussian, Lottery, Nothing, Release, repeated, sequence
from fedcdp.config.plan import SCALING, Plan

Adversary = Literal["server", "update", "example", "model"]
Unit = Literal["record", "client", "unique"]
Relation = Literal["zero-out", "replace-one"]

# If the clip bound decays and the noise does not, every round has its own noise multiplier. Multipliers are rounded down to
# at most this many values, so a long run composes few distinct releases. Rounding down makes the printed ε larger.
_DISTINCT = 24
_DISTINCT_GAUSSIANS = 4096  # Gaussian releases add up in closed form


_NOTHING = Nothing()


@dataclass(frozen=True)
class View:
    """What one adversary sees of one unit in one round, as a function of the round's noise multiplier σ_t = noise / C_t."""

    adversary: Adversary
    unit: Unit
    relation: Relation
    assumption: str
    a_priori: Callable[[float], Release]
    """The release over the random choice of the round's clients."""
    taken: Callable[[float], Release]
    """The release if the unit is known to take part."""
    hidden: bool = False
    """Whether `a_priori` assumes that nobody knows who took part; then it is also the cost of a round after the fact."""
    participation: Callable[[float], Release] | None = None
    """One participation of one client, if `taken` covers several."""
    at_once: int = 1
    """How many clients that hold the unit may take part in one round."""
    scaling: Release = _NOTHING
    """What noised means and variances of the inputs show of the unit, if the plan releases them before its first round."""
    fallback: View | None = None
    """An alternative row that also holds; the smaller ε of the two is printed."""
    others: tuple[View, ...] = ()
    """The same row for clients that hold other numbers of records; the largest ε of all is printed."""

    def before(self, multipliers: Iterable[float], attempts: int = 1) -> Release:
        """Everything that rounds with these noise multipliers will release, before it is known who takes part.

        With several `attempts` at each round, their choices are not independent: who takes part in a further attempt took
        part in the one before, or was drawn anew. So a unit counts in all attempts or in none, with `attempts` times the
        probability of one.
        """

        def tried(sigma: float) -> Release:
            once = self.a_priori(sigma)
            if attempts == 1:
                return once
            whole = repeated(self.taken(sigma), attempts)
            if isinstance(once, Lottery) and attempts * once.rate < 1:
                return Lottery(whole, attempts * once.rate)
            return whole

        return _over_rounds(tried, Counter(multipliers))

    def worst(self, multipliers: Iterable[float]) -> Release:
        """The same if the unit takes part in every round."""
        return _over_rounds(self.taken, Counter(multipliers))

    def used(self, multipliers: Iterable[float], participations: int) -> Release:
        """What this many participations have released: those with the least noise, since it is not known which they were."""
        if self.hidden:
            return self.before(multipliers)
        counted, left = Counter[float](), participations
        for sigma, rounds in sorted(Counter(multipliers).items()):
            counted[sigma] = min(left, rounds * self.at_once)
            left -= counted[sigma]
        return _over_rounds(self.participation or self.taken, counted)


def scaling_releases(plan: Plan, rounds: int | Iterable[int] | None = None) -> int:
    """How often noised means and variances were released, if `rounds` lists the releases; at least once in a plan that does
    so."""
    if plan.scaling_noise is None:
        return 0
    return 1 if rounds is None or isinstance(rounds, int) else max(1, sum(each == SCALING for each in rounds))


def multipliers_by_attempts(plan: Plan, rounds: int | Iterable[int] | None = None) -> dict[int, list[float]]:
    """σ_t of each released round, by the number of attempts at it.

    Noise on the sum is tried again with those of a round's clients that answered. Any other round is repeated after a crash
    only, with clients that are drawn anew, and counts as another round.
    """
    if plan.attempts == 1 or rounds is None or isinstance(rounds, int):
        return {1: noise_multipliers(plan, rounds)}
    tried = Counter(each for each in rounds if each != SCALING)
    return {
        attempts: noise_multipliers(plan, [round_ for round_, times in tried.items() if times == attempts])
        for attempts in sorted(set(tried.values()))
    }


def noise_multipliers(plan: Plan, rounds: int | Iterable[int] | None = None) -> list[float]:
    """σ_t, noise divided by the clip bound, for each released round.

    `rounds` lists the released rounds; a round that was released twice is listed twice. A number n means the first n
    rounds; the default is all rounds of the plan. A round beyond the plan counts as the costliest.
    """
    rounds = plan.rounds if rounds is None else rounds
    released = range(rounds) if isinstance(rounds, int) else [each for each in rounds if each != SCALING]
    if plan.noise_follows_clip:
        return [plan.noise_multiplier] * len(released)
    of_round = [plan.noise_scale_at(t) / plan.clip_at(t) for t in range(plan.rounds)]
    return [of_round[t] if t < plan.rounds else min(of_round) for t in released]


def _over_rounds(release: Callable[[float], Release], counted: Counter[float]) -> Release:
    """The releases of all rounds in sequence; `counted` holds the number of rounds with each noise multiplier."""
    counted = +counted  # drops multipliers with a count of zero
    if not counted:
        return sequence([])
    gaussian = isinstance(release(next(iter(counted))), Gaussian)
    few = _rounded_down(counted, _DISTINCT_GAUSSIANS if gaussian else _DISTINCT)
    return sequence([repeated(release(sigma), times) for sigma, times in few.items()])


def _rounded_down(counted: Counter[float], most: int) -> Counter[float]:
    """The same counts with at most `most` distinct multipliers, each rounded down to a geometric grid."""
    if len(counted) <= most:
        return counted
    values = np.array(list(counted))
    least, largest = values.min(), values.max()
    step = np.log(largest / least) / most
    rungs = np.minimum(np.floor(np.log(values / least) / step), most - 1)
    rounded = np.minimum(least * np.exp(rungs * step), values)
    few = Counter[float]()
    for value, times in zip(rounded.tolist(), counted.values(), strict=True):
        few[value] += times
    return few
