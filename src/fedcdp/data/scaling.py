"""From raw values to inputs: pixels to [0, 1], standardisation by training statistics alone, scaling by fixed constants."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIXELS_TO_UNIT = "pixels divided by 255, so inputs lie in [0, 1]; no statistics of the data are used"


Scaling = Literal["training", "public"]
"""What scales a table's columns: statistics of the training split, which no ε covers, or constants fixed beforehand."""


def unit_pixels(images: NDArray[np.uint8]) -> Tensor:
    """Bytes 0 to 255 as float32 in [0, 1]; the shape stays."""
    return torch.from_numpy(np.array(images, order="C")).to(torch.float32).div_(255)


def standardise(
    train: NDArray[np.floating], validation: NDArray[np.floating]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Both arrays less the mean and over the deviation of `train`, for each entry of axis 1 (a feature, a channel).

    Guarantees: `validation` has no influence on the training result. A feature that is constant in training is
    centred but not scaled.
    """
    axes = (0, *range(2, train.ndim))
    mean = train.mean(axis=axes, dtype=np.float64, keepdims=True)
    deviation = train.std(axis=axes, dtype=np.float64, keepdims=True)
    # Rounding gives a constant feature a deviation that is tiny rather than zero, and dividing by it would blow up.
    deviation[deviation <= 1e-12 * np.abs(mean)] = 1.0
    return ((train - mean) / deviation).astype(np.float32), ((validation - mean) / deviation).astype(np.float32)


def logarithmic(values: NDArray[np.floating], ranges: NDArray[np.floating]) -> NDArray[np.float32]:
    """Each column of `values` on a logarithmic scale on which its range [low, high], given beforehand, is −1 to 1.

    A thirtieth of `high` is added first, so that 0 has a logarithm and what is small is not torn apart.
    """
    low, high = ranges.T
    floor = high / 30
    bottom, top = np.log(low + floor), np.log(high + floor)
    scaled: NDArray[np.float32] = ((2 * np.log(values + floor) - bottom - top) / (top - bottom)).astype(np.float32)
    return scaled
