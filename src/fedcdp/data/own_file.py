"""A user's own file as a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.own_csv import read_csv
from fedcdp.data.own_npz import read_npz
from fedcdp.data.scaling import standardise as standardise_by_train
from fedcdp.data.splitting import stratified_split
from fedcdp.errors import DataError

COLOUR_CHANNELS = (1, 3)


def load_file(
    path: Path | str, *, split_seed: int = 0, validation_fraction: float = 0.2, standardise: bool = False
) -> Splits:
    """The records of a `.npz` or `.csv` file, split at random with each class in proportion; no test set.

    Classes are the distinct labels in order: integers by value, strings alphabetically. Images [N, H, W] get a channel
    axis, [N, H, W, C] with 1 or 3 channels becomes [N, C, H, W] (unless axis 1 already is 1 or 3 long), and images of
    bytes are divided by 255. With `standardise`, each feature (of images, each channel) is standardised by statistics
    of the training split alone. Raises `DataError` when the file is missing, damaged or not of this form.
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
    """Inputs and labels as they are in the file."""
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
        raise DataError(f"{path} holds labels of shape {labels.shape}: one label a record is needed")
    if labels.dtype.kind == "U":
        labels = integers_if_all(labels)
    elif labels.dtype.kind == "f" and np.array_equal(labels, np.trunc(labels)) and np.isfinite(labels).all():
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "iubUS":
        raise DataError(f"{path} holds labels of type {labels.dtype}: they must be integers or strings")
    distinct, targets = np.unique(labels, return_inverse=True)
    if len(distinct) < 2:
        raise DataError(f"{path} holds {len(distinct)} class{'' if len(distinct) == 1 else 'es'}: two are needed")
    return targets.astype(np.int64), len(distinct)


def integers_if_all(labels: NDArray[np.str_]) -> NDArray[Any]:
    """Labels as whole numbers, if each of them is written as one."""
    try:
        return np.array([int(label) for label in labels], dtype=np.int64)
    except (ValueError, OverflowError):
        return labels


def as_inputs(values: NDArray[Any], path: Path) -> tuple[NDArray[np.float32], str]:
    """Finite float32 values in the shape that networks expect, and what was done to them in words."""
    if values.dtype.kind not in "iufb":
        raise DataError(f"{path} holds inputs of type {values.dtype}: they must be numbers")
    if values.ndim < 2 or 0 in values.shape:
        raise DataError(f"{path} holds inputs of shape {values.shape}: records of at least one value are needed")
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[3] in COLOUR_CHANNELS and values.shape[1] not in COLOUR_CHANNELS:
        values = values.transpose(0, 3, 1, 2)
    with np.errstate(over="ignore"):
        inputs = np.array(values, dtype=np.float32, order="C")
    if not np.isfinite(inputs).all():
        record = int(np.argwhere(~np.isfinite(inputs))[0, 0])
        raise DataError(f"{path} holds NaN, an infinity or a value beyond float32 among the inputs of record {record}")
    if values.dtype == np.uint8 and values.ndim == 4:
        return inputs / np.float32(255), "pixels divided by 255, so inputs lie in [0, 1]"
    return inputs, "inputs as in the file"


def _validation_count(count: int, fraction: float, path: Path) -> int:
    if not 0 < fraction < 1:
        raise DataError(f"validation_fraction is {fraction}: it must lie between 0 and 1")
    if count < 2:
        raise DataError(f"{path} holds {count} record: at least two are needed, one for each split")
    return min(max(round(count * fraction), 1), count - 1)
