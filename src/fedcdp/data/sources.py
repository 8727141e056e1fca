"""Datasets of other kinds as a `Dataset`: PyTorch's, lists of rows, Hugging Face's, arrays, tables of numbers.

A source is read in blocks. All blocks of all sources are written into one array for each input, so data are copied once;
an array that already has the right type is not copied at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcdp.config.arguments import checked
from fedcdp.data.columns import Column, Values, numbered, targets_of
from fedcdp.data.dataset import Dataset
from fedcdp.data.holdings import Indices
from fedcdp.data.prepare import split_within_clients
from fedcdp.data.readers import ColumnNames, NamedColumns, Reader, reader_of
from fedcdp.data.tasks import TaskName, task_called
from fedcdp.errors import DataError
from fedcdp.files.tree import Inputs, each_tensor

_PIECE = 1000


@checked
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
    network by name. All inputs must have one shape, so texts must be padded. Tensors on a GPU are read into main memory.

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
        _task_of(source, task, "the data")
        return source
    return _joined([reader_of(source, NamedColumns(inputs, label), "the data")], task, classes, own=False)


def join_clients(
    sources: Mapping[str, Any],
    *,
    task: TaskName | None = None,
    classes: int | Sequence[str] = 0,
    inputs: ColumnNames = None,
    label: ColumnNames = None,
) -> tuple[Dataset, Indices]:
    """The records of all clients, one client after the other, in memory of their own; and the number of each client's."""
    declared = 0
    for name, source in sources.items():
        if isinstance(source, Dataset):
            task = _task_of(source, task, f"client {name!r}")
            declared = max(declared, source.classes)
    readers = [reader_of(each, NamedColumns(inputs, label), f"client {name!r}") for name, each in sources.items()]
    data = _joined(readers, task, classes, own=True)
    if not classes and declared > data.classes:
        data = replace(data, classes=declared)
    ranges = {source.target_range if isinstance(source, Dataset) else None for source in sources.values()}
    if len(ranges) > 1:
        raise DataError("target_range differs between clients: scale the targets of all clients by one public range")
    data = replace(data, target_range=ranges.pop())
    return data, np.array([reader.count for reader in readers])


def hold_out(data: Dataset, owners: Indices, *, fraction: float, seed: int) -> tuple[Dataset, Dataset, Indices, Indices]:
    """Split off validation records, in proportion for each client and class: both parts, and the owners of both.

    The training records are moved together within the memory of `data`, which must not be used afterwards.
    """
    labels = data.targets.numpy() if data.task in ("classification", "binary") else None
    train, validation = map(np.sort, split_within_clients(owners, labels, fraction, seed))
    held = data.take(torch.from_numpy(validation))

    def compact(values: Tensor) -> Tensor:
        for start in range(0, len(train), _PIECE):  # rows only move forward, so none is overwritten before it is moved
            rows = torch.from_numpy(train[start : start + _PIECE])
            values[start : start + len(rows)] = values[rows]
        return values[: len(train)]

    kept = replace(data, inputs=each_tensor(data.inputs, compact), targets=compact(data.targets))
    return kept, held, owners[train], owners[validation]


def _task_of(source: Dataset, task: TaskName | None, where: str) -> TaskName:
    if task not in (None, source.task):
        raise DataError(f"{where} is a dataset for task {source.task}, not {task}")
    return source.task


def _joined(readers: Sequence[Reader], task: TaskName | None, classes: int | Sequence[str], *, own: bool) -> Dataset:
    """One dataset of all records. `own`: in memory that no source shares."""
    task = task_called(task or "classification").name
    names, classes = ((), classes) if isinstance(classes, int) else (list(classes), len(classes))
    starts = np.cumsum([0, *(reader.count for reader in readers)]).tolist()

    def locate(row: int) -> str:
        reader = bisect_right(starts, row) - 1
        return f"{readers[reader].where}, row {row - starts[reader]}"

    columns: dict[str | None, Column] = {}
    targets = Column("the target", starts[-1], locate, images=False, own=own)
    for reader, row in zip(readers, starts, strict=False):
        for inputs, wanted in reader.blocks():
            values: dict[Any, Values] = inputs if isinstance(inputs, dict) else {None: inputs}
            for name in values if not columns else ():
                what = "the input" if name is None else f"the input {name!r}"
                columns[name] = Column(what, starts[-1], locate, images=True, own=own)
            if set(values) != set(columns):
                raise DataError(f"{locate(row)} has {_described(values)}, but the first row has {_described(columns)}")
            for name, block in values.items():
                columns[name].write(row, block)
            targets.write(row, numbered(wanted, names, locate, row))
            row += len(wanted)
    read = {name: torch.from_numpy(column.finished()) for name, column in columns.items()}
    alone = read.get(None)
    together: Inputs = {str(name): value for name, value in read.items()} if alone is None else alone
    answers = targets_of(targets.finished(finite=task != "custom"), task, classes, locate)
    return Dataset(together, answers, classes, task)


def _described(columns: Mapping[Any, Any]) -> str:
    names = [str(name) for name in columns if name is not None]
    return f"inputs named {', '.join(names)}" if names else "an input without a name"
