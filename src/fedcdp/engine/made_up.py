"""Examples and weights that are nobody's, by which networks are tried."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcdp.files.tree import Inputs, Tree, each_tensor

_MOVED = 0.02  # how far weights are moved: from zeros, at which gradients of other tensors are zero


def made_up(example: Inputs) -> Inputs:
    """Inputs of the same shapes and types: random numbers, and for whole numbers and marks 1, 0, 1, 0, …"""
    generator = torch.Generator().manual_seed(0)

    def one(value: Tensor) -> Tensor:
        if value.is_floating_point():
            return torch.rand(value.shape, generator=generator).to(value)
        return ((torch.arange(value.numel()) + 1) % 2).view(value.shape).to(value)

    return each_tensor(example, one)


def moved(weights: Tree, generator: torch.Generator) -> Tree:
    """Weights near the given ones."""
    return {
        name: value + _MOVED * torch.randn(value.shape, generator=generator).to(value) for name, value in weights.items()
    }
