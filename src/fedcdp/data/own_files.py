"""A user's own file as a dataset: `.csv` (a header row, numeric columns, one label column) or `.npz` (two arrays)."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.prepare import standardise as standardise_by_train
from fedcdp.data.prepare import stratified_split
from fedcdp.errors import DataError
from fedcdp.files.untrusted import most_unpacked

COLOUR_CHANNELS = (1, 3)


def load_file(
    path: Path | str, *, split_seed: int = 0, validation_fraction: float = 0.2, standardise: bool = False
) -> Splits:
    """Load your own `.npz` or `.csv` file and split it into training and validation records.

    | file | holds |
    | --- | --- |
    | `.npz` | two arrays: `x` and `y`, `inputs` and `targets`, `images` and `labels`, or `data` and `target` |
    | `.csv` | a header row, numeric columns and a label column: `label`, `target`, `y` or `class`, else the last one |

    Classes are the distinct labels in order: integers by value, strings alphabetically. Images [N, H, W] get a channel axis.
    Images [N, H, W, C] with 1 or 3 channels become [N, C, H, W], unless axis 1 already is 1 or 3 long. Images of bytes are
    divided by 255.

    Args:
        path: The file.
        split_seed: Fixes which records are held out. The split is random, with each class in proportion.
        validation_fraction: Share of the records held out for validation.
        standardise: Standardise each feature (of images, each channel) by its mean and deviation over the training split.
            No ε covers these statistics.

    Returns:
        The training and validation split; there is no test set.

    Raises:
        DataError: The file is missing, damaged, or not of this form. For a `.csv` file the message names the line and
            column.

    Examples:
        >>> import fedcdp, numpy as np
        >>> np.savez("table.npz", x=np.random.default_rng(0).normal(size=(100, 4)), y=np.arange(100) % 2)
        >>> splits = fedcdp.load_file("table.npz")
        >>> len(splits.train), len(splits.validation), splits.train.classes
        (80, 20, 2)
    """
    path = Path(path)
    inputs, labels = read_arrays(path)
    targets, classes = _number_classes(labels, path)
    inputs, scaling = as_inputs(inputs, path)
    if len(inputs) != len(targets):
        raise DataError(f"{path} holds {len(inputs)} inputs but {len(targets)} labels")
    validation_count = _validation_count(len(targets), validation_fraction, path)
    train, validation = stratified_split(targets, validation_count, split_seed)
    train_inputs, validation_inputs = inputs[train], inputs[validation]
    if standardise:
        train_inputs, validation_inputs = standardise_by_train(train_inputs, validation_inputs)
        scaling += (
            "; standardised by the mean and deviation of each feature or channel over the training data, "
            "statistics that are not covered by any ε"
        )
    return Splits(
        name=path.stem,
        train=Dataset(torch.from_numpy(train_inputs), torch.from_numpy(targets[train]), classes),
        validation=Dataset(torch.from_numpy(validation_inputs), torch.from_numpy(targets[validation]), classes),
        test=None,
        normalisation=scaling,
    )


def read_arrays(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inputs and labels as stored in the file."""
    suffix = path.suffix.lower()
    if suffix not in (".npz", ".csv"):
        raise DataError(f"{path} is neither a .npz nor a .csv file")
    if not path.is_file():
        raise DataError(f"{path} does not exist or is not a file")
    return read_npz(path) if suffix == ".npz" else read_csv(path)


def _number_classes(labels: NDArray[Any], path: Path) -> tuple[NDArray[np.int64], int]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"{path} holds labels of shape {labels.shape}: each record needs one label")
    if labels.dtype.kind == "U":
        labels = integers_if_all(labels)
    elif labels.dtype.kind == "f" and np.array_equal(labels, np.trunc(labels)) and np.isfinite(labels).all():
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "iubUS":
        raise DataError(f"{path} holds labels of type {labels.dtype}: they must be integers or strings")
    distinct, targets = np.unique(labels, return_inverse=True)
    if len(distinct) < 2:
        raise DataError(f"{path} holds {len(distinct)} class{'' if len(distinct) == 1 else 'es'}: at least two are needed")
    return targets.astype(np.int64), len(distinct)


def integers_if_all(labels: NDArray[np.str_]) -> NDArray[Any]:
    """The labels as whole numbers if all of them are, else unchanged."""
    try:
        return np.array([int(label) for label in labels], dtype=np.int64)
    except (ValueError, OverflowError):
        return labels


def as_inputs(values: NDArray[Any], path: Path) -> tuple[NDArray[np.float32], str]:
    """Finite float32 values in the shape that networks expect, and a description of the conversion."""
    if values.dtype.kind not in "iufb":
        raise DataError(f"{path} holds inputs of type {values.dtype}: they must be numbers")
    if values.ndim < 2 or 0 in values.shape:
        raise DataError(f"{path} holds inputs of shape {values.shape}: there must be records of at least one value")
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[3] in COLOUR_CHANNELS and values.shape[1] not in COLOUR_CHANNELS:
        values = values.transpose(0, 3, 1, 2)
    with np.errstate(over="ignore"):
        inputs = np.array(values, dtype=np.float32, order="C")
    if not np.isfinite(inputs).all():
        record = int(np.argwhere(~np.isfinite(inputs))[0, 0])
        raise DataError(f"{path} holds a NaN, an infinity or a value beyond float32 in the inputs of record {record}")
    if values.dtype == np.uint8 and values.ndim == 4:
        return inputs / np.float32(255), "pixels divided by 255, so inputs lie in [0, 1]"
    return inputs, "inputs as in the file"


def _validation_count(count: int, fraction: float, path: Path) -> int:
    if not 0 < fraction < 1:
        raise DataError(f"validation_fraction is {fraction}: it must lie between 0 and 1")
    if count < 2:
        raise DataError(f"{path} holds {count} record: at least two are needed, one for each split")
    return min(max(round(count * fraction), 1), count - 1)


LONGEST_LABEL = 100
LABEL_COLUMNS = ("label", "target", "y", "class")


def read_csv(path: Path) -> tuple[NDArray[np.float32], NDArray[np.str_]]:
    """Inputs [N, D] and labels [N] as written in the file.

    The label column is the one named label, target, y or class in upper or lower case (the first of these names that
    occurs), else the last column. Empty lines are skipped. A `DataError` names the line and column of a defect.
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
        if len(label) > LONGEST_LABEL:  # because every label takes as much memory as the longest
            raise DataError(f"{where}, column {header[label_column]!r}: the label has more than {LONGEST_LABEL} characters")
        labels.append(label)
        record = _numbers(cells)
        if record is None:
            column = next(name for name, cell in zip(names, cells, strict=True) if _numbers([cell]) is None)
            raise DataError(f"{where}, column {column!r}: there is no finite number")  # without the cell, private data
        inputs.append(record)
    if not inputs:
        raise DataError(f"{path} has a header row but no records")
    return np.stack(inputs), np.array(labels)


def _label_column(header: list[str]) -> int:
    names = [name.lower() for name in header]
    return next((names.index(name) for name in LABEL_COLUMNS if name in names), len(names) - 1)


def _numbers(cells: list[str]) -> NDArray[np.float32] | None:
    """The cells as float32, or None if one of them is not a finite number."""
    if "_" in "".join(cells):  # Python reads 1_000 as a number; in a table it is a mistake
        return None
    try:
        with np.errstate(over="ignore"):
            values = np.array([float(cell) for cell in cells], dtype=np.float32)
    except ValueError:
        return None
    return values if np.isfinite(values).all() else None


_HEADERS: dict[tuple[int, int], Callable[[Any], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
PAIRS = (("x", "y"), ("inputs", "targets"), ("images", "labels"), ("data", "target"))


def checked_member(arrays: Any, name: str, most: int) -> NDArray[Any]:
    """An array of an open `.npz` file, whose size is checked before it is unpacked or memory is allocated for it."""
    file = arrays.zip
    member = next(each for each in file.namelist() if each.removesuffix(".npy") == name)
    with file.open(member) as content:
        shape, _, kind = _HEADERS[np.lib.format.read_magic(content)](content)
        promised, room = math.prod(shape) * kind.itemsize, file.getinfo(member).file_size - content.tell()
    if not kind.hasobject:  # NumPy itself refuses object arrays
        if promised > most:
            raise DataError(f"the array {name} unpacks to {promised:,} bytes; at most {most:,} are read: do not compress it")
        if promised != room:
            raise DataError(f"the array {name} declares {promised} bytes in its header but holds {room}")
    found: NDArray[Any] = arrays[name]
    return found


def read_npz(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first of `PAIRS` that the file holds (upper or lower case), unchanged. Pickled arrays are refused."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            stored = {name.lower(): name for name in arrays.files}
            pair = next((pair for pair in PAIRS if pair[0] in stored and pair[1] in stored), None)
            if pair is None:
                known = ", ".join("/".join(pair) for pair in PAIRS)
                raise DataError(f"{path} holds the arrays {', '.join(arrays.files) or '(none)'}: name them {known}")
            inputs, labels = (checked_member(arrays, stored[name], most_unpacked(path.stat().st_size)) for name in pair)
    except DataError as error:
        raise error if str(path) in str(error) else DataError(f"{path}: {error}") from None
    except Exception as error:  # np.load passes on all errors of zipfile, zlib and its own header parser
        raise DataError(f"{path} cannot be read as a .npz file: {' '.join(str(error).split())}") from error
    return inputs, labels
