"""Seeded cuts into training and validation records.

Every cut depends on the seed, the number of records and (where stratified) their labels, nothing else. The random
order sorts raw 64-bit words of NumPy's Philox generator: unlike `Generator.permutation`, NumPy promises that these
never change between versions, so a seed names the same split for good.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
