"""Holdings: which client holds which records, dealt when asked for or listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedcdp.mechanism.randomness import numpy_generator

Indices = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]

CACHE_BYTES = 256 * 2**20


class Holdings(Protocol):
    """Which client holds which records. `sizes` and `table` are called only for clients that exist."""

    @property
    def clients(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def largest(self) -> int: ...
    @property
    def smallest(self) -> int: ...

    def sizes(self, clients: Indices) -> Indices: ...
    def table(self, clients: Indices) -> Indices: ...


@dataclass(frozen=True, eq=False)
class Dealt:
    """Equal holdings, dealt one copy at a time and only when a client of that copy is requested.

    A copy is one fresh deal of the dataset among `per_copy` clients, so client c belongs to copy c // per_copy.
    `deal(copy)` returns that copy's record numbers [per_copy, records] and must depend on nothing but `copy`. The most
    recently used copies are cached in at most CACHE_BYTES (or a single copy, if it alone is larger).
    """

    deal: Callable[[int], Rows]
    clients: int
    records: int
    per_copy: int

    @property
    def copies(self) -> int:
        return -(-self.clients // self.per_copy)

    @property
    def largest(self) -> int:
        return self.records

    @property
    def smallest(self) -> int:
        return self.records

    def sizes(self, clients: Indices) -> Indices:
        return np.full(len(clients), self.records, dtype=np.int64)

    def table(self, clients: Indices) -> Indices:
        table = np.empty((len(clients), self.records), dtype=np.int64)
        copies, seats = np.divmod(clients, self.per_copy)
        for copy in np.unique(copies).tolist():
            asked = np.flatnonzero(copies == copy)
            table[asked] = self._copy(copy)[seats[asked]]
        return table

    @cached_property
    def _copy(self) -> Callable[[int], Rows]:
        # All copies have the same size, so bounding their number bounds their bytes.
        size = self.per_copy * self.records * np.dtype(np.int32).itemsize
        return lru_cache(maxsize=max(1, CACHE_BYTES // size))(self.deal)

    def __reduce__(self) -> tuple[Any, ...]:
        # The cache cannot be pickled and is not needed: the other process deals again, with the same result.
        return Dealt, (self.deal, self.clients, self.records, self.per_copy)


@dataclass(frozen=True, eq=False)
class Listed:
    """Explicitly listed holdings: client c holds `records[starts[c] : starts[c + 1]]`."""

    records: Indices
    starts: Indices

    @staticmethod
    def shuffled(records: Indices, sizes: Indices, seed: int) -> Listed:
        """Client c holds the next `sizes[c]` of `records`, shuffled: sorted by class, batches would have one class."""
        owners = np.repeat(np.arange(len(sizes)), sizes)
        order = numpy_generator(int(seed), "partition", 0).permutation(len(owners))
        order = order[np.argsort(owners[order], kind="stable")]
        return Listed(records.astype(np.int64)[order], np.concatenate([[0], np.cumsum(sizes)]))

    @property
    def clients(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def copies(self) -> int:
        return int(np.bincount(self.records).max())

    @cached_property
    def largest(self) -> int:
        return int(np.diff(self.starts).max())

    @cached_property
    def smallest(self) -> int:
        return int(np.diff(self.starts).min())

    def sizes(self, clients: Indices) -> Indices:
        return self.starts[clients + 1] - self.starts[clients]

    def table(self, clients: Indices) -> Indices:
        steps = np.arange(self.largest)
        steps = np.where(steps < self.sizes(clients)[:, None], steps, 0)
        table: Indices = self.records[self.starts[clients][:, None] + steps]
        return table
