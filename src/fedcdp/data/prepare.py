"""From raw arrays to splits: seeded cuts into training and validation records, and scaling of their values.

Every cut depends only on the seed, the number of records and (if stratified) their labels. The random order sorts raw
64-bit words of NumPy's Philox generator. NumPy promises that these, unlike `Generator.permutation`, never change between
versions, so a seed permanently names the same split. Scaling maps pixels to [0, 1], or standardises by training statistics
alone, or divides by fixed constants.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.errors import DataError

Indices = NDArray[np.int64]


def seeded_order(count: int, seed: int) -> Indices:
    """A uniformly random order of `count` records; a seed gives the same order everywhere."""
    if seed < 0:
        raise DataError(f"split_seed is {seed}: it must be 0 or more")
    return np.argsort(np.random.Philox(seed).random_raw(count), kind="stable").astype(np.int64)


def random_split(count: int, validation_count: int, seed: int) -> tuple[Indices, Indices]:
    """Training and validation indices: disjoint, together all `count`, each in random order."""
    _check_sizes(count, validation_count)
    order = seeded_order(count, seed)
    return order[: count - validation_count], order[count - validation_count :]


def stratified_split(labels: NDArray[np.int64], validation_count: int, seed: int) -> tuple[Indices, Indices]:
    """Like `random_split`, with each class split in proportion, to within one record.

    Shares are rounded up first for classes that keep a training record, so every class has one unless there are too many
    classes with a single record.
    """
    _check_sizes(len(labels), validation_count)
    order = seeded_order(len(labels), seed)
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return _cut(order, classes, sizes, _validation_quota(sizes, validation_count))


def split_within_clients(owners: Indices, labels: Indices | None, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Training and validation indices: each client's records in proportion and, if there are labels, its classes too.

    Each client keeps at least one training record, so a client with one record has none for validation.
    """
    order = seeded_order(len(owners), seed)
    per_client = np.bincount(owners)
    wanted = max(1, round(len(owners) * fraction))
    held_out = np.minimum(_validation_quota(per_client, wanted), per_client - 1)
    if not held_out.sum():
        raise DataError("each client has a single record: none can be held out for validation")
    kinds = 1 if labels is None else int(labels.max()) + 1
    pairs, groups, sizes = np.unique(
        owners * kinds + (0 if labels is None else labels), return_inverse=True, return_counts=True
    )
    of_client = np.split(sizes, np.searchsorted(pairs // kinds, np.arange(1, len(per_client))))
    quota = np.concatenate([_validation_quota(*each) for each in zip(of_client, held_out.tolist(), strict=True)])
    return _cut(order, groups, sizes, quota)


def _cut(order: Indices, groups: Indices, sizes: Indices, quota: Indices) -> tuple[Indices, Indices]:
    """Cut each group: the first `quota` of its records, in random order, are for validation."""
    by_group = order[np.argsort(groups[order], kind="stable")]
    rank = np.empty_like(order)
    rank[by_group] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = (rank < quota[groups])[order]
    return order[~chosen], order[chosen]


def _validation_quota(sizes: NDArray[np.int64], validation_count: int) -> NDArray[np.int64]:
    """The number of validation records of each class: the proportional share rounded down, then by largest remainder."""
    shares, remainders = np.divmod(sizes * validation_count, sizes.sum())
    last_of_class = shares + 1 == sizes
    extra = validation_count - shares.sum()
    shares[np.lexsort((-remainders, last_of_class))[:extra]] += 1
    return np.asarray(shares, dtype=np.int64)


def _check_sizes(count: int, validation_count: int) -> None:
    if not 0 < validation_count < count:
        raise DataError(f"{validation_count} of {count} records for validation: both sides need at least one record")


PIXELS_TO_UNIT = "pixels divided by 255, so inputs lie in [0, 1]; no statistics of the data are used"


"""The scaling of a table's columns: by statistics of the training split, which no ε covers, or by public constants."""


def unit_pixels(images: NDArray[np.uint8]) -> Tensor:
    """Bytes 0 to 255 as float32 in [0, 1], in the same shape."""
    return torch.from_numpy(np.array(images, order="C")).to(torch.float32).div_(255)


def standardise(
    train: NDArray[np.floating], validation: NDArray[np.floating]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Both arrays minus the mean and divided by the deviation of `train`, for each entry of axis 1 (a feature, a channel).

    Guarantees: `validation` has no influence on the training result. A feature that is constant in training is
    centred but not scaled. NaN stands for a missing value: it is left out of the statistics and stays NaN.
    """
    axes = (0, *range(2, train.ndim))
    known = ~np.isnan(train)
    everywhere = {} if known.all() else {"where": known | ~known.any(axis=axes, keepdims=True)}
    mean = train.mean(axis=axes, dtype=np.float64, keepdims=True, **everywhere)
    deviation = train.std(axis=axes, dtype=np.float64, keepdims=True, **everywhere)
    # Rounding gives a constant feature a tiny deviation rather than zero, and dividing by it would blow up.
    deviation[deviation <= 1e-12 * np.abs(mean)] = 1.0
    return ((train - mean) / deviation).astype(np.float32), ((validation - mean) / deviation).astype(np.float32)


def logarithmic(values: NDArray[np.floating], ranges: NDArray[np.floating]) -> NDArray[np.float32]:
    """Each column of `values` on a logarithmic scale that maps its range [low, high], given beforehand, to −1 to 1.

    A thirtieth of `high` is added first, so 0 has a logarithm and small values are not spread too far apart.
    """
    low, high = ranges.T
    floor = high / 30
    bottom, top = np.log(low + floor), np.log(high + floor)
    scaled: NDArray[np.float32] = ((2 * np.log(values + floor) - bottom - top) / (top - bottom)).astype(np.float32)
    return scaled
