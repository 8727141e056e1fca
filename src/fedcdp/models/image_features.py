"""Fixed features of images by name, and features of several kinds side by side.

A new kind is a line in `IMAGE_FEATURES`, its class an entry of `UNIT_FEATURES`, and its name an entry of
`config.default_recipe.FIXED_FEATURES` and `networks.NetworkName`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedcdp.errors import ModelError
from fedcdp.models.features import OrientedGradients, PeriodicFeatures, Standardised, UnitNorm, unit
from fedcdp.models.random_process import RandomProcess
from fedcdp.models.scattering import Scattering


class SideBySide(nn.Module):
    """The features of several layers in one vector, divided by the square root of their number.

    Guarantees: if the features of each part have a norm of at most 1, so has the whole; each output is a function of its
    own example alone.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        if others := [type(part).__name__ for part in parts if type(part) not in UNIT_FEATURES]:
            raise ModelError(f"SideBySide takes fixed features of norm at most 1, not {others[0]}")
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: Tensor) -> Tensor:
        """The features of each example: [examples, sum of the parts' features]."""
        return torch.cat([part(inputs) for part in self.parts], dim=1) / math.sqrt(len(self.parts))


class Mirrored(nn.Module):
    """The mean of an image's features and those of its mirror image, divided by its norm.

    Photographs show the same things mirrored. With this layer an example teaches about both, and has one sensitivity.
    """

    def __init__(self, features: OrientedGradients) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        """The features of each image [examples, channels, height, width]."""
        return unit(self.features(images) + self.features(images.flip(3)))


UNIT_FEATURES: tuple[type[nn.Module], ...] = (OrientedGradients, Mirrored, RandomProcess, Scattering, SideBySide, UnitNorm)
"""Layers of fixed features whose norm is at most 1."""
FIXED = (*UNIT_FEATURES, PeriodicFeatures, Standardised)
"""Layers with nothing to train and no randomness, whose output for an example is a function of that example alone."""


def _oriented_gradients(shape: tuple[int, int, int]) -> nn.Module:
    # Digits need finer cells; colour pictures of objects need their colours (docs/recommended.md).
    return OrientedGradients(stride=8, reach=8, colour=0.7) if shape[0] == 3 else OrientedGradients()


def _mirrored_gradients(shape: tuple[int, int, int]) -> nn.Module:
    return Mirrored(OrientedGradients(colour=0.7 if shape[0] == 3 else 0.0))


IMAGE_FEATURES: dict[str, Callable[[tuple[int, int, int]], nn.Module]] = {
    "oriented-gradients": _oriented_gradients,
    "mirrored-gradients": _mirrored_gradients,
    "random-process": RandomProcess,
    "scattering": lambda shape: Scattering(height=shape[1], width=shape[2]),
}
"""For each name: the features of norm at most 1 of images [channels, height, width]."""


def image_features(name: str, shape: tuple[int, int, int]) -> nn.Module:
    """The features of a name in `IMAGE_FEATURES`, or of several that are joined by `+`, for images of `shape`.

    Raises:
        ModelError: A part of the name is unknown, or occurs twice.
    """
    names = name.split("+")
    for each in names:
        if each not in IMAGE_FEATURES:
            raise ModelError(
                f"model: {name!r} joins {each!r}, but + joins fixed features of images: {', '.join(IMAGE_FEATURES)}"
            )
        if names.count(each) > 1:
            raise ModelError(f"model: {name!r} names {each} twice")
    parts = [IMAGE_FEATURES[each](shape) for each in names]
    return parts[0] if len(parts) == 1 else SideBySide(parts)
