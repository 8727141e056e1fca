"""Spaces: where a reconstruction is looked for. A point [victims, D] stands for examples [victims, examples, ...]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError


class Space(Protocol):
    """A way to write examples as points, with what is likely and what is allowed there."""

    has_prior: bool

    def points(self, examples: Tensor) -> Tensor:
        """The points nearest to examples [victims, examples, ...]."""
        ...

    def examples(self, points: Tensor) -> Tensor:
        """The examples [victims, examples, ...] that points stand for."""
        ...

    def penalty(self, points: Tensor) -> Tensor:
        """[victims]: −log of how likely the points are, up to a constant."""
        ...

    def project(self, points: Tensor) -> Tensor:
        """The nearest allowed points."""
        ...


@dataclass(frozen=True)
class Pixels:
    """Every coordinate on its own; with a `box`, within these bounds."""

    shape: tuple[int, ...]
    box: tuple[float, float] | None = None
    has_prior = False

    def points(self, examples: Tensor) -> Tensor:
        """See `Space`."""
        return self.project(examples.flatten(1))

    def examples(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points.view(len(points), -1, *self.shape)

    def penalty(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points.new_zeros(len(points))

    def project(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points if self.box is None else points.clamp(*self.box)


@dataclass(frozen=True)
class Subspace:
    """The principal components of public examples, with the Gaussian prior that they have there."""

    shape: tuple[int, ...]
    mean: Tensor
    basis: Tensor
    """[components, size]: orthogonal directions, each as long as one standard deviation."""
    has_prior = True

    @staticmethod
    def of(public: Dataset, components: int, device: torch.device) -> Subspace:
        """The leading components of the public examples."""
        flat = public.inputs.flatten(1).to(device)
        if len(flat) <= components:
            raise DataError(f"public: {len(flat)} examples are too few for {components} principal components")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            _, deviations, directions = torch.pca_lowrank(flat, q=min(components, flat.shape[1]), niter=4)
        scaled = directions.T * (deviations / (len(flat) - 1) ** 0.5)[:, None]
        return Subspace(public.shape, flat.mean(0), scaled)

    def points(self, examples: Tensor) -> Tensor:
        """See `Space`."""
        centred = examples.flatten(2) - self.mean
        return (centred @ (self.basis / self.basis.square().sum(1, keepdim=True).clamp(min=1e-12)).T).flatten(1)

    def examples(self, points: Tensor) -> Tensor:
        """See `Space`."""
        coefficients = points.view(len(points), -1, len(self.basis))
        flat = self.mean + coefficients @ self.basis
        return flat.view(*flat.shape[:2], *self.shape)

    def penalty(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points.square().sum(1) / 2

    def project(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points
