"""ε round by round: the privacy statement after some of a run's releases, as its ledger counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedcdp.accounting.ledger import Charge
from fedcdp.accounting.population import Population
from fedcdp.plan import Plan

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy

_POINTS = 10


def over_releases(plan: Plan, population: Population, charges: Sequence[Charge]) -> list[tuple[int, Privacy]]:
    """The statement after about ten numbers of releases, the last of them all; `charges` are the releases.

    `epsilon_used` is then what the most-used client had spent by that time. Without a release there is nothing to state.
    """
    from fedcdp.accounting.statement import Usage, state

    if not charges:
        return []
    counted = np.zeros((len(charges), population.clients), dtype=np.int64)
    for number, charge in enumerate(charges):
        counted[number, charge.clients] = 1
    stated = []
    for releases in _places(len(charges)):
        used = np.sort(counted[:releases].sum(0))[::-1][: population.copies]
        rounds = tuple(charge.round for charge in charges[:releases])
        usage = Usage(rounds, tuple(int(times) for times in used))
        stated.append((releases, state(plan, population, rounds=rounds, usage=usage)))
    return stated


def _places(releases: int) -> list[int]:
    """Where ε is computed: it grows fastest at the beginning, so that is where the points are closest."""
    return sorted({round(releases * (place / _POINTS) ** 1.5) or 1 for place in range(1, _POINTS + 1)})
