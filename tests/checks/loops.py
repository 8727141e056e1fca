"""Training loops of somebody else: an honest one for a linear network, and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
WIDTH = 6
Loop = Callable[[nn.Module, Tensor, Tensor], Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 3)


def examples(count: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, WIDTH, generator=generator), torch.arange(count) % 3


def gradients(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the cross-entropy of each record, in closed form: [records, 3, WIDTH] and [records, 3]."""
    with torch.no_grad():
        errors = model(inputs).softmax(-1) - nn.functional.one_hot(labels, 3)
    return errors[:, :, None] * inputs[:, None, :], errors


def dp_sgd(
    sigma: float = 1.0,
    clip: float | None = 1.0,
    *,
    silent: tuple[str, ...] = (),
    divide: bool = False,
    draw: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Loop:
    """DP-SGD on a batch: clip each record's gradient, add σC to the sum, divide by a constant."""

    def leaves(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weight, bias = gradients(model, inputs, labels)
        norms = (weight.flatten(1).square().sum(1) + bias.square().sum(1)).sqrt()
        factor = torch.ones_like(norms) if clip is None else (clip / norms).clamp(max=1.0)
        sums = {"weight": torch.einsum("n,nij->ij", factor, weight), "bias": torch.einsum("n,ni->i", factor, bias)}
        scale = sigma * (1.0 if clip is None else clip)
        by = len(inputs) if divide else BATCH
        return {name: (each + (0 if name in silent else scale) * draw(each)) / by for name, each in sums.items()}

    return leaves
