"""A federation: clients as lists of record numbers into one shared training set, never copies of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedcdp.config.experiment import Missing, Scaling, TableTask
from fedcdp.data.dataset import Dataset
from fedcdp.errors import PlanError
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
        """Client c holds the next `sizes[c]` of `records`, shuffled: sorted ones would make batches of one class."""
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


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """A training set and the clients that hold it. `fedcdp.partition` makes one.

    Guarantees: a client never holds the same record twice. The dataset, the arguments of `partition` and its seed determine
    what a client holds and in which order, whichever clients are asked for, and when.

    Examples:
        >>> import fedcdp
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> federation.clients, federation.largest, federation.copies
        (10, 42, 1)
        >>> len(federation.indices(3))
        42
    """

    train: Dataset
    """The training set that the clients share out."""
    validation: Dataset | None
    """The server's validation set, if there is one. No ε protects it."""
    test: Dataset | None
    """The benchmark's test set, if there is one."""
    scheme: str
    """The scheme of `partition`."""
    sentence: str
    """How the records were dealt, in words."""
    holdings: Holdings
    """Which client holds which records."""
    names: tuple[str, ...] | None = None
    """The clients' names, if they have any."""
    validation_clients: Indices | None = None
    """The client of each validation record, if they came from clients."""

    def __post_init__(self) -> None:
        if self.names is not None and (len(self.names) != self.clients or len(set(self.names)) != len(self.names)):
            raise PlanError(
                f"names: {len(self.names)} names for {self.clients} clients; each client needs a name of its own"
            )

    @property
    def clients(self) -> int:
        """The number of clients, K in the paper."""
        return self.holdings.clients

    @property
    def copies(self) -> int:
        """The largest number of clients that may hold the same record; 1 means that no two clients share one."""
        return self.holdings.copies

    @property
    def largest(self) -> int:
        """Records at the client that holds the most."""
        return self.holdings.largest

    @property
    def smallest(self) -> int:
        """Records at the client that holds the fewest."""
        return self.holdings.smallest

    def sizes(self, clients: npt.ArrayLike) -> Indices:
        """The number of records at each of `clients`."""
        return self.holdings.sizes(self._existing(clients))

    def indices(self, client: int) -> Indices:
        """The record numbers of one client, in its fixed order, which is shuffled so its classes are mixed throughout."""
        table, sizes = self.table([client])
        return table[0, : sizes[0]]

    def table(self, clients: npt.ArrayLike) -> tuple[Indices, Indices]:
        """The record numbers of k clients [k, largest], and how many of each row are valid [k].

        A row lists the records in the client's fixed order, then repeats the client's own first record as padding.
        """
        existing = self._existing(clients)
        return self.holdings.table(existing), self.holdings.sizes(existing)

    def name(self, client: int) -> str:
        """What a client is called: its own name, or `client 3`."""
        (known,) = self._existing([client])
        return f"client {known}" if self.names is None else self.names[known]

    def describe(self) -> str:
        """The federation in one sentence."""
        clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
        spread = "" if self.smallest == self.largest else f"{self.smallest} to "
        records = "1 record" if self.largest == 1 else f"{spread}{self.largest} records"
        stored = "one client at most" if self.copies == 1 else f"up to {self.copies} clients"
        return f"{clients} × {records}, {self.sentence}, each record stored at {stored}"

    def __repr__(self) -> str:
        return f"<Federation: {self.describe()}>"

    def _existing(self, clients: npt.ArrayLike) -> Indices:
        asked = np.asarray(clients, dtype=np.int64)
        outside = asked[(asked < 0) | (asked >= self.clients)]
        if len(outside):
            raise PlanError(f"client {outside[0]} does not exist: clients are numbered 0 to {self.clients - 1}")
        return asked

    @staticmethod
    def from_frame(
        frame: Any,
        *,
        client: str,
        label: str | Sequence[str],
        task: TableTask = "classification",
        drop: str | Sequence[str] | None = None,
        categories: str | Mapping[str, Sequence[Any]] | None = None,
        ranges: Mapping[str, Sequence[float]] | None = None,
        columns: Path | str | None = None,
        classes: str | Sequence[Any] | None = None,
        missing: Missing = "refuse",
        scaling: Scaling | None = None,
        validation_fraction: float = 0.2,
        split_seed: int = 0,
        seed: int = 0,
    ) -> Federation:
        """Make a federation of a pandas data frame with a column that names the client of each record.

        Args:
            frame: A data frame, or a mapping of column names to arrays.
            client: The column of client names. Names are kept; clients are numbered by name.
            label: The label column, or several for `multilabel` and `regression`.
            task: What is predicted.
            drop: Columns that are not used.
            categories: The public categories of text columns, such as `{"sex": ["f", "m"]}`.
            ranges: The public ranges of numbers, such as `{"age": (0, 110)}`; see `load_file`.
            columns: A TOML file with categories and ranges.
            classes: The classes in order. Default: the distinct labels, which is public.
            missing: `refuse` missing values, or add an `indicator` input for every input column.
            scaling: `public`, or `training` (which no ε covers); see `load_file`.
            validation_fraction: Share of each client's records that is held out. No ε protects these records.
            split_seed: Fixes which records are held out.
            seed: Fixes the order of each client's records.

        Returns:
            The clients and what each holds, with their names.

        Raises:
            DataError: The frame is not of this form. The message names the record and column, but never quotes a value.
            PlanError: An argument is not allowed, or contradicts another.

        Examples:
            >>> import fedcdp
            >>> made_up = {"ward": list("ABAB") * 25, "age": range(100), "readmitted": [0, 0, 1, 1] * 25}
            >>> federation = fedcdp.Federation.from_frame(
            ...     made_up, client="ward", label="readmitted", task="binary", ranges={"age": (0, 110)}
            ... )
            >>> federation
            <Federation: 2 clients × 40 records, clients as given, each record stored at one client at most>
            >>> federation.names
            ('A', 'B')
        """
        from fedcdp.data.own_files import splits_of_frame
        from fedcdp.data.table_rules import column_rules

        rules = column_rules(
            client=client, label=label, drop=drop, task=task, categories=categories, ranges=ranges, columns=columns,
            classes=classes, missing=missing,
        )  # fmt: skip
        splits = splits_of_frame(frame, rules, scaling, split_seed, validation_fraction)
        assert splits.owners is not None
        return natural(
            splits.train, splits.owners, splits.owner_names, seed=seed, validation=splits.validation,
            validation_owners=splits.validation_owners,
        )  # fmt: skip


def natural(
    train: Dataset,
    owners: Indices,
    names: tuple[str, ...] | None,
    *,
    seed: int,
    validation: Dataset | None = None,
    validation_owners: Indices | None = None,
    test: Dataset | None = None,
) -> Federation:
    """The federation in which each record stays with its owner."""
    clients = len(names) if names is not None else int(owners.max()) + 1
    if owners.min() < 0 or owners.max() >= clients:
        raise PlanError(f"owners is from {owners.min()} to {owners.max()}: clients are numbered 0 to {clients - 1}")
    sizes = np.bincount(owners, minlength=clients)
    if not sizes.all():
        without = int(np.argmin(sizes))
        raise PlanError(f"client {without if names is None else repr(names[without])} has no training record")
    return Federation(
        train,
        validation,
        test,
        "natural",
        sentence="clients as given",
        holdings=Listed.shuffled(np.argsort(owners, kind="stable"), sizes, seed),
        names=names,
        validation_clients=validation_owners,
    )
