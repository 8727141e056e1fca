"""A user's own `.csv`: a header row, numeric columns, and one column of labels."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from fedcdp.errors import DataError

LONGEST_LABEL = 100
LABEL_COLUMNS = ("label", "target", "y", "class")


def read_csv(path: Path) -> tuple[NDArray[np.float32], NDArray[np.str_]]:
    """Inputs [N, D] and labels [N] as they are written.

    The label is the column named label, target, y or class, in any case (the first of these names that occurs), else
    the last column. Empty lines are skipped. `DataError` names the line and column of what is wrong.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _parse(file, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a .csv file: {error}") from error


def _parse(file: TextIO, path: Path) -> tuple[NDArray[np.float32], NDArray[np.str_]]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    if len(header) < 2:
        raise DataError(f"{path} needs a header row with at least one input column and one label column")
    label_column = _label_column(header)
    names = header[:label_column] + header[label_column + 1 :]
    inputs, labels = [], []
    for cells in reader:
        if not cells:
            continue
        where = f"{path}, line {reader.line_num}"
        if len(cells) != len(header):
            raise DataError(f"{where}: {len(cells)} values instead of {len(header)}")
        label = cells.pop(label_column).strip()
        if not label:
            raise DataError(f"{where}, column {header[label_column]!r}: the label is empty")
        if len(label) > LONGEST_LABEL:  # every label takes as much room as the longest
            raise DataError(f"{where}, column {header[label_column]!r}: the label has more than {LONGEST_LABEL} characters")
        labels.append(label)
        record = _numbers(cells)
        if record is None:
            column = next(name for name, cell in zip(names, cells, strict=True) if _numbers([cell]) is None)
            raise DataError(f"{where}, column {column!r}: there is no finite number")  # not the cell: logs are read by many
        inputs.append(record)
    if not inputs:
        raise DataError(f"{path} has a header row but no records")
    return np.stack(inputs), np.array(labels)


def _label_column(header: list[str]) -> int:
    names = [name.lower() for name in header]
    return next((names.index(name) for name in LABEL_COLUMNS if name in names), len(names) - 1)


def _numbers(cells: list[str]) -> NDArray[np.float32] | None:
    """The cells as float32, or None if one of them is not a finite number."""
    if "_" in "".join(cells):  # Python reads 1_000 as a number; in a table it is a slip
        return None
    try:
        with np.errstate(over="ignore"):
            values = np.array([float(cell) for cell in cells], dtype=np.float32)
    except ValueError:
        return None
    return values if np.isfinite(values).all() else None
