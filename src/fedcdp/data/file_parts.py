"""Some records of a user's own table as a file of their own, in the format of the whole file."""

from __future__ import annotations

import csv
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcdp.data.table_files import delimiter_of


def file_part(path: Path, rows: NDArray[np.int64], delimiter: str | None = None) -> bytes:
    """The records `rows` of a file that `own_files` has read before, in this order."""
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return _csv_part(path, rows, delimiter)
    content = BytesIO()
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        pq.write_table(pq.read_table(path).take(rows), content)
    else:
        with np.load(path, allow_pickle=False) as arrays:
            np.savez(content, **{name: arrays[name][rows] for name in arrays.files})
    return content.getvalue()


def _csv_part(path: Path, rows: NDArray[np.int64], delimiter: str | None) -> bytes:
    with path.open(newline="", encoding="utf-8-sig") as file:
        found = delimiter or delimiter_of(file)
        header, *records = (cells for cells in csv.reader(file, delimiter=found, strict=True) if cells)
    written = StringIO(newline="")
    writer = csv.writer(written, delimiter=found, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(records[row] for row in rows.tolist())
    return written.getvalue().encode()
