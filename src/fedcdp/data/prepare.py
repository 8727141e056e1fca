"""From raw arrays to splits: seeded cuts into training and validation records, and scaling of their values.

Every cut depends on the seed, the number of records and (where stratified) their labels, nothing else. The random
order sorts raw 64-bit words of NumPy's Philox generator: unlike `Generator.permutation`, NumPy promises that these
never change between versions, so a seed names the same split for good. Scaling maps pixels to [0, 1], or standardises by
training statistics alone, or divides by fixed constants.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.errors import DataError

Indices = NDArray[np.int64]


def seeded_order(count: int, seed: int) -> Indices:
    """A uniformly random order of `count` records, the same for the same seed everywhere."""
    if seed < 0:
        raise DataError(f"split_seed is {seed}: it must be 0 or more")
    return np.argsort(np.random.Philox(seed).random_raw(count), kind="stable").astype(np.int64)


def random_split(count: int, validation_count: int, seed: int) -> tuple[Indices, Indices]:
    """Training and validation indices: disjoint, together all `count`, each in random order."""
    _check_sizes(count, validation_count)
    order = seeded_order(count, seed)
    return order[: count - validation_count], order[count - validation_count :]


def stratified_split(labels: NDArray[np.int64], validation_count: int, seed: int) -> tuple[Indices, Indices]:
    """As `random_split`, with each class shared out in proportion, to within one record.

    Rounding up falls first to classes that keep a training record, so every class has one unless there are too many
    classes of a single record.
    """
    _check_sizes(len(labels), validation_count)
    order = seeded_order(len(labels), seed)
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    quota = _validation_quota(sizes, validation_count)
    # A record's rank among those of its class, in random order: the first `quota` of a class are for validation.
    by_class = order[np.argsort(classes[order], kind="stable")]
    rank = np.empty_like(order)
    rank[by_class] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = (rank < quota[classes])[order]
    return order[~chosen], order[chosen]


def _validation_quota(sizes: NDArray[np.int64], validation_count: int) -> NDArray[np.int64]:
    """Validation records of each class: the proportional share rounded down, then by largest remainder."""
    shares, remainders = np.divmod(sizes * validation_count, sizes.sum())
    last_of_class = shares + 1 == sizes
    extra = validation_count - shares.sum()
    shares[np.lexsort((-remainders, last_of_class))[:extra]] += 1
    return np.asarray(shares, dtype=np.int64)


def _check_sizes(count: int, validation_count: int) -> None:
    if not 0 < validation_count < count:
        raise DataError(f"{validation_count} of {count} records for validation: both sides need at least one record")


PIXELS_TO_UNIT = "pixels divided by 255, so inputs lie in [0, 1]; no statistics of the data are used"


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
