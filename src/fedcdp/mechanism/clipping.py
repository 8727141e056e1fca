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

    That is the distance between the sums of two neighbouring batches when an entry is zeroed out. The noise of a release,
    its accounting and the admission of updates all take it from here.
    """
    return bound * math.sqrt(groups)


@dataclass(frozen=True)
class Clipped:
    """Clipped gradients or updates, and what one of them can change at most (`sensitivity`)."""

    values: Tree
    sensitivity: float


def group_norms(gradients: Tree, groups: tuple[Group, ...], lead: int) -> list[Tensor]:
    """The L2 norm of every group, over all but the `lead` leading axes, accumulated in float32."""

    # Not torch.linalg.vector_norm: on a CPU it adds term by term and can be 0.3 % short of the norm of a million
    # weights, which would let a gradient through that is longer than C. A plain sum adds pairwise.
    def squared(value: Tensor) -> Tensor:
        return value.reshape(*value.shape[:lead], -1).float().square().sum(-1)

    return norms_of_groups({name: squared(value) for name, value in gradients.items()}, groups)


def norms_of_groups(squared: Tree, groups: tuple[Group, ...]) -> list[Tensor]:
    """The L2 norm of every group, of the squared norms of its tensors."""
    # A root's slope at 0 is infinite. Whoever differentiates a clipped gradient (an attack) would get NaN for a zero one.
    return [torch.stack([squared[name] for name in group]).sum(0).clamp(min=_TINY).sqrt() for group in groups]


@dataclass(frozen=True)
class Factors:
    """What clipping multiplies each group of each entry by, and the entries that it keeps at all."""

    of_groups: tuple[Tensor, ...]
    usable: Tensor


def clip_factors(norms: list[Tensor], bound: float, present: Tensor) -> Factors:
    """C / max(C, ‖g‖₂) for every group; an entry that is not real, or not finite in some group, is not usable."""
    usable = present & torch.stack([torch.isfinite(norm) for norm in norms]).all(0)
    return Factors(tuple(bound / norm.clamp(min=bound) for norm in norms), usable)


def clip(gradients: Tree, groups: tuple[Group, ...], bound: float, present: Tensor) -> Clipped:
    """Scale every group of every entry to norm at most `bound`: g / max(1, ‖g‖₂ / C), layer by layer.

    `present` [clients, examples] or [clients] marks the entries that are real; its axes are the leading ones.
    """
    factors = clip_factors(group_norms(gradients, groups, present.dim()), bound, present)
    clipped: Tree = {}
    for group, factor in zip(groups, factors.of_groups, strict=True):
        for name in group:
            value = gradients[name]
            scaled = value * factor.view(factor.shape + (1,) * (value.dim() - factor.dim())).to(value.dtype)
            clipped[name] = masked(scaled, factors.usable)
    return Clipped(clipped, sensitivity(bound, len(groups)))
