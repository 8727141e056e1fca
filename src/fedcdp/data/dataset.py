"""A dataset: the inputs and targets of examples, what is to be predicted, and the splits of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.config.fields import shown
from fedcdp.data.input_columns import InputColumn, InputColumns
from fedcdp.data.table_schema import TableSchema
from fedcdp.data.tasks import LearningTask, TaskName, task_called
from fedcdp.errors import DataError
from fedcdp.files.tree import Inputs, each_tensor, first_tensor, tensors_in

_INPUT_TYPES = (torch.float32, torch.int64, torch.bool)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples: their inputs, their targets, and the task, which says what the targets are.

    | task | targets | what a network returns for each example |
    | --- | --- | --- |
    | `classification` | [N], int64, 0 ≤ target < classes | a score for each class |
    | `binary` | [N], int64, 0 or 1 | one logit |
    | `multilabel` | [N, labels], float32, 0 or 1 | a logit for each label |
    | `regression` | [N] or [N, values], float32 | the values |
    | `language` | [N, tokens], int64 token ids; −100: not predicted | scores of the next token [tokens, words] |
    | `custom` | [N, ...], any type | whatever your loss expects |

    Raises:
        DataError: The tensors differ in length, are empty, or do not fit the task.

    Examples:
        >>> import torch, fedcdp
        >>> data = fedcdp.Dataset(torch.zeros(100, 30), torch.arange(100) % 2, classes=2)
        >>> len(data), data.shape
        (100, (30,))
        >>> ages = fedcdp.Dataset(torch.zeros(100, 30), torch.rand(100), task="regression")
        >>> ages.outputs
        1
        >>> ids = torch.zeros(100, 16, dtype=torch.int64)
        >>> texts = fedcdp.Dataset({"input_ids": ids, "attention_mask": ids}, torch.arange(100) % 2, classes=2)
    """

    inputs: Inputs = field(repr=False)
    """[N, ...], float32 or int64 (token ids); or a dictionary of such tensors, passed to the network as keywords."""
    targets: Tensor = field(repr=False)
    """[N, ...]: see the table."""
    classes: int = 0
    """The number of classes (classification: default, the largest label + 1; binary: 2); 0 for other tasks."""
    task: TaskName = "classification"
    """What is predicted."""
    target_range: tuple[float, float] | None = None
    """The public range [low, high], in the target's own unit, that was mapped to −1 … 1; None: targets are unscaled."""
    columns: InputColumns | None = field(default=None, repr=False)
    """The columns of a table that inputs were made of, if they are known; None if other inputs replaced them."""
    benchmark: str | None = field(default=None, repr=False)
    """The name of the public dataset that `load` read; None: any other data."""

    def __post_init__(self) -> None:
        for name, given in (("inputs", tensors_in(self.inputs)), ("targets", [self.targets])):
            if not given or not all(isinstance(value, Tensor) and value.dim() for value in given):
                raise DataError(f"{name}: they must be a tensor with a row for each example; as_dataset reads other data")
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or not 0 <= self.classes < 2**31:
            raise DataError(f"classes: {shown(self.classes)} is not a whole number of at least 0")
        lengths = {len(value) for value in tensors_in(self.inputs)}
        if lengths != {len(self.targets)}:
            found = " or ".join(map(str, sorted(lengths)))
            raise DataError(f"{found} inputs but {len(self.targets)} targets: each example needs one target")
        if len(self.targets) == 0:
            raise DataError("the dataset is empty")
        for value in tensors_in(self.inputs):
            if value.dtype not in _INPUT_TYPES:
                raise DataError(f"inputs are {value.dtype}: they must be float32, or int64 for token ids")
        if self.columns is not None and not _are_columns(self.columns):
            raise DataError(f"columns: {shown(self.columns)} is not a tuple of columns of a table")
        if self.benchmark is not None and not isinstance(self.benchmark, str):
            raise DataError(f"benchmark: {shown(self.benchmark)} is not a name")
        if self.columns is not None and self.shape != (self.columns[-1].inputs.stop,):
            object.__setattr__(self, "columns", None)
        object.__setattr__(self, "classes", self.learning_task.check(self.targets, self.classes))

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def learning_task(self) -> LearningTask:
        """The task: its loss, and what it demands of targets and outputs."""
        return task_called(self.task)

    @property
    def outputs(self) -> int | None:
        """How many values a network must return for each example; None if the task leaves that open."""
        return self.learning_task.outputs(self.targets, self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input (of several inputs: of the first)."""
        return tuple(first_tensor(self.inputs).shape[1:])

    @property
    def tensor(self) -> Tensor:
        """The inputs as one tensor; a `DataError` if they are several."""
        if isinstance(self.inputs, dict):
            raise DataError(f"inputs are {', '.join(self.inputs)}: this needs inputs in a single tensor")
        return self.inputs

    def take(self, indices: Tensor) -> Dataset:
        """The examples at `indices`, in that order."""
        return replace(self, inputs=each_tensor(self.inputs, lambda value: value[indices]), targets=self.targets[indices])

    def batches(self, size: int) -> Iterator[tuple[Inputs, Tensor]]:
        """The examples in order, at most `size` at a time: inputs and targets."""
        for start in range(0, len(self), size):
            some = slice(start, start + size)
            yield each_tensor(self.inputs, lambda value: value[some]), self.targets[some]  # noqa: B023  (used at once)


def _are_columns(given: object) -> bool:
    return isinstance(given, tuple) and len(given) > 0 and all(isinstance(each, InputColumn) for each in given)


@dataclass(frozen=True, eq=False)
class Splits:
    """A dataset in parts: training, validation and, for some benchmarks, test.

    Examples:
        >>> import fedcdp
        >>> splits = fedcdp.load("cancer")
        >>> len(splits.train), len(splits.validation), splits.test
        (426, 143, None)
    """

    name: str
    """The benchmark's name, or the file's without its ending."""
    train: Dataset
    """The examples that clients hold."""
    validation: Dataset
    """The examples that the server evaluates on. No ε protects them."""
    test: Dataset | None
    """The benchmark's test set, if it has one."""
    normalisation: str
    """How raw values became inputs, in a sentence."""
    owners: NDArray[np.int64] | None = None
    """The number of the client that each training record came from, if the data name clients."""
    validation_owners: NDArray[np.int64] | None = None
    """The number of the client that each validation record came from, if it came from one."""
    owner_names: tuple[str, ...] | None = None
    """The clients' names, by number; with `owners` only."""
    table: TableSchema | None = None
    """What the columns of a user's own table mean, if nothing but public rules made inputs of them."""
    rows: NDArray[np.int64] | None = None
    """Which record of a user's own file each training record is, counted from 0."""

    def __post_init__(self) -> None:
        for part, owners in ((self.train, self.owners), (self.validation, self.validation_owners)):
            if owners is not None and owners.shape != (len(part),):
                raise DataError(f"owners has shape {owners.shape} for {len(part)} records: each record needs one client")

    def of_benchmark(self) -> Splits:
        """The same splits, marked as those of the public dataset that they are named after."""
        train, validation = (replace(part, benchmark=self.name) for part in (self.train, self.validation))
        test = None if self.test is None else replace(self.test, benchmark=self.name)
        return replace(self, train=train, validation=validation, test=test)
