"""A federation: clients as lists of record numbers into one shared training set, never copies of the data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcdp.config.arguments import checked
from fedcdp.config.experiment import Missing, Scaling, TableTask
from fedcdp.data.dataset import Dataset
from fedcdp.data.holdings import Holdings, Indices, Listed
from fedcdp.data.sources import as_dataset, hold_out, join_clients
from fedcdp.data.tasks import TaskName
from fedcdp.errors import DataError, PlanError

LONGEST_NAME = 100


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """A training set and the clients that hold it. `fedcdp.partition`, `from_datasets` and `from_frame` make one.

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
        if self.names is not None:
            if len(self.names) != self.clients or len(set(self.names)) != len(self.names):
                raise PlanError(
                    f"names: {len(self.names)} names for {self.clients} clients; each client needs a name of its own"
                )
            _check_names(self.names)

    @classmethod
    @checked
    def from_datasets(
        cls,
        datasets: Mapping[str, Any],
        *,
        task: TaskName | None = None,
        classes: int | Sequence[str] = 0,
        inputs: str | Sequence[str] | None = None,
        label: str | Sequence[str] | None = None,
        validation: Any = None,
        validation_fraction: float = 0.2,
        split_seed: int = 0,
        seed: int = 0,
    ) -> Federation:
        """Make a federation of named clients, each with a dataset of its own, of any size.

        `fedcdp.as_dataset` lists the kinds of datasets. All clients' records are joined in one dataset: each is copied once.

        Args:
            datasets: The clients' datasets by name.
            task: What is predicted. Default: the task of a `fedcdp.Dataset`, else classification.
            classes: The number of classes, or their names in order if labels are text. Default: the largest label + 1.
            inputs: The columns to use as inputs, where records have named columns. Default: all but the label.
            label: The label column, where records have named columns. Default: `label`, `labels`, `target`, …
            validation: Examples for the server: a dataset, or for some clients one each, by name. No ε protects them.
                Default: records of the clients.
            validation_fraction: Share of each client's records that become validation examples if `validation` is not
                given; 0: none. No ε protects them.
            split_seed: Fixes which records are held out.
            seed: Fixes the order of a client's records.

        Returns:
            The federation. `names` has the clients' names, in the order of `datasets`.

        Raises:
            DataError: A record cannot be read, or differs from the others in shape. The message names client and row.
            PlanError: A name or another argument is not allowed.

        Examples:
            >>> import fedcdp, torch
            >>> def site(rows):
            ...     return torch.utils.data.TensorDataset(torch.rand(rows, 4), torch.arange(rows) % 2)
            >>> federation = fedcdp.Federation.from_datasets({"charite": site(400), "jena": site(50)})
            >>> federation
            <Federation: 2 clients × 40 to 320 records, clients as given, each row taken as another person's>
            >>> federation.name(1), len(federation.validation)
            ('jena', 90)
        """
        if not isinstance(datasets, Mapping) or not datasets:
            raise PlanError("datasets: it must be a dictionary with the dataset of each client by its name")
        names = tuple(datasets)
        _check_names(names)
        for first, second in itertools.combinations(names, 2):
            if datasets[first] is datasets[second]:
                raise PlanError(
                    f"datasets: {first} and {second} have the same dataset, whose records would count as different people; "
                    "use partition with scheme 'full', which counts copies"
                )
        train, sizes = join_clients(datasets, task=task, classes=classes, inputs=inputs, label=label)
        owners = np.repeat(np.arange(len(names)), sizes)
        held, held_owners = None, None
        options: dict[str, Any] = {"task": train.task, "classes": classes or train.classes, "inputs": inputs, "label": label}
        if validation is None:
            if not 0 <= validation_fraction < 1:
                raise PlanError(f"validation_fraction is {validation_fraction}: it must be 0 or more, and below 1")
            if validation_fraction:
                train, held, owners, held_owners = hold_out(train, owners, fraction=validation_fraction, seed=split_seed)
        elif isinstance(validation, Mapping) and validation and set(validation) <= set(names):
            held, sizes = join_clients(validation, **options)
            held_owners = np.repeat([names.index(name) for name in validation], sizes)
        else:
            held = as_dataset(validation, **options)
        if held is not None and (held.task, held.shape) != (train.task, train.shape):
            raise DataError(
                f"validation: inputs of shape {held.shape} for task {held.task}, but clients hold inputs of shape "
                f"{train.shape} for task {train.task}"
            )
        return natural(train, owners, names, seed=seed, validation=held, validation_owners=held_owners)

    @staticmethod
    @checked
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
            <Federation: 2 clients × 40 records, clients as given, each row taken as another person's>
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
        stored = (
            "each record stored at one client at most"
            if self.copies == 1
            else f"each record stored at up to {self.copies} clients"
        )
        if self.scheme == "natural":
            stored = "each row taken as another person's"
        return f"{clients} × {records}, {self.sentence}, {stored}"

    def __repr__(self) -> str:
        return f"<Federation: {self.describe()}>"

    def _existing(self, clients: npt.ArrayLike) -> Indices:
        asked = np.asarray(clients, dtype=np.int64)
        outside = asked[(asked < 0) | (asked >= self.clients)]
        if len(outside):
            raise PlanError(f"client {outside[0]} does not exist: clients are numbered 0 to {self.clients - 1}")
        return asked


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


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            raise PlanError(
                f"names: {str(name)[:LONGEST_NAME]!r} cannot be a client's name, which is a string of 1 to {LONGEST_NAME} "
                "printable characters"
            )
