"""Readers: a source of any kind as its number of records and their blocks of values, in order.

Optional packages are not imported: a Hugging Face dataset and a pandas DataFrame are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import data as torch_data

from fedcdp.data.columns import FLOAT, Values, as_values
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError

LABELS = ("label", "labels", "target", "targets", "y", "class")
_PIECE = 1000

ColumnNames = str | Sequence[str] | None
Block = tuple[dict[str, Values] | Values, Values]
"""Inputs and targets of some consecutive records."""


@dataclass(frozen=True)
class Reader:
    """One source: what to call it, its number of records, and their blocks."""

    where: str
    count: int
    blocks: Callable[[], Iterator[Block]]

    def __post_init__(self) -> None:
        if not self.count:
            raise DataError(f"{self.where}: there are no records")


@dataclass(frozen=True)
class NamedColumns:
    """Which columns are inputs, and which are targets, as far as the caller says."""

    inputs: ColumnNames = None
    label: ColumnNames = None

    def chosen(self, names: Sequence[str], where: str) -> ChosenColumns:
        """The choice among the columns that there are."""
        label = self.label or next((name for name in LABELS if name in names), None)
        if label is None:
            raise DataError(f"{where}: no column is named {', '.join(LABELS[:-1])} or {LABELS[-1]}; name it with label=")
        targets = [label] if isinstance(label, str) else list(label)
        if self.inputs is None:
            inputs = [name for name in names if name not in targets]
        else:
            inputs = [self.inputs] if isinstance(self.inputs, str) else list(self.inputs)
        for name in [*inputs, *targets]:
            if name not in names:
                raise DataError(f"{where}: there is no column {name!r}; the columns are {', '.join(names)}")
        if not inputs:
            raise DataError(f"{where}: there is no column besides the label, so there are no inputs")
        alone = isinstance(self.inputs, str) or (self.inputs is None and len(inputs) == 1)
        return ChosenColumns(inputs, targets, alone, isinstance(label, str))


@dataclass(frozen=True)
class ChosenColumns:
    """The names of input and target columns; whether a single one of either stands for itself, not for a list of one."""

    inputs: list[str]
    targets: list[str]
    alone: bool
    one_target: bool

    @property
    def all(self) -> list[str]:
        """The columns to read."""
        return [*self.inputs, *self.targets]

    def block(self, columns: Mapping[str, Values]) -> Block:
        """Columns of single numbers as one table of floats, a column alone as the input, others by name."""
        first = columns[self.targets[0]]
        wanted = first if self.one_target else np.stack([columns[name] for name in self.targets], axis=1)
        given = {name: columns[name] for name in self.inputs}
        if all(values.ndim == 1 and values.dtype.kind in "fiub" for values in given.values()):
            with np.errstate(over="ignore"):
                return np.stack([values.astype(FLOAT) for values in given.values()], axis=1), wanted
        return given[self.inputs[0]] if self.alone else given, wanted


def reader_of(source: Any, named: NamedColumns, where: str) -> Reader:
    """How to read a source of any kind; `where` names it in messages."""
    if isinstance(source, torch_data.DataLoader):
        return _of_loader(source, named, where)
    if isinstance(source, torch_data.TensorDataset):
        return _of_tensors(source.tensors, named, where)
    if isinstance(source, Dataset):
        return _of_arrays(source.inputs, source.targets, where)
    if is_pair(source):
        inputs, targets = source
        return _of_arrays(inputs, targets, where)
    if hasattr(source, "column_names") and hasattr(source, "with_format"):
        return _of_hugging_face(source, named, where)
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        return _of_frame(source, named, where)
    if isinstance(source, Mapping):
        return _of_columns(source, named, where)
    rows = hasattr(type(source), "__getitem__") and not isinstance(source, str | bytes | np.ndarray | Tensor)
    if not rows or isinstance(source, torch_data.IterableDataset):
        raise DataError(
            f"{where}: {type(source).__name__} is not a dataset with numbered rows, nor a pair (inputs, targets); "
            "fedcdp.as_dataset lists what can be read"
        )
    return _of_rows(source, named, where)


def is_pair(source: Any) -> bool:
    """Whether a source is a pair (inputs, targets) rather than two rows: a tuple, or a list of two arrays."""
    arrays = isinstance(source, list) and all(isinstance(each, np.ndarray | Tensor) for each in source)
    return (isinstance(source, tuple) or arrays) and len(source) == 2


def _of_arrays(inputs: Any, targets: Any, where: str) -> Reader:
    """Whole arrays as a single block."""
    wanted = as_values(targets, f"{where}: the targets array", 0)
    given: dict[str, Values] | Values
    if isinstance(inputs, Mapping):
        given = {str(name): as_values(each, f"{where}: the input {name!r}", 0) for name, each in inputs.items()}
    else:
        given = as_values(inputs, f"{where}: the inputs array", 0)
    lengths = {len(values) for values in (given.values() if isinstance(given, dict) else [given])}
    if lengths != {len(wanted)}:
        found = " or ".join(map(str, sorted(lengths)))
        raise DataError(f"{where}: {found or 'no'} inputs but {len(wanted)} targets: each example needs one target")
    return Reader(where, len(wanted), lambda: iter([(given, wanted)]))


def _of_tensors(tensors: Sequence[Tensor], named: NamedColumns, where: str) -> Reader:
    """The tensors of a TensorDataset: the last one is the target."""
    *inputs, targets = tensors
    names = named.inputs
    if len(inputs) == 1 and (names is None or isinstance(names, str)):
        return _of_arrays(inputs[0], targets, where)
    if names is None or isinstance(names, str) or len(names) != len(inputs) or not inputs:
        raise DataError(
            f"{where}: a TensorDataset of {len(tensors)} tensors; the last one is the target, and inputs= must name those "
            "before it"
        )
    return _of_arrays(dict(zip(names, inputs, strict=True)), targets, where)


def _of_loader(loader: torch_data.DataLoader[Any], named: NamedColumns, where: str) -> Reader:
    """All records of a DataLoader's dataset, in the dataset's order."""
    rows: Any = loader.dataset
    sampler: Any = loader.sampler
    if isinstance(rows, torch_data.IterableDataset):
        raise DataError(f"{where}: a DataLoader of an IterableDataset has no numbered rows; use a map-style dataset")
    shuffled = type(sampler) is torch_data.RandomSampler and not sampler.replacement and sampler.num_samples == len(rows)
    every = shuffled or type(sampler) is torch_data.SequentialSampler
    if not every or type(loader.batch_sampler) not in (torch_data.BatchSampler, type(None)):
        chooses = type(loader.batch_sampler if every else sampler).__name__
        raise DataError(
            f"{where}: the DataLoader's {chooses} selects or repeats records; use a torch.utils.data.Subset that holds the "
            "records of the client"
        )
    if loader.collate_fn in (torch_data.default_collate, torch_data.default_convert):
        return reader_of(rows, named, where)
    try:
        batch = loader.collate_fn([rows[row] for row in range(len(rows))])
    except Exception as error:  # of the user's own function; its message may hold private values
        raise DataError(f"{where}: the DataLoader's collate_fn fails on all rows ({type(error).__name__})") from None
    return reader_of(batch if isinstance(batch, Mapping) else tuple(batch), named, where)


def _of_rows(source: Any, named: NamedColumns, where: str) -> Reader:
    """Rows by number: pairs, or dictionaries."""
    try:
        count = len(source)
    except (TypeError, NotImplementedError):
        raise DataError(f"{where}: {type(source).__name__} has no length, so its rows cannot be numbered") from None
    return Reader(where, count, lambda: (_row(source, row, named, f"{where}, row {row}") for row in range(count)))


def _row(source: Any, row: int, named: NamedColumns, where: str) -> Block:
    try:
        found = source[row]
    except Exception as error:  # of the user's own dataset; its message may hold private values
        raise DataError(f"{where} cannot be read ({type(error).__name__})") from None
    if isinstance(found, Mapping):
        chosen = named.chosen([str(name) for name in found], where)
        return chosen.block({name: as_values(found[name], f"{where}: {name!r}")[None] for name in chosen.all})
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise DataError(f"{where} is neither a pair (input, target) nor a dictionary")
    given, target = found
    wanted = as_values(target, f"{where}: the target")[None]
    if isinstance(given, Mapping):
        return {str(name): as_values(each, f"{where}: the input {name!r}")[None] for name, each in given.items()}, wanted
    return as_values(given, f"{where}: the input")[None], wanted


def _of_columns(source: Mapping[Any, Any], named: NamedColumns, where: str) -> Reader:
    """A dictionary of whole columns."""
    known = {str(name): values for name, values in source.items()}
    chosen = named.chosen(list(known), where)
    columns = {name: as_values(known[name], f"{where}: the column {name!r}", 0) for name in chosen.all}
    if len({len(values) for values in columns.values()}) > 1:
        raise DataError(f"{where}: the columns {', '.join(chosen.all)} differ in their number of rows")
    count = len(columns[chosen.inputs[0]])
    # A table is put together from its columns in pieces, because that takes memory of its own.
    step = _PIECE if all(columns[name].ndim == 1 for name in chosen.inputs) else max(count, 1)
    pieces = range(0, count, step)
    return Reader(
        where,
        count,
        lambda: (chosen.block({name: each[start : start + step] for name, each in columns.items()}) for start in pieces),
    )


def _of_frame(frame: Any, named: NamedColumns, where: str) -> Reader:
    """A pandas DataFrame of numbers."""
    return _of_columns({name: frame[name].to_numpy() for name in frame.columns}, named, where)


def _of_hugging_face(source: Any, named: NamedColumns, where: str) -> Reader:
    """A Hugging Face dataset, read a piece at a time; row by row if it has a transform, which makes the rows."""
    if isinstance(source.column_names, Mapping):
        raise DataError(f"{where}: it has the splits {', '.join(source.column_names)}; choose one of them")
    if not hasattr(type(source), "__len__"):
        raise DataError(f"{where}: {type(source).__name__} has no length; load it without streaming")
    if getattr(source, "format", {}).get("type") == "custom":
        return _of_rows(source, named, where)
    chosen = named.chosen(list(source.column_names), where)
    values = source.with_format("numpy", columns=chosen.all)

    def blocks() -> Iterator[Block]:
        for start in range(0, len(source), _PIECE):
            piece = values[start : start + _PIECE]
            yield chosen.block({name: as_values(piece[name], f"{where}: the column {name!r}", start) for name in chosen.all})

    return Reader(where, len(source), blocks)
