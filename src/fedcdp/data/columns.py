"""Columns of records: blocks of values joined into one tensor, each value copied once, with checks that name the row.

Floats become float32, integers int64 (token ids), booleans stay. Images of bytes ([H, W] or [H, W, C] each) become float32
from 0 to 1 with a leading axis for the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.data.array_files import COLOUR_CHANNELS
from fedcdp.data.tasks import TaskName
from fedcdp.errors import DataError

Values = NDArray[Any]
Locate = Callable[[int], str]
"""Names a row by its number among all rows joined: `client 'jena', row 3`."""

FLOAT, INTEGER, BOOLEAN = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)
_STORED: dict[str, np.dtype[Any]] = {"f": FLOAT, "i": INTEGER, "u": INTEGER, "b": BOOLEAN}
_WIDTH = {BOOLEAN: 0, INTEGER: 1, FLOAT: 2}
_ONE_SHAPE = "pad texts, or resize images, to one shape"
_PIECE = 2**14


def as_values(given: Any, what: str, first: int | None = None) -> Values:
    """A value as an array of numbers or text; if `first` is given, a block of values, of which the first has this row.

    A `DataError` starts with `what`, and never shows a value.
    """
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        if given.dtype in (torch.bfloat16, torch.float16):
            given = given.float()
    try:
        values = np.asarray(given)
        if values.dtype.kind == "O" and values.ndim:  # objects that may be numbers nevertheless
            numbers = np.asarray(values.tolist())
            values = numbers if numbers.dtype.kind in "fiub" else values
    except (ValueError, TypeError, RuntimeError):  # lists of different lengths
        raise DataError(f"{what} {_defect(given, first)}") from None
    if values.dtype.kind == "O":
        if values.size and all(isinstance(each, str) for each in values.flat):
            return values.astype(np.str_)
        raise DataError(f"{what} {_defect(values, first)}")
    if values.dtype.kind not in "fiubUS":
        raise DataError(f"{what} is {values.dtype}, which is not numbers")
    if first is not None and values.ndim == 0:
        raise DataError(f"{what} is a single value, not one for each row")
    return values


def _defect(rows: Iterable[Any], first: int | None) -> str:
    """What is wrong with a value, or a block of values, that is no array of numbers."""
    parts = list(rows) if np.iterable(rows) else []
    shapes = [_shape(part) for part in parts]
    uneven = next((number for number, shape in enumerate(shapes) if shape is None or shape != shapes[0]), None)
    if uneven is not None:
        return f"differs in shape at row {first + uneven}: {_ONE_SHAPE}" if first is not None else f"is uneven: {_ONE_SHAPE}"
    other = next((number for number, part in enumerate(parts) if np.asarray(part).dtype.kind not in "fiub"), None)
    return (
        "is not numbers only"
        if first is None or other is None
        else f"has something that is not a number at row {first + other}"
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    try:
        return tuple(np.shape(value))
    except ValueError:  # it is uneven itself
        return None


class Column:
    """The values of `count` records, written block by block."""

    def __init__(self, what: str, count: int, locate: Locate, *, images: bool, own: bool) -> None:
        self.what, self.count, self.locate, self.images, self.own = what, count, locate, images, own
        self.values: Values | None = None

    def write(self, start: int, block: Values) -> None:
        """Put the values of the records from number `start` on."""
        if block.dtype.kind in "US":
            raise DataError(f"{self.locate(start)}: {self.what} is text; turn it into numbers (such as token ids) first")
        pixels = self.images and block.dtype == np.uint8 and block.ndim in (3, 4)
        if pixels:
            block = _channels_first(block)
        dtype = FLOAT if pixels else _STORED[block.dtype.kind]
        if self.values is None:
            usable = block.dtype == dtype and block.flags.writeable and block.flags.c_contiguous
            if usable and len(block) == self.count and not self.own:
                self.values = block
                return
            self.values = np.empty((self.count, *block.shape[1:]), dtype)
        if block.shape[1:] != self.values.shape[1:]:
            raise DataError(
                f"{self.locate(start)}: {self.what} has shape {block.shape[1:]}, but {self.values.shape[1:]} in the first "
                f"row; {_ONE_SHAPE}"
            )
        if _WIDTH[dtype] > _WIDTH[self.values.dtype]:
            self.values = self.values.astype(dtype)
        into = self.values[start : start + len(block)]
        with np.errstate(over="ignore", invalid="ignore"):
            if pixels:
                np.divide(block, np.float32(255), out=into, dtype=FLOAT)
            else:
                into[...] = block

    def finished(self, finite: bool = True) -> Values:
        """All values; if `finite`, none of them may be a NaN or an infinity."""
        assert self.values is not None
        for start in range(0, self.count, _PIECE) if finite and self.values.dtype == FLOAT else ():
            fine = np.isfinite(self.values[start : start + _PIECE])
            if not fine.all():
                row = start + int(np.argwhere(~fine)[0, 0])
                raise DataError(f"{self.locate(row)}: {self.what} has a missing value, an infinity or one beyond float32")
        return self.values


def numbered(block: Values, names: Sequence[str], locate: Locate, start: int) -> Values:
    """Labels that are text as class numbers; other labels as they are."""
    if block.dtype.kind not in "US":
        return block
    if not names:
        raise DataError(f"{locate(start)}: the label is text; name the classes in order, such as classes=['no', 'yes']")
    numbers = np.full(block.shape, -1, dtype=np.int64)
    for number, name in enumerate(names):
        numbers[block.astype(np.str_) == name] = number
    if (numbers < 0).any():
        row = start + int(np.argwhere(numbers < 0)[0, 0])
        raise DataError(f"{locate(row)}: the label is none of the {len(names)} classes that are named")
    return numbers


def targets_of(values: Values, task: TaskName, classes: int, locate: Locate) -> Tensor:
    """The targets in the type that a task needs; a `DataError` names the first row that does not fit."""
    if task == "custom":
        return torch.from_numpy(values)
    if task == "language":
        return torch.from_numpy(values.astype(INTEGER, copy=False))
    if task == "regression":
        return torch.from_numpy(values.astype(FLOAT, copy=False))
    if task == "multilabel":
        targets = values.astype(FLOAT, copy=False)
        wrong, expected = (targets != 0) & (targets != 1), "a row of zeros and ones"
    else:
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1:
            raise DataError(f"labels are {values.dtype} of shape {values.shape}: each example needs one whole number")
        with np.errstate(invalid="ignore"):
            targets = values.astype(INTEGER, copy=False)
        most = 1 if task == "binary" else classes - 1 if classes else None
        wrong = (targets != values) | (targets < 0)
        if most is not None:
            wrong |= targets > most
        expected = "a whole number " + ("of at least 0" if most is None else f"from 0 to {most}")
    if wrong.any():
        row = int(np.argwhere(wrong)[0, 0])
        raise DataError(f"{locate(row)}: the target is not {expected}, which task {task} needs")
    return torch.from_numpy(np.ascontiguousarray(targets))


def _channels_first(images: Values) -> Values:
    if images.ndim == 3:
        return images[:, None]
    last = images.shape[3] in COLOUR_CHANNELS and images.shape[1] not in COLOUR_CHANNELS
    return images.transpose(0, 3, 1, 2) if last else images
