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
from fedcdp.data.input_columns import columns_of_schema
from fedcdp.data.table_columns import Columns, InputBlock, finite_numbers, inputs_of, is_missing, scale_to_range
from fedcdp.data.table_rules import ColumnRules, text_of
from fedcdp.data.table_schema import Span, TableSchema
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
    target_range: Span | None = None
    schema: TableSchema | None = None
    """What the columns mean; None if the inputs have no columns."""

    def dataset(self, inputs: NDArray[np.float32], records: NDArray[np.int64]) -> Dataset:
        """A part of the records, with its inputs after scaling; what is missing becomes 0."""
        inputs[np.isnan(inputs)] = 0
        targets = self.targets[torch.from_numpy(records)]
        columns = None if self.schema is None else columns_of_schema(self.schema)
        return Dataset(torch.from_numpy(inputs), targets, self.classes, self.task, self.target_range, columns)


def as_records(table: Columns, rules: ColumnRules) -> LabelledRecords:
    """Apply the rules to a table."""
    block = inputs_of(table, rules)
    owners, names = clients_of(table, rules.client) if rules.client is not None else (None, None)
    found = labels_to_targets(table, rules)
    return LabelledRecords(
        inputs=block.values,
        targets=found.targets,
        classes=found.classes,
        task=rules.task,
        description=_description(block, rules, found.span is not None),
        plain=block.plain,
        unscaled=block.unscaled,
        owners=owners,
        names=names,
        target_range=found.span,
        schema=_schema(table, rules, found.names),
    )


def _schema(table: Columns, rules: ColumnRules, classes: tuple[str, ...]) -> TableSchema:
    inputs = (name for name, role in table.roles.items() if role in ("number", "category"))
    spans = rules.ranges if rules.task == "regression" else {}
    return TableSchema(
        inputs=tuple((name, rules.categories.get(name) or rules.ranges.get(name)) for name in inputs),
        labels=tuple((name, spans.get(name)) for name in _label_columns(table, rules)),
        classes=classes,
        missing=rules.missing,
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


@dataclass(frozen=True, eq=False)
class TaskTargets:
    """The targets of a task."""

    targets: Tensor
    classes: int = 0
    names: tuple[str, ...] = ()
    """What the classes are called, in order; empty if there are none, or if labels are class numbers."""
    span: Span | None = None
    """The public range that the targets were scaled from."""


def _label_columns(table: Columns, rules: ColumnRules) -> list[str]:
    """The label columns, in the order that was asked for."""
    labels = [name for name, role in table.roles.items() if role == "label"]
    return [name for name in rules.labels if name in labels] or labels


def labels_to_targets(table: Columns, rules: ColumnRules) -> TaskTargets:
    """The targets that the labels of a table mean."""
    labels = _label_columns(table, rules)
    if rules.task == "regression":
        return _values(table, labels, rules)
    if rules.task == "multilabel":
        known = {name: n for n, name in enumerate(rules.classes)} if rules.classes else _YES_NO
        allowed = "|".join(rules.classes) if rules.classes else "0 or 1"
        answers = [_known(table, name, known, allowed) for name in labels]
        return TaskTargets(torch.from_numpy(np.stack(answers, axis=1).astype(np.float32)), names=rules.classes or ())
    (label,) = labels
    if rules.classes is not None:
        known = {name: n for n, name in enumerate(rules.classes)}
        numbers = _known(table, label, known, "|".join(rules.classes))
        return TaskTargets(torch.from_numpy(numbers), len(rules.classes), rules.classes)
    found = _whole_or_text(table, label)
    if rules.class_numbers:
        return _class_numbers(found, rules, f"{table.source}, column {label!r}")
    numbers, names = number_classes(found, table.source)
    if rules.task == "binary" and len(names) != 2:
        raise DataError(f"{table.source}, column {label!r}: {len(names)} classes, but task binary has 2")
    return TaskTargets(torch.from_numpy(numbers), len(names), names)


def _class_numbers(labels: NDArray[Any], rules: ColumnRules, where: str) -> TaskTargets:
    """Labels that are class numbers as they stand."""
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        raise DataError(
            f"classes: the labels in {where}, are not class numbers 0, 1, …; list the classes in order, such as no|yes, so "
            "labels mean the same at every client"
        )
    return TaskTargets(torch.from_numpy(labels), 2 if rules.task == "binary" else int(labels.max()) + 1)


def number_classes(labels: NDArray[Any], source: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Number the distinct labels in order, and name them. That these labels occur is public."""
    distinct, targets = np.unique(labels, return_inverse=True)
    if len(distinct) < 2:
        raise DataError(f"{source} holds {len(distinct)} class{'' if len(distinct) == 1 else 'es'}: at least two are needed")
    return targets.astype(np.int64), tuple(map(str, distinct.tolist()))


def _values(table: Columns, labels: list[str], rules: ColumnRules) -> TaskTargets:
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
    return TaskTargets(torch.from_numpy(values[:, 0].copy() if len(labels) == 1 else values), span=span)


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
    if -1 in numbers and known is not _YES_NO:  # 1.0 is class 1
        numbers = [-1 if text is None else known.get(text, known.get(_whole(text), -1)) for text in texts]
    if -1 in numbers:
        record = numbers.index(-1)
        missing = "missing" if is_missing(texts[record]) else f"not {allowed}"
        raise DataError(f"{table.place(record, label)}: the label is {missing}")
    return np.array(numbers, dtype=np.int64)


def _whole(text: str) -> str:
    """A whole number without its decimal point; other texts as they are."""
    try:
        return text_of(float(text))
    except ValueError:
        return text


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
