"""Per-example gradients that leave the engine with their noise on: for a client on which somebody may read along.

By itself a method asks its engine for clipped gradients, or for their sum, and adds the noise afterwards. The release is the
same, but between the two a reader on the client finds gradients that are only clipped. An adversary of type-2 (`example`)
is such a reader. With `NoisedExamples` as its engine, a method is given no gradient without noise, and no sum of such.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fedcdp.clipping import clip
from fedcdp.engine.base import Batch, Engine
from fedcdp.errors import DefectError
from fedcdp.methods.base import Moment
from fedcdp.methods.quantile import indicators
from fedcdp.noise import noised
from fedcdp.tree import Group, Tree


class NoisedExamples:
    """An engine that clips and noises every example's gradient, one by one, before it gives it out, and gives out no other.

    Guarantees: what `released` returns carries an independent N(0, (σC)²) on every coordinate of every slot, empty ones
    included; the sum over the slots is distributed as under one draw for the whole step. Raw gradients exist inside the
    engine only, for the time of one step, and are not kept.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.model, self.layout, self.loss = engine.model, engine.layout, engine.loss
        self.outputs, self.check = engine.outputs, engine.check

    def released(self, weights: Tree, batch: Batch, at: Moment, counted: bool) -> tuple[Tree, Tensor | None]:
        """Lines 6 to 14 of Algorithm 2: the noised gradients [clients, slots, ...]; if `counted`, noised indicators, too."""
        gradients = self._engine.per_example_gradients(weights, batch)
        within = None
        if counted:
            within = at.noise.for_indicators(at.round, at.clients, at.plan.slots, at.plan.quantile_noise)
            within[:, : batch.present.shape[1]] += indicators(gradients, batch.present, at)
        return noise_each(clip(gradients, at.groups, at.clip_bound, batch.present).values, at), within

    def per_example_gradients(self, weights: Tree, batch: Batch) -> NoReturn:  # noqa: ARG002
        """Refused: they would have no noise."""
        raise _without_noise()

    def summed_gradients(self, weights: Tree, batch: Batch) -> NoReturn:  # noqa: ARG002
        """Refused, for the same reason."""
        raise _without_noise()

    def plain_sum(self, weights: Tree, batch: Batch) -> NoReturn:  # noqa: ARG002
        """Refused, for the same reason."""
        raise _without_noise()

    def clipped_sum(self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float) -> NoReturn:  # noqa: ARG002
        """Refused, for the same reason."""
        raise _without_noise()


def noise_each(clipped: Tree, at: Moment) -> Tree:
    """Noise on every slot of the step, also on the trailing empty ones that the batch left out."""
    noise = at.noise.for_examples(at.round, at.clients, at.step, at.plan.slots, at.noise_scale)
    slots = {}
    for name, value in clipped.items():
        clients, filled, *shape = value.shape
        slots[name] = torch.cat([value, value.new_zeros(clients, at.plan.slots - filled, *shape)], dim=1)
    return noised(slots, noise)


def _without_noise() -> DefectError:
    return DefectError("this engine gives out no gradient without noise; the method must ask for what is released")
