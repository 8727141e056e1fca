"""Targets: a user's own tables, with any rules for their columns. No refusal may quote a cell."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

from fedcdp.data import load_file
from fedcdp.data.own_files import splits_of_frame
from fedcdp.data.partition import partition
from fedcdp.data.table_rules import column_rules
from fedcdp.errors import FedcdpError
from tools.fuzz.mutations import HOSTILE_TEXTS, hostile_value, mutate_bytes

Attempt = Callable[[Random, Path], None]

SECRET = "Zx81secret"
HEADER = ("site", "id", "age", "sex", "bmi", "ill")
CELLS = (
    "", " ", "NA", "nan", "NULL", "inf", "-inf", "1e39", "1e400", "1_000", "٣", "0x10", "1,5", "f", "m", "yes", "0", "1",
    "0.5", "-0", "9" * 30, '"', '"a""b"', '"a\nb"', "=cmd()", SECRET, SECRET * 20, "True", *HOSTILE_TEXTS,
)  # fmt: skip
COLUMNS_FILES = (
    b'[sex]\ncategories = ["f", "m"]\n[age]\nrange = [0, 120]\n',
    b"[ill]\nrange = [0, 1]\n",
    b'["age"]\ncategories = [1, 2.5, true]\n',
)


def options(case: Random, place: Path, names: Sequence[str] = HEADER) -> dict[str, Any]:
    """Rules that a user may give, rightly or wrongly."""
    near = (*names, *names, *HOSTILE_TEXTS[:9], "a,b", '"a', "site,age")
    choices: dict[str, tuple[Any, ...]] = {
        "client": ("site", "site", "age", *near),
        "label": ("ill", "ill", "age", ["ill", "age"], "ill,age", *near),
        "drop": ("id", "id,bmi", ["id"], *near),
        "task": ("classification", "binary", "multilabel", "regression", "regression", "custom", ""),
        "categories": (
            "sex=f|m",
            "sex=f|m,bmi=1|2",
            {"sex": ["f", "m"]},
            {"sex": [hostile_value(case)]},
            "sex",
            "=",
            "sex=|",
        ),
        "ranges": ({"age": (0, 120)}, {"ill": (0, 1)}, {"age": hostile_value(case)}, {"age": (1, 0)}),
        "classes": ("no|yes", "0|1", ["a", "b", "c"], "0", [hostile_value(case), 1]),
        "missing": ("indicator", "indicator", "refuse", "mean"),
        "delimiter": ("comma", "semicolon", ";", "\t", "|", ""),
        "scaling": ("training", "public", "private", "none"),
        "validation_fraction": (0.5, 0.01, 0.99, 0.0, -1.0, float("nan")),
    }
    given = (
        {"client": "site", "label": "ill", "categories": "sex=f|m", "missing": "indicator"} if case.random() < 0.9 else {}
    )
    for name in case.sample(sorted(choices), case.choice((0, 0, 1, 1, 3))):
        given[name] = case.choice(choices[name])
    if case.random() < 0.2:
        content = case.choice(COLUMNS_FILES)
        (place / "columns.toml").write_bytes(content if case.random() < 0.4 else mutate_bytes(case, content))
        given["columns"] = place / "columns.toml"
    return given


def _read(path: Path, given: dict[str, Any], secret: bool) -> None:
    """Read a table as a federation. A refusal that quotes a cell is a finding."""
    try:
        splits = load_file(path, **given)
        partition(splits, None if splits.owners is not None else 2, None if splits.owners is not None else "iid")
    except FedcdpError as error:
        if secret and SECRET in str(error):
            raise AssertionError(f"a cell is quoted: {error}") from error
        raise


def csv_rules(_place: Path) -> Attempt:
    """A `.csv` file with named clients, read with rules."""

    def attempt(case: Random, place: Path) -> None:
        delimiter = case.choice((",", ";", "\t"))
        rows = [
            [case.choice(("Ulm", "Jena")), str(n), str(20 + n), case.choice("fmd"), case.choice(("27.5", "NA")), str(n % 2)]
            for n in range(case.choice((0, 1, 12, 12, 12, 60)))
        ]
        for _ in range(case.choice((0, 1, 1, 3, 10)) if rows else 0):
            row = case.choice(rows)
            row[case.randrange(len(row))] = case.choice(CELLS)
        text = "\n".join(delimiter.join(row) for row in [list(HEADER), *rows])
        content = text.encode("utf-8", "surrogatepass")
        whole = case.random() < 0.6
        path = place / "own.csv"
        path.write_bytes(content if whole else mutate_bytes(case, content))
        given = options(case, place)
        # With another delimiter the first record may become part of a name; names are public.
        _read(path, given, secret=whole and "\n" not in "".join(map("".join, rows)) and "delimiter" not in given)

    return attempt


def parquet(_place: Path) -> Attempt:
    """A `.parquet` file: bytes changed in any part of it, columns of every type, and files that unpack to gigabytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def stored(table: Any, **form: Any) -> bytes:
        content = BytesIO()
        pq.write_table(table, content, **form)
        return content.getvalue()

    rows = 12
    plain: dict[str, Any] = {
        "site": ["Ulm", "Jena"] * 6, "id": list(range(rows)), "age": [20.5, None, 40.0] * 4, "sex": ["f", "m", None] * 4,
        "bmi": [decimal.Decimal("27.5"), None] * 6, "ill": [True, False] * 6,
    }  # fmt: skip
    forms: list[dict[str, Any]] = [{"compression": each} for each in ("none", "snappy", "gzip", "zstd", "brotli", "lz4")]
    forms += [{"use_dictionary": False}, {"data_page_version": "2.0"}, {"row_group_size": 3}, {"write_page_index": True}]
    seeds = [stored(pa.table(plain), **form) for form in forms]
    odd: list[Any] = [
        pa.array([[1], None] * 6), pa.array([{"a": 1}, None] * 6), pa.array([SECRET, "1"] * 6), pa.nulls(rows),
        pa.array([SECRET.encode()] * rows), pa.array([date(2020, 1, 1)] * rows), pa.array([timedelta(1)] * rows),
        pa.array([float("nan"), float("inf")] * 6), pa.array([2**64 - 1] * rows, pa.uint64()),
        pa.array([1.0] * rows, pa.float16()),
        pa.array([SECRET * 30] * rows, pa.large_string()), pa.array(["f", SECRET] * 6).dictionary_encode(),
        pa.array([[(1, 2)]] * rows, pa.map_(pa.int8(), pa.int8())), pa.array([10**30] * rows, pa.decimal256(60, 2)),
        pa.array(["\0", "\u202e"] * 6), pa.array([1, 2] * 6, pa.timestamp("ns", "UTC")),
    ]  # fmt: skip
    long_text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), ["x" * 10**6])
    bombs = [
        stored(pa.table({"age": pa.nulls(10**8), "ill": pa.nulls(10**8)})),
        stored(pa.table({"sex": long_text, "age": [1] * 2000, "site": ["a"] * 2000, "ill": [0, 1] * 1000})),
    ]

    def attempt(case: Random, place: Path) -> None:
        path, kind = place / "own.parquet", case.random()
        columns = dict(plain)
        if kind < 0.5:
            path.write_bytes(mutate_bytes(case, case.choice(seeds), seeds))
        elif kind < 0.998:
            for _ in range(case.choice((0, 1, 2))):
                columns[case.choice((*HEADER, "more", ""))] = case.choice(odd)
            names = [case.choice(HEADER) if case.random() < 0.02 else name for name in columns]
            table = pa.Table.from_arrays(
                [pa.array(each) if isinstance(each, list) else each for each in columns.values()], names
            )
            path.write_bytes(stored(table.slice(0, case.choice((0, 1, 12, 12, 12))), **case.choice(forms)))
        else:
            path.write_bytes(case.choice(bombs))
        _read(path, options(case, place), secret=True)

    return attempt


def frames(_place: Path) -> Attempt:
    """A data frame whose columns hold anything."""

    def attempt(case: Random, place: Path) -> None:
        rows = case.choice((1, 8, 8))
        table: dict[Any, Any] = {name: [n % 2 for n in range(rows)] for name in HEADER}
        for _ in range(case.choice((1, 2, 4))):
            values = [case.choice((1, 2.5, None, "f", True, SECRET, decimal.Decimal("NaN"))) for _ in range(rows)]
            if case.random() < 0.3:
                values[0] = hostile_value(case)
            table[case.choice((*HEADER, "more"))] = values if case.random() < 0.9 else values[1:]
        given = options(case, place)
        rest = {"scaling": None, "validation_fraction": 0.2} | given
        rules = column_rules(
            **{name: value for name, value in given.items() if name not in ("scaling", "validation_fraction")}
        )
        try:
            splits_of_frame(table, rules, rest["scaling"], 0, rest["validation_fraction"])
        except FedcdpError as error:
            if SECRET in str(error):
                raise AssertionError(f"a cell is quoted: {error}") from error
            raise

    return attempt


TARGETS: dict[str, Callable[[Path], Attempt]] = {
    "own csv with rules": csv_rules,
    "own parquet": parquet,
    "own frame": frames,
}
