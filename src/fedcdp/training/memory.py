"""A run without a directory: what the directory would hold, kept in memory to continue the run in the same process."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedcdp.accounting.budget import Releases
from fedcdp.training.rundir import Row, State


@dataclass
class Memory:
    """The latest state of a run and all its releases.

    Every continuation of the run shares this object and moves it forward. So whatever is resumed, and however often, all
    releases are counted: a round that was interrupted after its charge is charged again.
    """

    releases: Releases
    state: State | None = None
    """After the last finished round; None before the first."""
    metrics: list[Row] = field(default_factory=list)
    """One row for each finished round."""
    moments: tuple[Tensor, Tensor] | None = None
    """What inputs are standardised by, once it was released."""
    followed: bool = False
    """Whether this is a follower's (`ranks`): the state and the releases are in the memory of rank 0 alone."""
    scaling: str = "the run in memory"
    """What an error calls the place of these moments."""

    def save_scaling(self, mean: Tensor, scale: Tensor) -> None:
        """Keep what inputs are standardised by."""
        self.moments = (mean, scale)

    def load_scaling(self) -> tuple[Tensor, Tensor] | None:
        """What inputs are standardised by; None if nothing was released yet."""
        return self.moments
