"""Fixed features: a map from one example to a vector that is not learned and uses no private data.

A network that trains only a linear layer on such features has few weights to noise, and gradients whose norm is known: for
features of norm 1 it is the norm of softmax minus target, so clipping hardly distorts them. No statistic of the training
data is used (scaling by the data's mean and standard deviation would leak them, and no ε would cover it): every constant
here was fixed beforehand, and every normalisation uses a single example.

The constants are buffers, rounded to a few binary digits, so all machines hold bit-identical ones: a deployment admits a
client by their digest.
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
    """The strength of an image's gradient in several directions, cell by cell: a soft form of Dalal and Triggs' histograms.

    1. Compute the slopes of every channel (with `colour`: of brightness, red minus green, and yellow minus blue) as smoothed
       differences of neighbours.
    2. Split them over `orientations` directions around the full circle: the cosine to the power of `sharpness`, zero for
       directions more than 90° away.
    3. Take weighted means in overlapping windows (a pyramid of half-width `reach`), one every `stride` pixels.
    4. Divide each cell of a channel by its own norm (with `floor` added under the root, for flat regions) and subtract its
       mean over the directions.
    5. With `colour`: add the mean of every 4×4 pixels in each channel minus mid-grey, scaled to `colour` times the norm of
       the rest.
    6. Divide everything by its norm.

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
        """The arguments from which the constants are computed."""
        names = ("orientations", "stride", "reach", "sharpness", "floor", "colour")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def forward(self, images: Tensor) -> Tensor:
        """The features of each image."""
        if not self.colour:
            return unit(self._edges(images))
        edges = self._edges(F.conv2d(images, self.opponents))
        colours = F.avg_pool2d(images - 0.5, _COLOUR_CELL).flatten(1)
        return unit(torch.cat([unit(edges), self.colour * unit(colours)], dim=1))

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
    """Divide each example by its own norm, append the fixed value `constant`, and rescale to a norm of at most 1.

    With a constant, the linear layer that follows needs no bias.
    """

    def __init__(self, constant: float = 0.0) -> None:
        super().__init__()
        self.constant = constant

    def extra_repr(self) -> str:
        """The only argument."""
        return f"constant={self.constant}"

    def forward(self, values: Tensor) -> Tensor:
        """Map [examples, features] to [examples, features + 1], or to [examples, features] without a constant."""
        if not self.constant:
            return unit(values)
        one = torch.full_like(values[:, :1], self.constant)
        return torch.cat([unit(values), one], dim=1) / math.sqrt(1 + self.constant**2)


class PeriodicFeatures(nn.Module):
    """Waves of each column of a table, at several `frequencies`. They suit columns of very different scales.

    1. Each value x becomes z = asinh(x): close to x for small values, to its logarithm for large ones.
    2. Each frequency f gives sin(f·z) and 1 − cos(f·z). Both are 0 where x is 0, so the zeros of a sparse table stay zeros.

    Dividing a raw record by its norm leaves little but its largest columns. The waves of a column of thousands are no larger
    than those of a column of ones, and still separate values that differ by a few per cent. Values far below 1 give small
    waves.

    Guarantees: inputs [examples, columns]; outputs [examples, 2 · frequencies · columns], each a function of its own example
    alone, each between −1 and 2. No statistic of the data is used.
    """

    def __init__(self, frequencies: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)) -> None:
        super().__init__()
        self.frequencies = frequencies

    def extra_repr(self) -> str:
        """The only argument."""
        return f"frequencies={self.frequencies}"

    def forward(self, values: Tensor) -> Tensor:
        """The waves of each example."""
        phases = torch.asinh(values)
        waves = [wave for each in self.frequencies for wave in (torch.sin(each * phases), 1 - torch.cos(each * phases))]
        return torch.cat(waves, dim=1)


class Standardised(nn.Module):
    """Inputs minus a mean, times a scale, entry by entry. Both are buffers that are set once, before training, from public
    knowledge or from a release that the ledger counts (`mechanism.moments`)."""

    mean: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        """See the class."""
        return (inputs - self.mean) * self.scale

    def undo(self, outputs: Tensor) -> Tensor:
        """The inputs [..., *shape] that give these outputs, in their precision and on their device."""
        return outputs / self.scale.to(outputs) + self.mean.to(outputs)


def unit(values: Tensor) -> Tensor:
    """Divide each row by its norm; a row of zeros stays zero."""
    return values / (values.square().sum(1, keepdim=True) + _TINY).sqrt()


def _rounded(value: float) -> float:
    """Round to a number that float32 holds exactly, so the result does not depend on the machine's cosine."""
    return round(value * _PRECISION) / _PRECISION
