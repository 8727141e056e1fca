"""Objectives: how far what a dummy would show is from what was seen, and what a likely example looks like."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedcdp.errors import PlanError
from fedcdp.tree import Tree

Distance = Literal["squared", "cosine"]

_SHORTEST = 1e-12  # of the product of two lengths: a zero gradient has no direction


@dataclass(frozen=True)
class Objective:
    """`squared`: the sum over all coordinates; `cosine`: 1 − cos of the angle, blind to length (Geiping et al., 2020)."""

    distance: Distance = "squared"
    total_variation: float = 0.0
    """Weight of the mean absolute difference of neighbouring pixels: small enough, it only chooses among what fits."""
    shared_only: bool = False
    """Compare only where what was seen is not zero: what pruning left out says little."""
    tensors: tuple[str, ...] | None = None
    """Compare only these tensors; None: all."""

    def __post_init__(self) -> None:
        if self.distance not in get_args(Distance):
            raise PlanError(f"distance: {self.distance!r} is not one of {', '.join(get_args(Distance))}")
        if not 0 <= self.total_variation < math.inf:
            raise PlanError(f"total_variation: {self.total_variation} is not allowed; it must be 0 or more, and finite")

    def only(self, *tensors: str) -> Objective:
        """The same, over these tensors alone."""
        return replace(self, tensors=tensors)

    def between(self, shown: Tree, seen: Tree) -> Tensor:
        """[victims]: how far apart two trees [victims, ...] are."""
        pairs = self._pairs(shown, seen)
        if self.distance == "squared":
            return _total((here - there).square() for here, there in pairs)
        inner = _total(here * there for here, there in pairs)
        squares = [_total(each[side].square() for each in pairs) for side in (0, 1)]
        # Bounded below before the root is taken, whose slope at 0 is infinite.
        return 1 - inner / (squares[0] * squares[1]).clamp(min=_SHORTEST**2).sqrt()

    def misfit(self, shown: Tree, seen: Tree) -> Tensor:
        """[victims]: the squared distance less the squared norm of what was seen, a constant that is mostly noise and would
        leave float32 no digits for the rest."""
        return _total(here * (here - 2 * there) for here, there in self._pairs(shown, seen))

    def _pairs(self, shown: Tree, seen: Tree) -> list[tuple[Tensor, Tensor]]:
        pairs = [(_rows(shown[name]), _rows(seen[name])) for name in self.tensors or tuple(seen)]
        if self.shared_only:
            pairs = [(torch.where(there != 0, here, 0.0), there) for here, there in pairs]
        return pairs


def _rows(value: Tensor) -> Tensor:
    """[victims, ...] as [victims, coordinates]: one, of a scalar."""
    return value.reshape(len(value), -1)


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.sum(1) for part in parts]).sum(0)


def total_variation(images: Tensor) -> Tensor:
    """[victims]: the mean absolute difference of neighbouring pixels; of vectors, 0."""
    if images.dim() < 4:
        return images.new_zeros(len(images))
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().flatten(1).mean(1)
    across = (images[..., :, 1:] - images[..., :, :-1]).abs().flatten(1).mean(1)
    return down + across
