"""A user's own data as a dataset: a `.csv`, `.parquet` or `.npz` file, or a data frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fedcdp.config.arguments import checked
from fedcdp.config.experiment import Missing, Scaling, TableTask
from fedcdp.data.array_files import npz_records
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.prepare import random_split, split_within_clients, stratified_split
from fedcdp.data.prepare import standardise as standardise_by_train
from fedcdp.data.table_columns import Columns
from fedcdp.data.table_files import read_csv, read_frame, read_parquet
from fedcdp.data.table_records import LabelledRecords, as_records
from fedcdp.data.table_rules import ColumnRules, column_rules
from fedcdp.data.table_schema import TableSchema
from fedcdp.errors import DataError, PlanError

SUFFIXES = (".npz", ".csv", ".parquet")


@checked
def load_file(
    path: Path | str,
    *,
    client: str | None = None,
    label: str | Sequence[str] | None = None,
    task: TableTask = "classification",
    drop: str | Sequence[str] | None = None,
    categories: str | Mapping[str, Sequence[Any]] | None = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    columns: Path | str | None = None,
    classes: str | Sequence[Any] | None = None,
    missing: Missing = "refuse",
    delimiter: str | None = None,
    scaling: Scaling | None = None,
    split_seed: int = 0,
    validation_fraction: float = 0.2,
    standardise: bool = False,
) -> Splits:
    """Load your own `.csv`, `.parquet` or `.npz` file and split it into training and validation records.

    | file | holds |
    | --- | --- |
    | `.csv` | a header row and one line for each record, in UTF-8. Cells are separated by commas, semicolons or tabs |
    | `.parquet` | the same as a Parquet file; needs `pip install "fedcdp[tables]"` |
    | `.npz` | two arrays: `x` and `y`, `inputs` and `targets`, `images` and `labels`, or `data` and `target` |

    A column is a number, or a category from a public list (`categories`), which becomes one input for each category and one
    for any other value. Categories, ranges and classes are public: they are stored with a run and shown. Without `classes`,
    the classes are the distinct labels in the file, which is public too: integers by value, strings alphabetically.

    In a `.npz` file, `client` and `label` name arrays; without an array of inputs, every other array is a column. Images
    [N, H, W] get a channel axis. Images [N, H, W, C] with 1 or 3 channels become [N, C, H, W], unless axis 1 already is 1 or
    3 long. Images of bytes are divided by 255.

    Args:
        path: The file.
        client: The column that names the client of each record. Clients are numbered by name: whole numbers by value,
            other names alphabetically.
        label: The label column, or several for `multilabel` and `regression`. Default: the column `label`, `target`, `y` or
            `class`, else the last one.
        task: `classification`, `binary` (two classes, the first is 0), `multilabel` (columns of 0 and 1) or `regression`.
        drop: Columns that are not used, such as record ids.
        categories: The categories of text columns: `{"sex": ["f", "m"]}` or `"sex=f|m"`.
        ranges: The public range of a number, which is mapped to [−1, 1]: `{"age": (0, 110)}`. Values outside are clipped. A
            range of a regression target is remembered, so results can be given in the target's unit.
        columns: A TOML file with a section for each column: `categories = [...]` or `range = [low, high]`.
        classes: The classes, in order: `["no", "yes"]` or `"no|yes"`. Other labels are refused.
        missing: What to do with an empty cell, NA, N/A, NaN or null: `refuse`, or `indicator`, which gives every input
            column an extra input that is 1 where its value is missing; its other inputs are then 0.
        delimiter: `comma`, `semicolon` or `tab`. Default: the one that the header line shows.
        scaling: `public` requires a range for every number. `training` standardises the other numbers (of images, each
            channel) by mean and deviation of the training split; no ε covers these statistics. Default: no scaling but by
            the ranges.
        split_seed: Fixes which records are held out. The split is random, with each client and each class in proportion;
            every client keeps a training record.
        validation_fraction: Share of the records held out for validation.
        standardise: An older name for `scaling="training"`.

    Returns:
        The training and validation split; there is no test set. With `client`, `fedcdp.partition` makes its clients of it.

    Raises:
        DataError: The file is missing, damaged, or not of this form. The message names the line and column, but never
            quotes a value.
        PlanError: An argument is not allowed, or contradicts another.

    Examples:
        >>> import fedcdp, pathlib
        >>> rows = [f"{'AB'[n % 2]};{40 + n};{'fm'[n % 3 > 0]};{n % 5 == 0}" for n in range(100)]
        >>> _ = pathlib.Path("made_up.csv").write_text("\\n".join(["ward;age;sex;readmitted", *rows]))
        >>> splits = fedcdp.load_file(
        ...     "made_up.csv", client="ward", label="readmitted", task="binary",
        ...     categories={"sex": ["f", "m"]}, ranges={"age": (0, 110)},
        ... )
        >>> len(splits.train), len(splits.validation), splits.train.shape
        (80, 20, (4,))
        >>> fedcdp.partition(splits).names
        ('A', 'B')
    """
    path = Path(path)
    rules = column_rules(
        client=client, label=label, drop=drop, task=task, categories=categories, ranges=ranges, columns=columns,
        classes=classes, missing=missing, delimiter=delimiter,
    )  # fmt: skip
    scaling = scaling_of(scaling, standardise)
    return split_records(read_records(path, rules), path.stem, scaling, split_seed, validation_fraction)


def splits_of_frame(
    frame: Any, rules: ColumnRules, scaling: Scaling | None, split_seed: int, validation_fraction: float
) -> Splits:
    """A data frame, split into training and validation records."""
    records = as_records(read_frame(frame, rules), rules)
    return split_records(records, "frame", scaling_of(scaling), split_seed, validation_fraction)


def scaling_of(scaling: Scaling | None, standardise: bool = False) -> Scaling | None:
    """The scaling that two arguments ask for; a `PlanError` where they contradict each other."""
    if scaling is not None and scaling not in get_args(Scaling):
        raise PlanError(f"scaling: {scaling!r} is not one of {', '.join(get_args(Scaling))}")
    if scaling == "private":
        raise PlanError(
            "scaling: private happens in training; load with scaling='public', and pass scale_inputs=True to simulate"
        )
    if standardise and scaling == "public":
        raise PlanError("scaling: public contradicts standardise, which means training")
    return "training" if standardise else scaling


def read_records(path: Path, rules: ColumnRules) -> LabelledRecords:
    """The records of a file, under the rules."""
    if _suffix(path) == ".npz":
        return npz_records(path, rules)
    return as_records(_read_table(path, rules), rules)


def split_records(
    records: LabelledRecords, name: str, scaling: Scaling | None, split_seed: int, validation_fraction: float
) -> Splits:
    """Hold out validation records, and scale the inputs."""
    total = len(records.targets)
    count = _validation_count(total, validation_fraction, name)
    labels = records.targets.numpy() if records.classes else None
    if records.owners is not None:
        train, validation = split_within_clients(records.owners, labels, validation_fraction, split_seed)
    elif labels is not None:
        train, validation = stratified_split(labels, count, split_seed)
    else:
        train, validation = random_split(total, count, split_seed)
    train_inputs, validation_inputs = records.inputs[train], records.inputs[validation]
    plain, description = records.plain, records.description
    if scaling == "public" and records.unscaled:
        raise DataError(f"scaling: public needs a range for every number, and {records.unscaled[0]!r} has none (--columns)")
    if scaling == "training" and plain.any():
        some = slice(None) if plain.all() else plain  # all: a sum over another layout in memory would be rounded otherwise
        train_inputs[:, some], validation_inputs[:, some] = standardise_by_train(
            train_inputs[:, some], validation_inputs[:, some]
        )
        description += (
            "; standardised by the mean and deviation of each feature or channel over the training data, "
            "statistics that are not covered by any ε"
        )
    owners = records.owners
    return Splits(
        name=name,
        train=records.dataset(train_inputs, train),
        validation=records.dataset(validation_inputs, validation),
        test=None,
        normalisation=description,
        owners=None if owners is None else owners[train],
        validation_owners=None if owners is None else owners[validation],
        owner_names=records.names,
        table=None if scaling == "training" else records.schema,
        rows=train,
    )


def read_client(path: Path, rules: ColumnRules, client: str | None = None) -> tuple[Dataset, TableSchema | None]:
    """The records of one deployed client, in the file's order, and what their columns mean.

    Nothing is computed from the file: numbers are scaled by public ranges only, and without `classes` labels are class
    numbers. With a client column, only the rows of `client` are read; without a name, the column must name one client.
    """
    records = read_records(path, replace(rules, class_numbers=True))
    chosen = np.arange(len(records.targets))
    if records.owners is not None and records.names is not None:
        if client is None and len(records.names) > 1:
            raise DataError(f"client: {path} names {len(records.names)} clients in {rules.client!r}; say which one this is")
        if client is not None and client not in records.names:
            raise DataError(f"client: {path} has no rows of {client!r} in its column {rules.client!r}")
        number = 0 if client is None else records.names.index(client)
        chosen = np.flatnonzero(records.owners == number)
    return records.dataset(records.inputs[chosen], chosen), records.schema


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    if not path.is_file():
        raise DataError(f"{path} does not exist or is not a file")
    return suffix


def _read_table(path: Path, rules: ColumnRules) -> Columns:
    return read_csv(path, rules) if _suffix(path) == ".csv" else read_parquet(path, rules)


def _validation_count(count: int, fraction: float, name: str) -> int:
    if not 0 < fraction < 1:
        raise DataError(f"validation_fraction is {fraction}: it must lie between 0 and 1")
    if count < 2:
        raise DataError(f"{name} holds {count} record: at least two are needed, one for each split")
    return min(max(round(count * fraction), 1), count - 1)
