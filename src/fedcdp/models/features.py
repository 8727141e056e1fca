"""Fixed features: a map from one example to a vector, of which nothing is learned and nothing is private.

A network that trains only a linear layer behind such a map has few weights to noise, and gradients whose norm is known:
for features of norm 1 it is that of softmax less target, so that clipping hardly distorts them. No statistic of the
training data enters (dividing by their mean and deviation would leak them, and no ε would cover it): every constant
here was fixed beforehand, and every normalisation is of one example by itself.

The constants are buffers, rounded to a few binary digits, so that two machines hold the same ones to the bit: a client
of a deployment is admitted by their digest.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_TINY = 1e-12
_PRECISION = 2**12
_COLOUR_CELL = 4


class OrientedGradients(nn.Module):
    """How strongly an image rises in each of several directions, cell by cell: Dalal and Triggs' histograms, softened.

    1. Slopes of every channel (with `colour`: of brightness, red less green, and yellow less blue), by a smoothed difference
       of neighbours.
    2. Their share in each of `orientations` directions, all around: a cosine to the power of `sharpness`, none if behind.
    3. Weighted means in overlapping windows (a pyramid of half-width `reach`), one every `stride` pixels.
    4. Each cell of a channel divided by its own norm (and by `floor`, for what is flat), less its mean over the directions.
    5. With `colour`: the mean of every 4×4 pixels in each channel, less mid-grey, in all `colour` times as long as the rest.
    6. Everything divided by its norm.

    Guarantees: inputs [examples, channels, height, width] (with `colour`: red, green, blue); outputs [examples, features]
    of norm at most 1, each a function of its own example alone.
    """

    slopes: Tensor
    directions: Tensor
    window: Tensor
    opponents: Tensor

    def __init__(
        self,
        orientations: int = 8,
        stride: int = 4,
        reach: int = 5,
        sharpness: int = 8,
        floor: float = 1e-3,
        colour: float = 0.0,
    ) -> None:
        super().__init__()
        self.orientations, self.stride, self.reach = orientations, stride, reach
        self.sharpness, self.floor, self.colour = sharpness, floor, colour
        across, along = torch.tensor([-0.5, 0.0, 0.5]), torch.tensor([0.25, 0.5, 0.25])
        rightwards = along[:, None] * across
        self.register_buffer("slopes", torch.stack([rightwards, rightwards.T])[:, None])
        angles = [2 * math.pi * number / orientations for number in range(orientations)]
        directions = torch.tensor([[_rounded(math.cos(angle)), _rounded(math.sin(angle))] for angle in angles])
        self.register_buffer("directions", directions[:, :, None, None])
        side = torch.tensor([_rounded((reach - abs(place)) / reach**2) for place in range(1 - reach, reach)])
        self.register_buffer("window", (side[:, None] * side)[None, None])
        if colour:
            opponents = torch.tensor([[0.25, 0.5, 0.25], [1.0, -1.0, 0.0], [0.5, 0.5, -1.0]])
            self.register_buffer("opponents", opponents[:, :, None, None])

    def extra_repr(self) -> str:
        """All that the constants were made of."""
        names = ("orientations", "stride", "reach", "sharpness", "floor", "colour")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def forward(self, images: Tensor) -> Tensor:
        """The features of each image."""
        if not self.colour:
            return _unit(self._edges(images))
        edges = self._edges(F.conv2d(images, self.opponents))
        colours = F.avg_pool2d(images - 0.5, _COLOUR_CELL).flatten(1)
        return _unit(torch.cat([_unit(edges), self.colour * _unit(colours)], dim=1))

    def _edges(self, images: Tensor) -> Tensor:
        examples, _, height, width = images.shape
        bordered = F.pad(images.reshape(-1, 1, height, width), (1, 1, 1, 1), mode="replicate")
        slopes = F.conv2d(bordered, self.slopes)
        steepness = (slopes.square().sum(1, keepdim=True) + _TINY).sqrt()
        share = F.conv2d(slopes / steepness, self.directions).relu()
        rises = steepness * share**self.sharpness
        cells = F.conv2d(rises.reshape(-1, 1, height, width), self.window, stride=self.stride, padding=self.reach - 1)
        cells = cells.view(-1, self.orientations, *cells.shape[2:])
        cells = cells / (cells.square().sum(1, keepdim=True) + self.floor).sqrt()
        return (cells - cells.mean(1, keepdim=True)).reshape(examples, -1)


class UnitNorm(nn.Module):
    """Each example divided by its own norm, with one more value that is always the same, `constant` times as long.

    A linear layer needs no bias behind it, and the norm is at most 1 all the same.
    """

    def __init__(self, constant: float = 0.0) -> None:
        super().__init__()
        self.constant = constant

    def extra_repr(self) -> str:
        """All that there is to choose."""
        return f"constant={self.constant}"

    def forward(self, values: Tensor) -> Tensor:
        """[examples, features] to [examples, features + 1]; without a constant, as many as there were."""
        if not self.constant:
            return _unit(values)
        one = torch.full_like(values[:, :1], self.constant)
        return torch.cat([_unit(values), one], dim=1) / math.sqrt(1 + self.constant**2)


FIXED: tuple[type[nn.Module], ...] = (OrientedGradients, UnitNorm)
"""Layers of this module: nothing to train, nothing random, each output a function of its own example alone."""


def _unit(values: Tensor) -> Tensor:
    """Each row divided by its norm; a row of zeros stays."""
    return values / (values.square().sum(1, keepdim=True) + _TINY).sqrt()


def _rounded(value: float) -> float:
    """The nearest number that float32 holds exactly, whatever the machine's cosine."""
    return round(value * _PRECISION) / _PRECISION
