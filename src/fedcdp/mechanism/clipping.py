"""Clipping: bound the influence of one example's gradient, or of one client's update.

| input | result |
| --- | --- |
| norm ≤ C | unchanged, to the bit |
| norm > C | scaled to norm C |
| zero | zero |
| any NaN or infinity in it, or a norm that overflows float32 | zero, in every layer |
| an empty slot | zero |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.files.tree import Group, Tree, masked

_TINY = torch.finfo(torch.float32).tiny


def sensitivity(bound: float, groups: int) -> float:
    """C·√M: the largest L2 norm of one whole entry that is clipped at C in each of M groups.

    This is the largest distance between the sums of two neighbouring batches, one of which has an entry zeroed out. The
    noise of a release, its accounting and the admission of updates all take it from here.
    """
    return bound * math.sqrt(groups)


@dataclass(frozen=True)
class Clipped:
    """Clipped gradients or updates, and the largest change that one of them can cause in their sum (`sensitivity`)."""

    values: Tree
    sensitivity: float


def group_norms(gradients: Tree, groups: tuple[Group, ...], lead: int) -> list[Tensor]:
    """The L2 norm of every group, over all but the `lead` leading axes, in float32, or float64 for float64 gradients."""

    # Not torch.linalg.vector_norm: on a CPU it adds term by term and can fall 0.3 % short for a million weights, which
    # would let a gradient longer than C through. A plain sum adds pairwise.
    def squared(value: Tensor) -> Tensor:
        return at_least_float32(value.reshape(*value.shape[:lead], -1)).square().sum(-1)

    return norms_of_groups({name: squared(value) for name, value in gradients.items()}, groups)


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32, or in float64 if they are."""
    return values if values.dtype == torch.float64 else values.float()


def norms_of_groups(squared: Tree, groups: tuple[Group, ...]) -> list[Tensor]:
    """The L2 norm of every group, from the squared norms of its tensors."""
    # The square root has infinite slope at 0: an attack that differentiates through clipping would get NaN for a zero
    # gradient.
    return [torch.stack([squared[name] for name in group]).sum(0).clamp(min=_TINY).sqrt() for group in groups]


@dataclass(frozen=True)
class Factors:
    """The factors by which clipping scales each group of each entry, and the entries that it keeps."""

    of_groups: tuple[Tensor, ...]
    usable: Tensor


def clip_factors(norms: list[Tensor], bound: float, present: Tensor) -> Factors:
    """C / max(C, ‖g‖₂) for every group. An entry is not usable if it is not present, or not finite in some group."""
    usable = present & torch.stack([torch.isfinite(norm) for norm in norms]).all(0)
    return Factors(tuple(bound / norm.clamp(min=bound) for norm in norms), usable)


def clip(gradients: Tree, groups: tuple[Group, ...], bound: float, present: Tensor) -> Clipped:
    """Scale every group of every entry to norm at most `bound`: g / max(1, ‖g‖₂ / C), layer by layer.

    `present` [clients, examples] or [clients] marks the entries that exist, as opposed to empty slots; its axes are the
    leading ones.
    """
    factors = clip_factors(group_norms(gradients, groups, present.dim()), bound, present)
    clipped: Tree = {}
    for group, factor in zip(groups, factors.of_groups, strict=True):
        for name in group:
            value = gradients[name]
            scaled = value * factor.view(factor.shape + (1,) * (value.dim() - factor.dim())).to(value.dtype)
            clipped[name] = masked(scaled, factors.usable)
    return Clipped(clipped, sensitivity(bound, len(groups)))
