"""Observations: what an adversary saw of its victims at several times, each at the weights of that time.

In a training a victim takes part in some rounds, and its record is used in some local steps. All that was seen in one round
is one `Observation`; a victim that was seen more than once in a round is in several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.attacks.observe import Captured


@dataclass(frozen=True)
class Observation:
    """What was seen of some victims at one time."""

    who: Tensor
    """[those]: the numbers of the victims, in ascending order."""
    captured: Captured
    """What was seen of each of them."""

    @staticmethod
    def alone(captured: Captured) -> Observation:
        """All that was seen of all victims."""
        return Observation(torch.arange(len(captured), device=captured.device), captured)

    def of(self, victims: Tensor) -> Observation:
        """What was seen of these victims, given in ascending order and renumbered from 0."""
        place = torch.searchsorted(victims, self.who).clamp(max=len(victims) - 1)
        kept = (victims[place] == self.who).nonzero()[:, 0]
        return Observation(place[kept], self.captured.take(kept))


def among(observations: Sequence[Observation], victims: Tensor) -> list[Observation]:
    """What was seen of these victims, without the times at which none of them was seen."""
    found = [each.of(victims) for each in observations]
    return [each for each in found if len(each.who)]
