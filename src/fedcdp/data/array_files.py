"""A user's own arrays: a `.npz` file with an array of inputs of any shape, or with one array for each column of a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcdp.data.table_columns import Column, Columns
from fedcdp.data.table_files import as_column, read_frame
from fedcdp.data.table_records import LabelledRecords, as_records, clients_of, labels_to_targets
from fedcdp.data.table_rules import ColumnRules, Role
from fedcdp.errors import DataError
from fedcdp.files.untrusted import most_unpacked

COLOUR_CHANNELS = (1, 3)
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


def npz_records(path: Path, rules: ColumnRules) -> LabelledRecords:
    """The records of a `.npz` file. An array of inputs has no named columns, so rules for columns are refused."""
    inputs, labels, clients = read_npz(path, rules)
    if inputs is None:
        return as_records(read_frame(labels, rules, str(path)), rules)
    given = {"drop_columns": rules.dropped, "categories": rules.categories, "missing": rules.missing == "indicator",
             "range": set(rules.ranges) - set(rules.labels)}  # fmt: skip
    if refused := next((name for name, value in given.items() if value), None):
        raise DataError(f"{refused}: {path} holds its inputs in one array, which has no named columns")
    values, description = as_inputs(inputs, path)
    table = _label_columns(labels, clients, rules, path)
    if len(values) != len(table):
        raise DataError(f"{path} holds {len(values)} inputs but {len(table)} labels")
    owners, names = clients_of(table, rules.client) if rules.client is not None else (None, None)
    found = labels_to_targets(table, rules)
    pixels = inputs.dtype == np.uint8 and inputs.ndim > 2
    return LabelledRecords(
        inputs=values,
        targets=found.targets,
        classes=found.classes,
        task=rules.task,
        description=description,
        plain=np.ones(values.shape[1], dtype=bool),
        unscaled=() if pixels else ("the inputs",),
        owners=owners,
        names=names,
        target_range=found.span,
    )


def _label_columns(
    labels: dict[str, NDArray[Any]], clients: dict[str, NDArray[Any]], rules: ColumnRules, path: Path
) -> Columns:
    """Labels and clients as the columns of a table. An array [N, k] is k columns where the task has several labels."""
    several = rules.task in ("multilabel", "regression")
    columns: dict[str, Column] = {}
    roles: dict[str, Role] = {}
    for name, array in labels.items():
        if array.ndim == 2 and array.shape[1] > 1 and name in rules.ranges:
            raise DataError(f"range: {path} holds the label {name!r} in {array.shape[1]} columns; a range is for one")
        if array.ndim == 2 and (array.shape[1] == 1 or several):
            parts = {name if array.shape[1] == 1 else f"{name}[{k}]": array[:, k] for k in range(array.shape[1])}
        elif array.ndim == 1:
            parts = {name: array}
        else:
            raise DataError(f"{path} holds labels of shape {array.shape}: each record needs one label")
        for part, values in parts.items():
            if values.dtype.kind not in "iufbU":
                raise DataError(f"{path} holds labels of type {values.dtype}: they must be integers or strings")
            columns[part] = as_column(values, rules.is_text("label"), str(path), part)
            roles[part] = "label"
    for name, array in clients.items():
        columns[name], roles[name] = as_column(array, True, str(path), name), "client"
    if len({len(column) for column in columns.values()}) > 1:
        raise DataError(f"{path} holds labels and clients of different lengths")
    return Columns(str(path), columns, roles)


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


def read_npz(path: Path, rules: ColumnRules) -> tuple[NDArray[Any] | None, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """The inputs, the labels and the clients by name; pickled arrays are refused.

    Without labels in the rules, they are the second of the first of `PAIRS` that the file holds (upper or lower case).
    Without an array of inputs there are None, and the second answer holds all arrays: they are columns.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            most = most_unpacked(path.stat().st_size)
            stored = {name.lower(): name for name in arrays.files}
            pair = next((pair for pair in PAIRS if pair[0] in stored and pair[1] in stored), None)
            for option, names in (
                ("label_column", rules.labels),
                ("client_column", (rules.client,) if rules.client else ()),
            ):
                if unknown := next((name for name in names if name not in arrays.files), None):
                    raise DataError(f"{option}: {path} has no array {unknown!r}; it has {', '.join(arrays.files)}")
            if not rules.labels and pair is None:
                known = ", ".join("/".join(pair) for pair in PAIRS)
                raise DataError(f"{path} holds the arrays {', '.join(arrays.files) or '(none)'}: name them {known}")
            labels = rules.labels or (stored[pair[1]],) if pair else rules.labels
            taken = {*labels, rules.client}
            inputs = next((stored[name] for name, _ in PAIRS if name in stored and stored[name] not in taken), None)
            wanted = arrays.files if inputs is None else [inputs, *labels, *([rules.client] if rules.client else [])]
            found = {name: checked_member(arrays, name, most) for name in wanted}
    except DataError as error:
        raise error if str(path) in str(error) else DataError(f"{path}: {error}") from None
    except Exception as error:  # np.load passes on all errors of zipfile, zlib and its own header parser
        raise DataError(f"{path} cannot be read as a .npz file: {' '.join(str(error).split())}") from error
    if inputs is None:
        return None, found, {}
    clients = {rules.client: found[rules.client]} if rules.client else {}
    return found[inputs], {name: found[name] for name in labels}, clients
