"""A table's schema: what each input and each label means, in order. Everything in it is public.

Two tables with equal schemas give equal inputs for equal rows. Clients of a deployment compare their schemas with the
server's, since tables whose categories or columns are in another order have inputs of the same shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]


@dataclass(frozen=True)
class TableSchema:
    """The columns that inputs and targets are made of. `table_records` makes one from a table and its rules."""

    inputs: tuple[tuple[str, tuple[str, ...] | Span | None], ...]
    """Name and categories, or range, or nothing of each input column, in order."""
    labels: tuple[tuple[str, Span | None], ...]
    """Name of each label column, and the range of a regression target."""
    classes: tuple[str, ...] = ()
    """The label's classes, in order; empty if there are none, or if labels are class numbers."""
    missing: str = "refuse"
    """The rule for missing values."""

    def written(self) -> dict[str, Any]:
        """The schema as plain values, for JSON."""
        return {
            "inputs": [[name, None if values is None else list(values)] for name, values in self.inputs],
            "labels": [[name, None if span is None else list(span)] for name, span in self.labels],
            "classes": list(self.classes),
            "missing": self.missing,
        }

    @staticmethod
    def read(written: Any) -> TableSchema:
        """Read what `written` wrote; a `ValueError` for anything else."""
        if not isinstance(written, dict) or set(written) != {"inputs", "labels", "classes", "missing"}:
            raise ValueError("a table has inputs, labels, classes and missing")
        inputs = tuple((name, _span(values) or _texts(values)) for name, values in _pairs(written["inputs"]))
        labels = tuple((name, _span(values)) for name, values in _pairs(written["labels"]))
        if any(
            span is None and values is not None for (_, span), (_, values) in zip(labels, written["labels"], strict=True)
        ):
            raise ValueError("a label has a range or nothing")
        if written["missing"] not in ("refuse", "indicator"):
            raise ValueError("missing is refuse or indicator")
        classes = _texts(written["classes"]) if written["classes"] != [] else ()
        return TableSchema(inputs, labels, classes or (), written["missing"])

    def difference(self, other: TableSchema) -> str | None:
        """Where another schema differs from this one, in words that name this schema's columns only; None if nowhere."""
        for number, column in enumerate(self.inputs):
            if number >= len(other.inputs) or other.inputs[number][0] != column[0]:
                return f"input column {number + 1}, {column[0]!r}"
            if other.inputs[number] != column:
                return f"the categories or the range of {column[0]!r}"
        if len(other.inputs) > len(self.inputs):
            return f"the number of input columns, {len(self.inputs)}"
        if other.labels != self.labels:
            return f"the label {', '.join(name for name, _ in self.labels)}, or its range"
        if other.classes and self.classes and other.classes != self.classes:
            return f"the classes {'|'.join(self.classes)}, in this order"
        return None if other.missing == self.missing else f"the rule for missing values, {self.missing}"


def _pairs(written: Any) -> list[tuple[str, Any]]:
    fits = isinstance(written, list) and written and all(isinstance(pair, list) and len(pair) == 2 for pair in written)
    if not fits or not all(isinstance(name, str) and name for name, _ in written):
        raise ValueError("columns are pairs of a name and its values")
    if len({name for name, _ in written}) < len(written):
        raise ValueError("each column has a name of its own")
    return [(name, values) for name, values in written]


def _span(written: Any) -> Span | None:
    """A range; None for anything else."""
    if not isinstance(written, list) or len(written) != 2 or not all(type(each) is float for each in written):
        return None
    low, high = written
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("a range is two finite numbers, the lower one first")
    return low + 0.0, high + 0.0


def _texts(written: Any) -> tuple[str, ...] | None:
    if written is None:
        return None
    if not isinstance(written, list) or len(written) < 2 or not all(isinstance(each, str) and each for each in written):
        raise ValueError("categories and classes are at least two texts")
    if len(set(written)) < len(written):
        raise ValueError("categories and classes are distinct")
    return tuple(written)
