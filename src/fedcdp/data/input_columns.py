"""The columns behind a table's inputs: which inputs are one number, and which are the one-hot inputs of one category.

A loader that knows the columns says so (`columns_of_schema`). For other inputs, `infer_columns` finds them in example rows:
neighbouring inputs that are 0 or 1, and of which at most one is 1, are the one-hot inputs of a category.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.data.table_schema import TableSchema

OTHER, MISSING = "(other)", "(missing)"


@dataclass(frozen=True)
class InputColumn:
    """One column of a table, and the inputs that it became."""

    name: str
    start: int
    """The first of its inputs."""
    values: tuple[str, ...] = ()
    """The category that each of its inputs stands for; empty for a number, which is a single input."""
    may_be_empty: bool = False
    """Whether all inputs of a category may be 0: the value is missing."""

    @property
    def width(self) -> int:
        """The number of inputs."""
        return len(self.values) or 1

    @property
    def inputs(self) -> slice:
        """Its inputs among all."""
        return slice(self.start, self.start + self.width)

    @property
    def is_number(self) -> bool:
        """Whether it is a number, and no category."""
        return not self.values

    def choices(self) -> int:
        """How many values a category has, the missing one included; 1 for a number."""
        return self.width + self.may_be_empty

    def say(self, choice: int) -> str:
        """The name of a category, or of the missing one."""
        return self.values[choice] if choice < len(self.values) else MISSING


InputColumns = tuple[InputColumn, ...]


def named_columns(
    numbers: Sequence[str], categories: Mapping[str, Sequence[str]], *, may_be_empty: bool = False
) -> InputColumns:
    """Numbers first, then categories, each one-hot over its values."""
    found = [InputColumn(name, place) for place, name in enumerate(numbers)]
    start = len(found)
    for name, values in categories.items():
        found.append(InputColumn(name, start, tuple(values), may_be_empty))
        start += len(values)
    return tuple(found)


def columns_of_schema(schema: TableSchema) -> InputColumns:
    """The columns of a user's own table, in the order in which `table_columns.inputs_of` writes their inputs."""
    found: list[InputColumn] = []
    start = 0
    for name, values in schema.inputs:
        texts = () if values is None or not isinstance(values[0], str) else tuple(map(str, values))
        named = (*texts, OTHER) if texts else ()
        if texts and schema.missing == "indicator":
            named = (*named, MISSING)
        found.append(InputColumn(name, start, named))
        start = found[-1].inputs.stop
        if not texts and schema.missing == "indicator":
            found.append(InputColumn(f"{name} {MISSING}", start, (MISSING,), may_be_empty=True))
            start += 1
    return tuple(found)


def infer_columns(rows: Tensor) -> InputColumns:
    """The columns of inputs [N, n], found in the rows themselves."""
    binary = ((rows == 0) | (rows == 1)).all(0) & (rows != 0).any(0)
    found: list[InputColumn] = []
    start, count = 0, rows.shape[1]
    while start < count:
        stop, filled = start, torch.zeros(len(rows), device=rows.device)
        while stop < count and bool(binary[stop]) and bool((filled + rows[:, stop] <= 1).all()):
            filled = filled + rows[:, stop]
            stop += 1
        if stop == start:
            found.append(InputColumn(f"input {start}", start))
            start += 1
            continue
        whole = bool((filled == 1).all()) and stop - start > 1
        name = f"input {start}" if stop == start + 1 else f"inputs {start} to {stop - 1}"
        found.append(InputColumn(name, start, tuple(map(str, range(start, stop))), may_be_empty=not whole))
        start = stop
    return tuple(found)
