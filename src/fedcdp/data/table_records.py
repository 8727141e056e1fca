"""A table as records: its inputs, the targets that its labels mean under a task, and the client of each record."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.data.dataset import Dataset
from fedcdp.data.table_columns import Columns, InputBlock, finite_numbers, inputs_of, is_missing, scale_to_range
from fedcdp.data.table_rules import ColumnRules
from fedcdp.data.tasks import TaskName
from fedcdp.errors import DataError

LONGEST_NAME = 100
_YES_NO = {"0": 0, "1": 1, "false": 0, "true": 1}


@dataclass(frozen=True, eq=False)
class LabelledRecords:
    """Records in the form that networks take, before they are split."""

    inputs: NDArray[np.float32]
    targets: Tensor
    classes: int
    task: TaskName
    description: str
    """How values became inputs."""
    plain: NDArray[np.bool_]
    """Which entries of axis 1 are numbers without a public range; NaN where missing."""
    unscaled: tuple[str, ...]
    """The columns of these numbers."""
    owners: NDArray[np.int64] | None = None
    names: tuple[str, ...] | None = None
    target_range: tuple[float, float] | None = None

    def dataset(self, inputs: NDArray[np.float32], records: NDArray[np.int64]) -> Dataset:
        """A part of the records, with its inputs after scaling; what is missing becomes 0."""
        inputs[np.isnan(inputs)] = 0
        targets = self.targets[torch.from_numpy(records)]
        return Dataset(torch.from_numpy(inputs), targets, self.classes, self.task, self.target_range)


def as_records(table: Columns, rules: ColumnRules) -> LabelledRecords:
    """Apply the rules to a table."""
    block = inputs_of(table, rules)
    owners, names = clients_of(table, rules.client) if rules.client is not None else (None, None)
    targets, classes, target_range = labels_to_targets(table, rules)
    return LabelledRecords(
        inputs=block.values,
        targets=targets,
        classes=classes,
        task=rules.task,
        description=_description(block, rules, target_range is not None),
        plain=block.plain,
        unscaled=block.unscaled,
        owners=owners,
        names=names,
        target_range=target_range,
    )


def _description(block: InputBlock, rules: ColumnRules, scaled_target: bool) -> str:
    if not block.categorical and not block.ranged and rules.missing == "refuse" and not scaled_target:
        return "inputs as in the file"
    kinds = {
        "as in the file": len(block.unscaled),
        "scaled from public ranges to −1 … 1": block.ranged,
        "one-hot from public lists, with an input for other values": block.categorical,
    }
    said = [f"{count} column{'s' if count > 1 else ''} {kind}" for kind, count in kinds.items() if count]
    if rules.missing == "indicator":
        said.append("missing values are 0, with an indicator input for each column")
    if scaled_target:
        said.append("the target scaled from its public range to −1 … 1")
    return "; ".join(said)


def clients_of(table: Columns, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The client number of each record, and the clients' names in order: whole numbers by value, else alphabetically."""
    texts = table.values[column]
    for record, text in enumerate(texts):
        if is_missing(text):
            raise DataError(f"{table.place(record, column)}: the client's name is missing")
        if len(text) > LONGEST_NAME or not text.isprintable():
            raise DataError(
                f"{table.place(record, column)}: the client's name is longer than {LONGEST_NAME} characters, "
                "or holds characters that cannot be printed"
            )
    names = sorted(set(texts))
    with suppress(ValueError):
        names.sort(key=int)
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[text] for text in texts], dtype=np.int64), tuple(names)


def labels_to_targets(table: Columns, rules: ColumnRules) -> tuple[Tensor, int, tuple[float, float] | None]:
    """The targets of a task, the number of classes, and the public range that they were scaled from."""
    labels = [name for name, role in table.roles.items() if role == "label"]
    labels = [name for name in rules.labels if name in labels] or labels  # in the order that was asked for
    if rules.task == "regression":
        return _values(table, labels, rules)
    if rules.task == "multilabel":
        known = {name: n for n, name in enumerate(rules.classes)} if rules.classes else _YES_NO
        allowed = "|".join(rules.classes) if rules.classes else "0 or 1"
        answers = [_known(table, name, known, allowed) for name in labels]
        return torch.from_numpy(np.stack(answers, axis=1).astype(np.float32)), 0, None
    (label,) = labels
    if rules.classes is not None:
        known = {name: n for n, name in enumerate(rules.classes)}
        return torch.from_numpy(_known(table, label, known, "|".join(rules.classes))), len(rules.classes), None
    numbers, classes = number_classes(_whole_or_text(table, label), table.source)
    if rules.task == "binary" and classes != 2:
        raise DataError(f"{table.source}, column {label!r}: {classes} classes, but task binary has 2")
    return torch.from_numpy(numbers), classes, None


def number_classes(labels: NDArray[Any], source: str) -> tuple[NDArray[np.int64], int]:
    """Number the distinct labels in order. That these labels occur is public."""
    distinct, targets = np.unique(labels, return_inverse=True)
    if len(distinct) < 2:
        raise DataError(f"{source} holds {len(distinct)} class{'' if len(distinct) == 1 else 'es'}: at least two are needed")
    return targets.astype(np.int64), len(distinct)


def _values(table: Columns, labels: list[str], rules: ColumnRules) -> tuple[Tensor, int, tuple[float, float] | None]:
    spans = {rules.ranges.get(name) for name in labels}
    if len(spans) > 1:
        raise DataError(f"range: the label columns of {table.source} need the same range, all of them or none")
    (span,) = spans
    columns = []
    for name in labels:
        values = finite_numbers(table, name)
        if (absent := np.isnan(values)).any():
            raise DataError(f"{table.place(int(np.argmax(absent)), name)}: the label is missing")
        columns.append(values if span is None else scale_to_range(values, span))
    values = np.stack(columns, axis=1).astype(np.float32)
    return torch.from_numpy(values[:, 0].copy() if len(labels) == 1 else values), 0, span


def label_texts(table: Columns) -> NDArray[np.str_]:
    """The labels of a table with one label column, as written."""
    (label,) = (name for name, role in table.roles.items() if role == "label")
    return np.array(_label_texts(table, label))


def _label_texts(table: Columns, label: str) -> list[str]:
    texts: list[str] = []
    for record, text in enumerate(table.values[label]):
        if text is None or is_missing(text):
            raise DataError(f"{table.place(record, label)}: the label is missing")
        if len(text) > LONGEST_NAME:
            raise DataError(f"{table.place(record, label)}: the label has more than {LONGEST_NAME} characters")
        texts.append(text)
    return texts


def _known(table: Columns, label: str, known: dict[str, int], allowed: str) -> NDArray[np.int64]:
    texts = table.values[label]
    as_known = str.lower if known is _YES_NO else str
    numbers = [-1 if text is None else known.get(as_known(text), -1) for text in texts]
    if -1 in numbers:
        record = numbers.index(-1)
        missing = "missing" if is_missing(texts[record]) else f"not {allowed}"
        raise DataError(f"{table.place(record, label)}: the label is {missing}")
    return np.array(numbers, dtype=np.int64)


def _whole_or_text(table: Columns, label: str) -> NDArray[Any]:
    """The labels as whole numbers if all of them are, else as texts; other numbers are no classes."""
    texts = _label_texts(table, label)
    labels = integers_if_all(np.array(texts))
    if labels.dtype.kind == "U":
        try:
            values = np.array([float(text) for text in texts])
        except ValueError:
            return labels
        if not (np.isfinite(values) & (values == np.trunc(values)) & (np.abs(values) < 2**53)).all():
            raise DataError(
                f"{table.source}, column {label!r}: labels are numbers that are not whole, so they are no classes; "
                "use --task regression, or list them with --classes"
            )
        return values.astype(np.int64)
    return labels


def integers_if_all(labels: NDArray[np.str_]) -> NDArray[Any]:
    """The labels as whole numbers if all of them are, else unchanged."""
    try:
        return np.array([int(label) for label in labels], dtype=np.int64)
    except (ValueError, OverflowError):
        return labels
