"""Datasets of other kinds as a `Dataset`: PyTorch's, lists of rows, Hugging Face's, arrays, tables of numbers.

A source is read in blocks. All blocks of all sources are written into one array for each input, so that data are copied
once; arrays that already have the right type are not copied at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fedcdp.data.columns import Column, Values, as_values, numbered, targets_of
from fedcdp.data.dataset import Dataset
from fedcdp.data.prepare import Indices, stratified_split
from fedcdp.data.tasks import TaskName, task_called
from fedcdp.errors import DataError
from fedcdp.files.tree import Inputs, each_tensor

LABELS = ("label", "labels", "target", "targets", "y", "class")
_PIECE = 1000

Names = str | Sequence[str] | None
Block = tuple[dict[str, Values] | Values, Values]
"""Inputs and targets of some consecutive records."""


def as_dataset(
    source: Any,
    *,
    task: TaskName | None = None,
    classes: int | Sequence[str] = 0,
    inputs: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
) -> Dataset:
    """Read data of another kind as a `fedcdp.Dataset`.

    | source | records |
    | --- | --- |
    | `fedcdp.Dataset` | as they are |
    | a pair (inputs, targets) | NumPy arrays, tensors or lists; inputs may be a dictionary of these |
    | a dictionary of columns, or a pandas `DataFrame` of numbers | one column is the label, the others are inputs |
    | a Hugging Face `datasets.Dataset` | the same |
    | a list of rows, or a map-style `torch.utils.data.Dataset` | rows (input, target), or dictionaries that hold a label |
    | `torch.utils.data.TensorDataset` | two tensors; with more, the last is the target, and `inputs` names the others |
    | `torch.utils.data.DataLoader` | those of its dataset, in the dataset's order |

    Inputs: floats become float32, integers int64 (token ids), and images of bytes ([H, W] or [H, W, C]) become float32 from
    0 to 1 of shape [C, H, W]. Several columns of one number each are one table of floats. Other columns are passed to the
    network by name. All inputs must have one shape, so texts must be padded.

    A client holds records, not batches. So the batch size, shuffling and `drop_last` of a `DataLoader` have no effect, and a
    sampler that selects or repeats records is refused. A `collate_fn` of its own is called once, with all rows.

    Args:
        source: See the table.
        task: What is predicted. Default: the task of a `fedcdp.Dataset`, else classification.
        classes: The number of classes, or their names in order if labels are text. Default: the largest label + 1.
        inputs: The columns to use as inputs, where records have named columns. Default: all but the label.
        label: The label column (for several targets, a list), where records have named columns. Default: `label`, `labels`,
            `target`, `targets`, `y` or `class`, the first of these that there is.

    Returns:
        The dataset.

    Raises:
        DataError: A record cannot be read, or differs from the others in shape. The message names the row, counted from 0.

    Examples:
        >>> import fedcdp, numpy as np
        >>> rows = [{"input_ids": [5, 7, 0], "label": 1}, {"input_ids": [3, 2, 9], "label": 0}]
        >>> data = fedcdp.as_dataset(rows)
        >>> data.shape, data.inputs.dtype
        ((3,), torch.int64)
        >>> ages = fedcdp.as_dataset((np.ones((10, 4)), np.arange(10.0)), task="regression")
        >>> len(ages), ages.outputs
        (10, 1)
    """
    if isinstance(source, Dataset):
        _same_task(source, task, "the data")
        return source
    options = _Options(task, classes, inputs, label)
    return _join([_reader(source, options, "the data")], options, own=False)


def joined(
    sources: Mapping[str, Any],
    *,
    task: TaskName | None = None,
    classes: int | Sequence[str] = 0,
    inputs: Names = None,
    label: Names = None,
) -> tuple[Dataset, Indices]:
    """The data of all clients, one after the other, in memory of its own; and the number of records of each."""
    given = {name: source for name, source in sources.items() if isinstance(source, Dataset)}
    for name, source in given.items():
        task = _same_task(source, task, f"client {name!r}")
    if not classes:
        classes = max((source.classes for source in given.values()), default=0) if len(given) == len(sources) else 0
    options = _Options(task, classes, inputs, label)
    readers = [_reader(source, options, f"client {name!r}") for name, source in sources.items()]
    return _join(readers, options, own=True), np.array([reader.count for reader in readers])


def hold_out(
    data: Dataset, owners: Indices, names: Sequence[str], fraction: float, seed: int
) -> tuple[Dataset, Dataset, Indices, Indices]:
    """Split off validation records, in proportion for each client and class: both parts, and the owners of both.

    The training records are moved together within the memory of `data`, which must not be used afterwards.
    """
    strata = owners * data.classes + data.targets.numpy() if data.classes else owners
    count = min(max(round(len(data) * fraction), 1), len(data) - 1)
    train, validation = map(np.sort, stratified_split(strata, count, seed))
    without = np.flatnonzero(np.bincount(owners[train], minlength=len(names)) == 0)
    if len(without):
        raise DataError(
            f"client {names[without[0]]!r} would have no training record left: lower validation_fraction ({fraction}), or "
            "give validation examples"
        )
    held = data.take(torch.from_numpy(validation))

    def compact(values: Tensor) -> Tensor:
        for start in range(0, len(train), _PIECE):  # rows only move forward, so none is overwritten before it is moved
            rows = torch.from_numpy(train[start : start + _PIECE])
            values[start : start + len(rows)] = values[rows]
        return values[: len(train)]

    kept = replace(data, inputs=each_tensor(data.inputs, compact), targets=compact(data.targets))
    return kept, held, owners[train], owners[validation]


def is_pair(source: Any) -> bool:
    """Whether a source is a pair (inputs, targets) rather than two rows: a tuple, or a list of two arrays."""
    arrays = isinstance(source, list) and all(isinstance(each, np.ndarray | Tensor) for each in source)
    return (isinstance(source, tuple) or arrays) and len(source) == 2


@dataclass(frozen=True)
class _Options:
    task: TaskName | None
    classes: int | Sequence[str]
    inputs: Names
    label: Names

    @property
    def class_names(self) -> Sequence[str]:
        return () if isinstance(self.classes, int) else self.classes


@dataclass(frozen=True)
class _Reader:
    """One source: where it is from, its number of records, and their blocks. Errors of a block name rows."""

    where: str
    count: int
    blocks: Callable[[], Iterator[Block]]


def _same_task(source: Dataset, task: TaskName | None, where: str) -> TaskName:
    if task not in (None, source.task):
        raise DataError(f"{where} is a dataset for task {source.task}, not {task}")
    return source.task


def _join(readers: Sequence[_Reader], options: _Options, *, own: bool) -> Dataset:
    """One dataset of all records. `own`: in memory that no source shares."""
    task: TaskName = options.task or "classification"
    task_called(task)
    if isinstance(options.classes, str) or not all(isinstance(name, str) for name in options.class_names):
        raise DataError("classes: it must be the number of classes, or a list of their names")
    starts = np.cumsum([0] + [reader.count for reader in readers]).tolist()
    total = starts[-1]

    def locate(row: int) -> str:
        reader = bisect_right(starts, row) - 1
        return f"{readers[reader].where}, row {row - starts[reader]}"

    columns: dict[str | None, Column] = {}
    targets = Column("the target", total, locate, images=False, own=own)
    for reader, first in zip(readers, starts, strict=False):
        row = first
        for inputs, wanted in reader.blocks():
            named: dict[Any, Values] = inputs if isinstance(inputs, dict) else {None: inputs}
            if not columns:
                for name in named:
                    what = "the input" if name is None else f"the input {name!r}"
                    columns[name] = Column(what, total, locate, images=True, own=own)
            if set(named) != set(columns):
                raise DataError(f"{locate(row)}: {_listed(named)}, but the first row has {_listed(columns)}")
            for name, values in named.items():
                columns[name].write(row, values)
            targets.write(row, numbered(wanted, options.class_names, locate, row))
            row += len(wanted)
    classes = options.classes if isinstance(options.classes, int) else len(options.classes)
    classes = classes if task == "classification" else 0
    values = targets.values if task == "custom" and targets.values is not None else targets.finished()
    read = {name: torch.from_numpy(column.finished()) for name, column in columns.items()}
    alone = read.get(None)
    together: Inputs = {str(name): value for name, value in read.items()} if alone is None else alone
    return Dataset(together, targets_of(values, task, classes, locate), classes, task)


def _listed(columns: Mapping[Any, Any]) -> str:
    names = [str(name) for name in columns if name is not None]
    return f"inputs named {', '.join(names)}" if names else "an input without names"


def _reader(source: Any, options: _Options, where: str) -> _Reader:
    """How to read a source of any kind."""
    if isinstance(source, torch_data.DataLoader):
        return _loader(source, options, where)
    if isinstance(source, torch_data.TensorDataset):
        return _tensors(source.tensors, options, where)
    if isinstance(source, Dataset):
        return _pair(source.inputs, source.targets, where)
    if is_pair(source):
        return _pair(*source, where)
    if hasattr(source, "column_names") and hasattr(source, "with_format"):
        return _hugging_face(source, options, where)
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        return _frame(source, options, where)
    if isinstance(source, Mapping):
        return _columns(source, options, where)
    rows = isinstance(source, Sequence | torch_data.Dataset) or hasattr(type(source), "__getitem__")
    if isinstance(source, str | bytes | np.ndarray | Tensor | torch_data.IterableDataset) or not rows:
        raise DataError(
            f"{where}: {type(source).__name__} is not a dataset with numbered rows, nor a pair (inputs, targets); "
            "fedcdp.as_dataset lists what can be read"
        )
    try:
        count = len(source)
    except (TypeError, NotImplementedError):
        raise DataError(f"{where}: {type(source).__name__} has no length, so its rows cannot be numbered") from None
    return _Reader(where, _some(count, where), lambda: (_row(source, row, options, where) for row in range(count)))


def _some(count: int, where: str) -> int:
    if not count:
        raise DataError(f"{where}: there are no records")
    return count


def _pair(inputs: Any, targets: Any, where: str) -> _Reader:
    """Whole arrays as a single block."""
    wanted = as_values(targets, f"{where}: the targets array")
    named = (
        {str(name): as_values(each, f"{where}: the input {name!r}") for name, each in inputs.items()}
        if isinstance(inputs, Mapping)
        else as_values(inputs, f"{where}: the inputs array")
    )
    lengths = {values.shape[:1] for values in (*(named.values() if isinstance(named, dict) else [named]), wanted)}
    if len(lengths) > 1 or () in lengths:
        raise DataError(f"{where}: inputs and targets differ in their number of rows; each example needs one target")
    return _Reader(where, _some(len(wanted), where), lambda: iter([(named, wanted)]))


def _tensors(tensors: Sequence[Tensor], options: _Options, where: str) -> _Reader:
    """The tensors of a TensorDataset: the last one is the target."""
    *first, last = tensors
    names = options.inputs
    if len(first) == 1 and not isinstance(names, list | tuple):
        return _pair(first[0], last, where)
    if not isinstance(names, list | tuple) or len(names) != len(first):
        raise DataError(
            f"{where}: a TensorDataset of {len(tensors)} tensors; the last one is the target, and inputs= must name the "
            f"{len(first)} before it"
        )
    return _pair(dict(zip(names, first, strict=True)), last, where)


def _loader(loader: torch_data.DataLoader[Any], options: _Options, where: str) -> _Reader:
    """The records of a DataLoader's dataset; see `as_dataset`."""
    sampler, batches = loader.sampler, loader.batch_sampler
    shuffled = isinstance(sampler, torch_data.RandomSampler) and not sampler.replacement
    every = isinstance(sampler, torch_data.SequentialSampler) or (
        shuffled and sampler.num_samples == len(sampler.data_source)
    )
    if isinstance(loader.dataset, torch_data.IterableDataset):
        raise DataError(f"{where}: a DataLoader of an IterableDataset has no numbered rows; use a map-style dataset")
    if not every or (batches is not None and type(batches) is not torch_data.BatchSampler):
        raise DataError(
            f"{where}: a DataLoader with the sampler {type(batches if every else sampler).__name__} selects or repeats records; "
            "use a torch.utils.data.Subset with the records of this client"
        )
    if loader.collate_fn in (torch_data.default_collate, torch_data.default_convert):
        return _reader(loader.dataset, options, where)
    try:
        rows = [loader.dataset[row] for row in range(len(loader.dataset))]  # type: ignore[arg-type]
        batch = loader.collate_fn(rows)
    except Exception as error:
        raise DataError(
            f"{where}: the collate_fn fails on all {len(loader.dataset)} rows ({type(error).__name__})"
        ) from error  # type: ignore[arg-type]
    return _columns(batch, options, where) if isinstance(batch, Mapping) else _reader(tuple(batch), options, where)


def _row(source: Any, row: int, options: _Options, where: str) -> Block:
    """One row as a block."""
    at = f"{where}, row {row}"
    try:
        found = source[row]
    except Exception as error:  # of the user's own dataset; its message may hold private values
        raise DataError(f"{at} cannot be read ({type(error).__name__})") from error
    if isinstance(found, Mapping):
        values = {str(name): value for name, value in found.items()}
        picked, label = _choose(list(values), options, at)
        needed = [*picked, *([label] if isinstance(label, str) else label)]
        arrays = {name: as_values(values[name], f"{at}: the value {name!r}")[None] for name in needed}
        return _arranged(arrays, picked, label, options)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise DataError(f"{at} is no pair (input, target) and no dictionary")
    given, target = found
    wanted = as_values(target, f"{at}: the target")[None]
    if isinstance(given, Mapping):
        return {str(name): as_values(each, f"{at}: the input {name!r}")[None] for name, each in given.items()}, wanted
    return as_values(given, f"{at}: the input")[None], wanted


def _choose(names: Sequence[str], options: _Options, where: str) -> tuple[list[str], str | list[str]]:
    """The columns that are inputs, and the one (or those) that are targets."""
    label = options.label
    if label is None:
        label = next((name for name in LABELS if name in names), None)
        if label is None:
            raise DataError(f"{where}: no column is named {', '.join(LABELS[:-1])} or {LABELS[-1]}; name it with label=")
    chosen = label if isinstance(label, str) else list(label)
    targets = [chosen] if isinstance(chosen, str) else chosen
    picked = options.inputs
    inputs = (
        [picked]
        if isinstance(picked, str)
        else [name for name in names if name not in targets]
        if picked is None
        else list(picked)
    )
    for name in [*inputs, *targets]:
        if name not in names:
            raise DataError(f"{where}: there is no column {name!r}; the columns are {', '.join(names)}")
    if not inputs or not targets:
        raise DataError(f"{where}: there is no column for the {'targets' if inputs else 'inputs'}")
    return inputs, chosen


def _arranged(arrays: Mapping[str, Values], picked: list[str], label: str | list[str], options: _Options) -> Block:
    """Named columns as a block: columns of single numbers as one table, a column alone as one input, others by name."""
    wanted = arrays[label] if isinstance(label, str) else np.stack([arrays[name] for name in label], axis=1)
    alone = isinstance(options.inputs, str) or (options.inputs is None and len(picked) == 1)
    if alone and (arrays[picked[0]].ndim > 1 or arrays[picked[0]].dtype.kind in "US"):
        return arrays[picked[0]], wanted
    numbers = all(arrays[name].ndim == 1 and arrays[name].dtype.kind in "fiub" for name in picked)
    if numbers:
        return np.stack([arrays[name].astype(np.float32) for name in picked], axis=1), wanted
    return {name: arrays[name] for name in picked}, wanted


def _columns(source: Mapping[Any, Any], options: _Options, where: str) -> _Reader:
    """A dictionary of whole columns."""
    names = [str(name) for name in source]
    picked, label = _choose(names, options, where)
    needed = [*picked, *([label] if isinstance(label, str) else label)]
    arrays = {
        str(name): as_values(values, f"{where}: the column {name!r}")
        for name, values in source.items()
        if str(name) in needed
    }
    lengths = {values.shape[:1] for values in arrays.values()}
    if len(lengths) > 1 or () in lengths:
        raise DataError(f"{where}: the columns differ in their number of rows")
    count = _some(len(arrays[picked[0]]), where)
    table = all(arrays[name].ndim == 1 for name in picked)

    def blocks() -> Iterator[Block]:
        step = _PIECE if table else count
        for start in range(0, count, step):
            yield _arranged({name: each[start : start + step] for name, each in arrays.items()}, picked, label, options)

    return _Reader(where, count, blocks)


def _frame(frame: Any, options: _Options, where: str) -> _Reader:
    """A pandas DataFrame of numbers. `Federation.from_frame` reads categories and missing values."""
    return _columns({name: frame[name].to_numpy() for name in frame.columns}, options, where)


def _hugging_face(source: Any, options: _Options, where: str) -> _Reader:
    """A Hugging Face dataset, read a piece at a time."""
    if isinstance(source.column_names, Mapping):
        raise DataError(f"{where}: it has the splits {', '.join(source.column_names)}; choose one of them")
    if not hasattr(type(source), "__len__"):
        raise DataError(f"{where}: {type(source).__name__} has no length: load it without streaming")
    picked, label = _choose(list(source.column_names), options, where)
    needed = [*picked, *([label] if isinstance(label, str) else label)]
    values = source.with_format("numpy", columns=needed)
    count = _some(len(source), where)

    def blocks() -> Iterator[Block]:
        for start in range(0, count, _PIECE):
            piece, last = values[start : start + _PIECE], min(start + _PIECE, count) - 1
            rows = f"{where}, rows {start} to {last}"
            yield _arranged({name: as_values(piece[name], f"{rows}: {name!r}") for name in needed}, picked, label, options)

    return _Reader(where, count, blocks)
