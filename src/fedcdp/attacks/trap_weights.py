"""Trap weights: rows of a first dense layer that few inputs open, so a row's gradient often holds a single input.

Boenisch, Dziedzic, Schuster, Shamsabadi, Shumailov, Papernot: "When the Curious Abandon Honesty: Federated Learning Is Not
Private", EuroS&P 2023. Half of a row's weights are negative, the other half positive and smaller by a factor. The factor
decides how many inputs open the row: here it is, for each row, the quantile among public inputs that one record in a batch
exceeds.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedcdp.attacks.active import Stage
from fedcdp.attacks.first_layer import Baited, FirstLayer, RowAttack
from fedcdp.errors import ModelError

_SMALLEST = 1e-9


class TrapWeights(RowAttack):
    """The attack `trap-weights`."""

    name: ClassVar[str] = "trap-weights"

    def why_not(self, stage: Stage) -> str | None:
        """It needs a dense first layer with biases, a ReLU, and another dense layer."""
        if len(stage.public) < 2:
            return "needs public examples to choose the weights"
        try:
            FirstLayer.of(stage.scene.network, stage.scene.shape)
        except ModelError as error:
            return str(error).removeprefix("analytic ")
        return None

    def craft(self, stage: Stage) -> Baited:
        """See `RowAttack`."""
        layer = FirstLayer.of(stage.scene.network, stage.scene.shape)
        public = stage.public.tensor
        rows, biases = trap_rows(public.flatten(1).double().cpu(), layer.units, 1 / stage.examples, stage.seed)
        crafted = layer.filled(stage.scene.network, rows, biases, public, stage.seed)
        return Baited(crafted, layer.weight, layer.bias, overlapping=True)


def trap_rows(public: Tensor, units: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows [units, n] and biases [units] that this share of inputs like the public ones [many, n] open."""
    generator = torch.Generator().manual_seed(seed)
    size = public.shape[1]
    drawn = torch.randn(units, size, generator=generator, dtype=torch.float64) / math.sqrt(size)
    if float(public.min()) < 0:  # inputs of both signs: a bias, not a factor, decides who opens a row
        return drawn, -torch.quantile(public @ drawn.T, max(1 - share, 0.0), dim=0)
    positive = torch.rand(units, size, generator=generator).argsort(1) < size // 2
    down, up = public @ (drawn.abs() * ~positive).T, public @ (drawn.abs() * positive).T
    factors = torch.quantile(down / up.clamp(min=_SMALLEST), min(share, 1.0), dim=0)  # open if factor · up > down
    return drawn.abs() * torch.where(positive, factors[:, None], -1.0), torch.zeros(units, dtype=torch.float64)
