"""A table as columns, and the inputs that its rules make of them.

| column | becomes |
| --- | --- |
| a number | one input, as it is, or mapped from its public range to −1 … 1 (values outside the range are clipped to it) |
| a category | one input for each category of the public list, and one for any other value: 1 for the value's own, else 0 |
| any, with `missing="indicator"` | one more input: 1 where the value is missing, whose other inputs are then 0 |

The number of inputs follows from the rules and the column names alone, never from the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcdp.data.table_rules import ColumnRules, Role, text_of
from fedcdp.errors import DataError

Column = NDArray[Any]
"""Numbers (float64, NaN: missing) or texts (objects, None: missing)."""

_MISSING = ("", "na", "n/a", "nan", "null")
_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Columns:
    """A table as read: a column is numbers (NaN: missing) or texts (None: missing), by its role."""

    source: str
    values: dict[str, Column]
    roles: dict[str, Role]
    lines: NDArray[np.int64] | None = None
    """The line of each record in a text file. None: records are counted from 0."""

    def __len__(self) -> int:
        return len(next(iter(self.values.values()), ()))

    def place(self, record: int, column: str) -> str:
        """Where a value is, for a message, which never quotes the value: it is private."""
        where = f"record {record}" if self.lines is None else f"line {self.lines[record]}"
        return f"{self.source}, {where}, column {column!r}"


def is_missing(text: str | None) -> bool:
    """Whether a text stands for a missing value: nothing, NA, N/A, NaN or null, in upper or lower case."""
    return text is None or (len(text) <= 4 and text.lower() in _MISSING)


@dataclass(frozen=True, eq=False)
class InputBlock:
    """The inputs of a table, NaN where a number is missing and may be."""

    values: NDArray[np.float32]
    plain: NDArray[np.bool_]
    """Which inputs are numbers without a public range."""
    unscaled: tuple[str, ...]
    """The columns of these numbers."""
    ranged: int
    categorical: int


def inputs_of(table: Columns, rules: ColumnRules) -> InputBlock:
    """The inputs that the rules make of a table's columns."""
    if not len(table):
        raise DataError(f"{table.source} has a header row but no records")
    parts: list[NDArray[np.float32]] = []
    plain: list[bool] = []
    inputs = {name: role for name, role in table.roles.items() if role in ("number", "category")}
    unscaled = tuple(name for name, role in inputs.items() if role == "number" and name not in rules.ranges)
    for name, role in inputs.items():
        if role == "category":
            part, absent = _one_hot(table, name, rules.categories[name])
        else:
            part, absent = _number(table, name, rules.ranges.get(name))
        if rules.missing == "refuse" and absent.any():
            where = table.place(int(np.argmax(absent)), name)
            raise DataError(f"{where}: the value is missing; --missing indicator reads missing values, with an extra input")
        parts.append(part)
        plain += [name in unscaled] * part.shape[1]
        if rules.missing == "indicator":
            parts.append(absent.astype(np.float32)[:, None])
            plain.append(False)
    categorical = list(inputs.values()).count("category")
    ranged = len(inputs) - categorical - len(unscaled)
    return InputBlock(np.concatenate(parts, axis=1), np.array(plain), unscaled, ranged, categorical)


def _number(table: Columns, name: str, span: tuple[float, float] | None) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The inputs of a column of numbers (NaN where missing and not yet scaled), and where it has no value."""
    values = finite_numbers(table, name)
    absent = np.isnan(values)
    if span is not None:
        values = np.where(absent, 0.0, scale_to_range(values, span))
    return values.astype(np.float32)[:, None], absent


def finite_numbers(table: Columns, name: str) -> Column:
    """A column of numbers, none of which is infinite or beyond float32; NaN where missing."""
    values = table.values[name]
    wrong = np.abs(values) > _MOST  # an infinity too
    if wrong.any():
        raise DataError(f"{table.place(int(np.argmax(wrong)), name)}: there is no finite number")
    return values


def scale_to_range(values: Column, span: tuple[float, float]) -> Column:
    """Map [low, high] to [−1, 1]; values outside are clipped."""
    low, high = span
    scaled: Column = (2 * np.clip(values, low, high) - low - high) / (high - low)
    return scaled


def _one_hot(table: Columns, name: str, categories: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """A column for each category and one for other values, and where the column has no value."""
    numbers = {category: number for number, category in enumerate(categories)}
    other = len(categories)
    chosen = np.array([numbers.get(text, -1 if is_missing(text) else other) for text in table.values[name]], dtype=np.int64)
    block = np.zeros((len(chosen), other + 1), dtype=np.float32)
    absent = chosen < 0
    block[np.flatnonzero(~absent), chosen[~absent]] = 1
    return block, absent


def text_column(values: NDArray[Any]) -> Column:
    """Numbers as texts; NaN is None."""
    texts = [None if value != value else text_of(value) for value in values.tolist()]
    column: Column = np.empty(len(texts), dtype=object)
    column[:] = texts
    return column
