"""Spaces: where a search looks for examples, and the prior that public examples give.

A point [victims, D] of a `Space` stands for examples [victims, examples, ...]: pixels, principal components of public
examples, or whitened coordinates of the distribution of public examples within a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError


class Space(Protocol):
    """Represents examples as points, with a prior over the points and the set of allowed ones."""

    has_prior: bool

    def within(self, labels: Tensor) -> Space:
        """The space of examples with these labels [victims, examples]."""
        ...

    def points(self, examples: Tensor) -> Tensor:
        """The points nearest to examples [victims, examples, ...]."""
        ...

    def examples(self, points: Tensor) -> Tensor:
        """The examples [victims, examples, ...] that points stand for."""
        ...

    def penalty(self, points: Tensor) -> Tensor:
        """[victims]: negative log-likelihood of the points, up to a constant."""
        ...

    def project(self, points: Tensor) -> Tensor:
        """The nearest allowed points."""
        ...


@dataclass(frozen=True)
class Pixels:
    """Each coordinate is free; with a `box`, within these bounds."""

    shape: tuple[int, ...]
    box: tuple[float, float] | None = None
    has_prior = False

    def within(self, labels: Tensor) -> Pixels:  # noqa: ARG002
        """See `Space`."""
        return self

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
    """Principal components of public examples, with the Gaussian prior fitted to them."""

    shape: tuple[int, ...]
    mean: Tensor
    basis: Tensor
    """[components, size]: orthogonal directions, each one standard deviation long."""
    has_prior = True

    @staticmethod
    def of(public: Dataset, components: int, device: torch.device) -> Subspace:
        """The leading components of the public examples."""
        flat = public.tensor.flatten(1).to(device)
        if len(flat) <= components:
            raise DataError(f"public: {len(flat)} examples are too few for {components} principal components")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            _, deviations, directions = torch.pca_lowrank(flat, q=min(components, flat.shape[1]), niter=4)
        scaled = directions.T * (deviations / (len(flat) - 1) ** 0.5)[:, None]
        return Subspace(public.shape, flat.mean(0), scaled)

    def within(self, labels: Tensor) -> Subspace:  # noqa: ARG002
        """See `Space`."""
        return self

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


_LEAST_DEVIATION = 1e-3  # of the range of public values: no direction is treated as impossible
_FEWEST = 10  # public examples
_HELD_OUT = 5  # every fifth example of a class tells how far examples stray from its components


@dataclass(frozen=True)
class ClassComponents:
    """Public examples of each class as a Gaussian: principal components of the class, and one variance for all the rest.

    A point is whitened: the prior is N(0, 1) in every coordinate, and every example has a point. So the prior has no weight
    where an observation is exact. A class with few public examples has the components that all classes share.
    """

    shape: tuple[int, ...]
    means: Tensor
    """[classes, size]; of bound spaces [victims, examples, size]."""
    axes: Tensor
    """[classes, components, size]: orthonormal directions; of bound spaces [victims, examples, components, size]."""
    deviations: Tensor
    """[classes, components]: standard deviation along each axis."""
    rest: Tensor
    """[classes, 1]: standard deviation in every other direction."""
    has_prior = True

    @staticmethod
    def of(public: Dataset, components: int, classes: int, device: torch.device) -> ClassComponents:
        """Learn the distribution of public examples; with `classes` = 1, that of all of them. Few examples give few axes."""
        flat = public.tensor.flatten(1).to(device, torch.float64)
        if len(flat) < _FEWEST:
            raise DataError(f"public: {len(flat)} examples are too few for a prior; it needs {_FEWEST}")
        components = min(components, len(flat) // 2)
        targets = public.targets.to(device).reshape(len(flat)) if classes > 1 else torch.zeros(len(flat), device=device)
        members = [(targets == label).nonzero()[:, 0] for label in range(classes)]
        overall = flat.mean(0)
        means = torch.stack([flat[mine].mean(0) if len(mine) else overall for mine in members])
        least = _LEAST_DEVIATION * max(float(flat.max() - flat.min()), 1e-12)
        shared: tuple[Tensor, Tensor, Tensor] | None = None
        fitted = []
        for mine in members:
            if len(mine) > components:
                fitted.append(_components(flat[mine] - flat[mine].mean(0), components, least))
                continue
            if shared is None:
                centred = torch.cat([flat[each] - means[label] for label, each in enumerate(members)])
                shared = _components(centred, components, least)
            fitted.append(shared)
        axes, deviations, rest = (torch.stack(each).float() for each in zip(*fitted, strict=True))
        return ClassComponents(public.shape, means.float(), axes, deviations, rest)

    def within(self, labels: Tensor) -> ClassComponents:
        """See `Space`."""
        of = labels if len(self.means) > 1 else torch.zeros(labels.shape[:2], dtype=torch.int64, device=labels.device)
        return ClassComponents(self.shape, self.means[of], self.axes[of], self.deviations[of], self.rest[of])

    def points(self, examples: Tensor) -> Tensor:
        """See `Space`."""
        centred = examples.flatten(2) - self.means
        return self._scaled(centred, 1 / self.deviations, 1 / self.rest).flatten(1)

    def examples(self, points: Tensor) -> Tensor:
        """See `Space`."""
        flat = self.means + self._scaled(points.view(self.means.shape), self.deviations, self.rest)
        return flat.view(*flat.shape[:2], *self.shape)

    def penalty(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points.square().sum(1) / 2

    def project(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points

    def _scaled(self, values: Tensor, along: Tensor, elsewhere: Tensor) -> Tensor:
        """Values [victims, examples, size], multiplied by `along` on each axis, and by `elsewhere` in other directions."""
        inside = (self.axes @ values[..., None]) * (along - elsewhere)[..., None]
        scaled: Tensor = elsewhere * values + (self.axes.mT @ inside)[..., 0]
        return scaled


def _components(centred: Tensor, components: int, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """The leading axes [components, size] of centred rows, the deviation along each, and that of the rest.

    The deviation of the rest is that of every fifth row, seen from the axes of the others: rows that give the axes hardly
    stray from them.
    """
    size = centred.shape[1]
    count = min(components, size)
    held_out = torch.arange(len(centred), device=centred.device) % _HELD_OUT == 0
    some, _ = _leading(centred[~held_out], count)
    strays = centred[held_out] - (centred[held_out] @ some.T) @ some
    rest = (strays.square().sum() / max(1, int(held_out.sum()) * max(size - count, 1))).sqrt().clamp(min=least)
    axes, variances = _leading(centred, count)
    return axes, variances.clamp(min=0).sqrt().clamp(min=float(rest)), rest[None]


def _leading(centred: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The leading axes of rows, as rows, and the variances along them; missing ones have no direction and no variance."""
    axes, variances = centred.new_zeros(count, centred.shape[1]), centred.new_zeros(count)
    if len(centred) < centred.shape[1]:
        values, mixtures = torch.linalg.eigh(centred @ centred.T)
        directions = (centred.T @ mixtures) / values.clamp(min=1e-12).sqrt()
    else:
        values, directions = torch.linalg.eigh(centred.T @ centred)
    kept = (values > 1e-9 * values[-1].clamp(min=1e-12)).nonzero()[:, 0].flip(0)[:count]
    axes[: len(kept)], variances[: len(kept)] = directions[:, kept].T, values[kept] / max(1, len(centred) - 1)
    return axes, variances
