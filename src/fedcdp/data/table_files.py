"""Tables from `.csv` and `.parquet` files, data frames and named arrays, all as `Columns`.

A column is read as numbers or as texts, as its role demands. What cannot be read is named by line (or record) and column.
No message quotes a value: it is private.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from fedcdp.data.table_columns import Column, Columns, is_missing, text_column
from fedcdp.data.table_rules import DELIMITERS, ColumnRules, Role, text_of
from fedcdp.errors import DataError
from fedcdp.files.untrusted import most_unpacked

_BLOCK = 4096  # records that are held as text at a time


def read_csv(path: Path, rules: ColumnRules) -> Columns:
    """A `.csv` file in UTF-8 with a header row; cells may be quoted, empty lines are skipped."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _parse(file, path, rules)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read as a .csv file: it is not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read as a .csv file: {error.strerror}") from error


def _parse(file: TextIO, path: Path, rules: ColumnRules) -> Columns:
    delimiter = rules.delimiter or delimiter_of(file)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    header: list[str] = []
    lines: list[int] = []
    rows: list[list[str]] = []
    parts: dict[str, list[Column]] = {}
    roles: dict[str, Role] = {}
    line = 1
    try:
        header = [name.strip() for name in next(reader, [])]
        roles = rules.roles(header, str(path))
        parts = {name: [] for name, role in roles.items() if role != "unused"}
        seen: dict[str, str] = {}
        line = reader.line_num + 1
        for cells in reader:
            if cells:
                if len(cells) != len(header):
                    raise DataError(f"{path}, line {line}: {len(cells)} values instead of {len(header)}")
                rows.append(cells)
                lines.append(line)
            line = reader.line_num + 1
            if len(rows) == _BLOCK:
                _add_block(parts, roles, rules, header, rows, lines[-len(rows) :], seen, path)
                rows = []
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: {error}") from error
    if rows:
        _add_block(parts, roles, rules, header, rows, lines[-len(rows) :], seen, path)
    values = {name: np.concatenate(found) if found else np.empty(0) for name, found in parts.items()}
    return Columns(str(path), values, roles, np.array(lines, dtype=np.int64))


def delimiter_of(file: TextIO) -> str:
    """The delimiter that cuts the header line into the most columns; of equals, the comma, then the semicolon."""
    first = file.readline()
    file.seek(0)

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader([first], delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max(DELIMITERS.values(), key=columns)


def _add_block(
    parts: dict[str, list[Column]],
    roles: dict[str, Role],
    rules: ColumnRules,
    header: Sequence[str],
    rows: list[list[str]],
    lines: Sequence[int],
    seen: dict[str, str],
    path: Path,
) -> None:
    """Append the cells of some rows to the columns; equal texts are stored once."""
    for name, cells in zip(header, zip(*rows, strict=True), strict=True):
        if roles[name] == "unused":
            continue
        if rules.is_text(roles[name]):
            texts: Column = np.empty(len(cells), dtype=object)
            texts[:] = [seen.setdefault(text, text) for text in map(str.strip, cells)]
            parts[name].append(texts)
            continue
        values = _all_numbers(cells)
        if values is None:
            values = np.empty(len(cells))
            for number, cell in enumerate(cells):
                values[number] = _number(cell, f"{path}, line {lines[number]}, column {name!r}", name)
        parts[name].append(values)


def _all_numbers(cells: Sequence[str]) -> Column | None:
    """The cells as numbers, or None if one of them is not a number, or is missing."""
    if "_" in "".join(cells):  # Python reads 1_000 as a number; in a table it is a mistake
        return None
    try:
        return np.array([float(cell) for cell in cells])
    except ValueError:
        return None


def _number(cell: str, where: str, name: str) -> float:
    """A cell as a number; NaN if it is missing."""
    text = cell.strip()
    if is_missing(text):
        return math.nan
    if (values := _all_numbers([text])) is not None:
        return float(values[0])
    if _all_numbers([text.replace(",", ".", 1)]) is not None:
        raise DataError(f"{where}: there is no finite number; write numbers with a decimal point, not a comma")
    raise DataError(
        f"{where}: there is no finite number; if the column is text, list its values with "
        f"--categories '{name}=first|second', or leave it out with --drop-columns {name}"
    )


def read_parquet(path: Path, rules: ColumnRules) -> Columns:
    """A `.parquet` file. Only the columns that are used are read."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            f"{path}: a .parquet file needs pyarrow, which is not installed: pip install 'fedcdp[tables]'"
        ) from None
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            texts = [f.name for f in file.schema_arrow if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
            rows = file.metadata.num_rows
    except Exception as error:  # pyarrow passes on all errors of its parsers
        raise DataError(f"{path} cannot be read as a .parquet file: {' '.join(str(error).split())[:200]}") from error
    roles = rules.roles(names, str(path))
    used = [name for name, role in roles.items() if role != "unused"]
    most = most_unpacked(path.stat().st_size)
    if rows * len(used) * 8 > most:
        raise DataError(f"{path} unpacks to {rows * len(used) * 8:,} bytes; at most {most:,} are read: store it as .csv")
    parts: dict[str, list[Column]] = {name: [] for name in used}
    done = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False, read_dictionary=texts) as file:
            for batch in file.iter_batches(2**16, columns=used, use_threads=False):
                done += batch.num_rows
                if done > rows:
                    raise DataError(f"{path} holds more than the {rows} records that it declares")
                for name in used:  # pyarrow also reads x.1 where x is asked for
                    chunk = batch.column(name)
                    parts[name].append(_chunk(chunk, rules.is_text(roles[name]), str(path), name, done))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} cannot be read as a .parquet file: the pages of its columns are damaged") from error
    return Columns(
        str(path), {name: np.concatenate(found) if found else np.empty(0) for name, found in parts.items()}, roles
    )


def _chunk(chunk: Any, as_text: bool, source: str, name: str, done: int) -> Column:
    """A part of a Parquet column. Texts come as numbers into a list, so a long text that repeats is stored once."""
    first = done - len(chunk)
    if not hasattr(chunk, "dictionary"):
        return as_column(chunk.to_numpy(zero_copy_only=False), as_text, source, name, first)
    known = chunk.indices.is_valid().to_numpy(zero_copy_only=False)
    indices = np.where(known, chunk.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), -1)
    used, firsts, positions = np.unique(indices, return_index=True, return_inverse=True)
    read = _text_value if as_text else _number_value
    found = [
        read(None if index < 0 else chunk.dictionary[index].as_py(), f"{source}, record {first + at}, column {name!r}", name)
        for index, at in zip(used.tolist(), firsts.tolist(), strict=True)
    ]
    return np.array(found, dtype=object if as_text else np.float64)[positions]


def read_frame(frame: Any, rules: ColumnRules, source: str = "the frame") -> Columns:
    """A pandas data frame, anything that has `columns` and `frame[name]`, or a mapping of names to arrays."""
    try:
        names = list(frame if isinstance(frame, Mapping) else frame.columns)
    except (AttributeError, TypeError):
        raise DataError(f"{source} is {type(frame).__name__}: a data frame with named columns is needed") from None
    if not all(isinstance(name, str) for name in names):
        raise DataError(f"{source} has a column whose name is no text; rename the columns, such as with columns.astype(str)")
    roles = rules.roles(names, source)
    values = {}
    for name, role in roles.items():
        if role == "unused":
            continue
        array = _as_array(frame[name], f"{source}, column {name!r}")
        values[name] = as_column(array, rules.is_text(role), source, name)
    lengths = {name: len(column) for name, column in values.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{source} has columns of different lengths: {', '.join(f'{n} {k}' for n, k in lengths.items())}")
    return Columns(source, values, roles)


def _as_array(column: Any, where: str) -> NDArray[Any]:
    """A column of a frame as an array; a list keeps each value as it is."""
    if hasattr(column, "to_numpy"):
        return np.asarray(column.to_numpy())
    if hasattr(column, "__array__"):
        return np.asarray(column)
    if not isinstance(column, Sequence) or isinstance(column, str | bytes):
        raise DataError(f"{where} is a {type(column).__name__}: a list or an array is needed")
    array = np.empty(len(column), dtype=object)
    for number, value in enumerate(column):
        array[number] = value
    return array


def as_column(values: NDArray[Any], as_text: bool, source: str, name: str, first: int = 0) -> Column:
    """An array as a column of numbers or of texts; `first` is the number of its first record."""
    where, kind = f"{source}, column {name!r}", values.dtype.kind
    if values.ndim != 1:
        raise DataError(f"{where} holds an array of shape {values.shape}: one value for each record is needed")
    if kind in "iufb":
        return text_column(values) if as_text else values.astype(np.float64)
    if kind not in "UTO":
        raise DataError(f"{where} holds {values.dtype} values: turn them into numbers or text, or use --drop-columns {name}")
    read = _text_value if as_text else _number_value
    found = [
        read(value, f"{source}, record {first + number}, column {name!r}", name)
        for number, value in enumerate(values.tolist())
    ]
    column = np.empty(len(found), dtype=object if as_text else np.float64)
    column[:] = found
    return column


def _text_value(value: Any, where: str, name: str) -> str | None:
    if isinstance(value, str):
        return value.strip()
    number = _number_value(value, where, name)
    return None if math.isnan(number) else text_of(value if isinstance(value, bool | int) else number)


def _number_value(value: Any, where: str, name: str) -> float:
    if isinstance(value, str):
        return _number(value, where, name)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas' marks for a missing value
        return math.nan
    try:
        if isinstance(value, Real | Decimal):
            return float(value)
    except (OverflowError, ValueError):
        raise DataError(f"{where}: there is no finite number") from None
    raise DataError(
        f"{where}: there is a {type(value).__name__}; turn it into a number or text, or use --drop-columns {name}"
    )
