"""Columns of records: blocks of values joined into one tensor, each value copied once, with checks that name the row.

Floats become float32, integers int64 (token ids), booleans stay. Images of bytes ([H, W] or [H, W, C] each) become float32
from 0 to 1 with a leading axis for the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.data.own_files import COLOUR_CHANNELS
from fedcdp.data.tasks import TaskName
from fedcdp.errors import DataError

Values = NDArray[Any]
Locate = Callable[[int], str]
"""Names a row by its number among all rows joined: `client 'jena', row 3`."""

_KINDS = {"f": np.dtype(np.float32), "i": np.dtype(np.int64), "u": np.dtype(np.int64), "b": np.dtype(np.bool_)}
_WIDENS = [np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float32)]
_PIECE = 2**14


def as_values(given: Any, what: str) -> Values:
    """One value, or a block of them, as an array of numbers or text; a `DataError` starts with `what`."""
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        if given.dtype in (torch.bfloat16, torch.float16):
            given = given.float()
    try:
        values = np.asarray(given)
    except (ValueError, TypeError, RuntimeError):
        raise DataError(
            f"{what} is no array of numbers; if it has rows of different length, pad them to one length"
        ) from None
    if values.dtype.kind == "O":
        if all(isinstance(each, str) for each in values.flat):
            return values.astype(np.str_)
        uneven = values.ndim == 1 and len({np.shape(each) for each in values}) > 1
        advice = "has rows of different shape: pad texts, or resize images, to one shape" if uneven else "is not numbers"
        raise DataError(f"{what} {advice}")
    if values.dtype.kind not in "fiubUS":
        raise DataError(f"{what} is {values.dtype}, which is not numbers")
    return values


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
        dtype = np.dtype(np.float32) if pixels else _KINDS[block.dtype.kind]
        if self.values is None:
            whole = len(block) == self.count and block.dtype == dtype and block.flags.writeable and not self.own
            if whole and block.flags.c_contiguous:
                self.values = block
                return
            self.values = np.empty((self.count, *block.shape[1:]), dtype)
        if block.shape[1:] != self.values.shape[1:]:
            raise DataError(
                f"{self.locate(start)}: {self.what} has shape {block.shape[1:]}, but {self.values.shape[1:]} in the first row; "
                "pad texts, or resize images, to one shape"
            )
        if _WIDENS.index(dtype) > _WIDENS.index(self.values.dtype):
            self.values = self.values.astype(dtype)
        into = self.values[start : start + len(block)]
        with np.errstate(over="ignore"):
            if pixels:
                np.divide(block, np.float32(255), out=into, dtype=np.float32)
            else:
                into[...] = block

    def finished(self) -> Values:
        """All values; none of them is a NaN or an infinity."""
        assert self.values is not None
        if self.values.dtype.kind == "f":
            for start in range(0, self.count, _PIECE):
                finite = np.isfinite(self.values[start : start + _PIECE])
                if not finite.all():
                    row = start + int(np.argwhere(~finite)[0, 0])
                    raise DataError(
                        f"{self.locate(row)}: {self.what} has a missing value, an infinity or one beyond float32"
                    )
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
    if task in ("multilabel", "regression"):
        targets = values.astype(np.float32, copy=False)
        wrong = (targets != 0) & (targets != 1) if task == "multilabel" else np.zeros(0)
        expected = "a row of zeros and ones"
    else:
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1:
            raise DataError(f"labels are {values.dtype} of shape {values.shape}: each example needs one whole number")
        targets = values.astype(np.int64, copy=False)
        most = 1 if task == "binary" else classes - 1 if classes else None
        wrong = (targets != values) | (targets < 0) | (False if most is None else targets > most)
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
