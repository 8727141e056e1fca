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


class OrientedGradients(nn.Module):
    """How strongly an image rises in each of several directions, cell by cell: Dalal and Triggs' histograms, softened.

    1. Slopes of every channel, by a smoothed difference of neighbours.
    2. Their share in each of `orientations` directions, all around: a cosine to the power of `sharpness`, none if behind.
       In a colour image a pixel takes the channel that is steepest there.
    3. Weighted means in overlapping windows (a pyramid of half-width `reach`), one every `stride` pixels.
    4. Each cell divided by its own norm (and by `floor`, for what is flat), less its mean over the directions.
    5. For colour: each cell's mean colour less grey, divided by the norm over the picture, `colour` times as long as the rest.
    6. Everything divided by its norm.

    Guarantees: inputs [examples, channels, height, width]; outputs [examples, features] of norm at most 1, each a function
    of its own example alone.
    """

    slopes: Tensor
    directions: Tensor
    window: Tensor

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

    def extra_repr(self) -> str:
        """All that the constants were made of."""
        names = ("orientations", "stride", "reach", "sharpness", "floor", "colour")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def forward(self, images: Tensor) -> Tensor:
        """The features of each image."""
        parts = [_unit(self._edges(images).flatten(1))]
        if self.colour:
            parts.append(self.colour * _unit(F.avg_pool2d(images - 0.5, self.stride).flatten(1)))
        return _unit(torch.cat(parts, dim=1))

    def _edges(self, images: Tensor) -> Tensor:
        examples, channels, height, width = images.shape
        bordered = F.pad(images.reshape(-1, 1, height, width), (1, 1, 1, 1), mode="replicate")
        slopes = F.conv2d(bordered, self.slopes)
        steepness = (slopes.square().sum(1, keepdim=True) + _TINY).sqrt()
        if channels > 1:
            places = steepness.view(examples, channels, 1, height, width).argmax(1, keepdim=True)
            slopes, steepness = (
                value.unflatten(0, (examples, channels)).gather(1, places.expand(-1, -1, value.shape[1], -1, -1))[:, 0]
                for value in (slopes, steepness)
            )
        share = F.conv2d(slopes / steepness, self.directions).relu()
        rises = steepness * share**self.sharpness
        cells = F.conv2d(rises.reshape(-1, 1, height, width), self.window, stride=self.stride, padding=self.reach - 1)
        cells = cells.view(examples, self.orientations, *cells.shape[2:])
        cells = cells / (cells.square().sum(1, keepdim=True) + self.floor).sqrt()
        return cells - cells.mean(1, keepdim=True)


class UnitNorm(nn.Module):
    """Each example divided by its own norm; one of zeros stays."""

    def forward(self, values: Tensor) -> Tensor:
        """The values of each example [examples, features], at norm 1."""
        return _unit(values)


FIXED: tuple[type[nn.Module], ...] = (OrientedGradients, UnitNorm)
"""Layers of this module: nothing to train, nothing random, each output a function of its own example alone."""


def _unit(values: Tensor) -> Tensor:
    """Each row divided by its norm; a row of zeros stays."""
    return values / (values.square().sum(1, keepdim=True) + _TINY).sqrt()


def _rounded(value: float) -> float:
    """The nearest number that float32 holds exactly, whatever the machine's cosine."""
    return round(value * _PRECISION) / _PRECISION
