"""Who sees what: for every adversary of the threat model, the releases that a plan shows it (design: docs/guarantees.md).

| adversary | reads |
| --- | --- |
| `example` (type-2) | every example's gradient as the method releases it inside local training, and whose it is |
| `update` (type-1) | a client's update before it leaves |
| `server` (type-0) | every client's update as received |
| `model` | the global model after every round, and nothing else |

Units: a `record`, a `client` (all of its records), and `unique`: one person whose record is stored at several clients.
Relations: `zero-out` (the unit's contribution is replaced by nothing) and `replace-one` (by another's).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedcdp.accounting.releases import Release, repeated, sequence
from fedcdp.plan import Plan

Adversary = Literal["server", "update", "example", "model"]
Unit = Literal["record", "client", "unique"]
Relation = Literal["zero-out", "replace-one"]

# A bound that decays under noise that stays gives a noise multiplier of its own to every round. They are rounded down to
# steps of this ratio, so that a long run has few distinct releases; the ε printed is the larger for it.
_ROUNDING = 1.1


@dataclass(frozen=True)
class View:
    """What one adversary sees of one unit in one round, as a function of the round's noise multiplier σ_t = noise / C_t."""

    adversary: Adversary
    unit: Unit
    relation: Relation
    assumption: str
    a_priori: Callable[[float], Release]
    """Over the choice of the round's clients."""
    taken: Callable[[float], Release]
    """If the unit is known to take part."""
    hidden: bool = False
    """Whether `a_priori` rests on nobody knowing who took part, so that it is also what a round has cost."""
    participation: Callable[[float], Release] | None = None
    """One participation of one client, where `taken` is that of several."""
    at_once: int = 1
    """How many clients that hold the unit may take part in one round."""
    fallback: View | None = None
    """A row that holds as well; the smaller ε of the two is printed."""

    def before(self, multipliers: list[float]) -> Release:
        """All that rounds with these noise multipliers will show, before it is known who takes part."""
        return sequence([repeated(self.a_priori(sigma), times) for sigma, times in Counter(multipliers).items()])

    def worst(self, multipliers: list[float]) -> Release:
        """The same if the unit takes part in every round."""
        return sequence([repeated(self.taken(sigma), times) for sigma, times in Counter(multipliers).items()])

    def used(self, multipliers: list[float], participations: int) -> Release:
        """What so many participations have shown: those with the least noise, as it is not said which they were."""
        if self.hidden:
            return self.before(multipliers)
        once = self.participation or self.taken
        parts, left = [], participations
        for sigma, rounds in sorted(Counter(multipliers).items()):
            parts.append(repeated(once(sigma), min(left, rounds * self.at_once)))
            left -= min(left, rounds * self.at_once)
        return sequence(parts)


def noise_multipliers(plan: Plan, releases: int | None = None) -> list[float]:
    """σ_t, noise over the clip bound, of the first rounds' releases (default: one for each round of the plan).

    Releases beyond the plan's rounds are repeats under fresh noise, after a crash; each counts as the costliest there is.
    """
    releases = plan.rounds if releases is None else releases
    if plan.noise_follows_clip:
        return [plan.noise_multiplier] * releases
    exact = [plan.noise_scale_at(t) / plan.clip_at(t) for t in range(min(releases, plan.rounds))]
    rounded = [_ROUNDING ** math.floor(math.log(value, _ROUNDING) + 1e-9) if value else 0.0 for value in exact]
    return rounded + [min(rounded, default=0.0)] * (releases - len(rounded))
