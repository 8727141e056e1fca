"""The result file of a table: cells as they were measured, whole on disk after every one of them.

Trainings that several tables have in common: what one of them has measured, the others need not run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedcdp.errors import RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.untrusted import MOST_JSON, parse_json, read_bounded
from fedcdp.studies.reproduce.catalogue import Cell, Table
from fedcdp.studies.reproduce.trained_cells import Rate, rates_of, tuning_share

FORMAT = "fedcdp-reproduction-1"


class TableResults:
    """What is known of a table.

    A cell that was measured under other settings than its table has now is not counted; it stays in the file, apart, and
    counts again should the table's settings come back.
    """

    def __init__(self, table: Table, out: Path) -> None:
        self.table = table
        self.path = out / f"{table.name}.json"
        stored = _read(self.path, table.name) if os.path.lexists(self.path) else {}
        self.cells = {name: row for name, row in stored.items() if self._fits(name, row)}
        self.stale = {name: row for name, row in stored.items() if name not in self.cells}

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those that are still to be measured."""
        return [cell for cell in cells if cell.name not in self.cells]

    def keep(self, cell: Cell, row: dict[str, Any]) -> None:
        """Take a cell in; it is on the disk when this returns."""
        self.cells[cell.name] = row
        self.stale.pop(cell.name, None)
        self.write()

    def write(self, sections: list[dict[str, Any]] | None = None) -> None:
        """Write the file: the cells in the table's order, and the rows made of them where they are made."""
        ordered = {name: self.cells[name] for name in self.table.cells if name in self.cells}
        content: dict[str, Any] = {"format": FORMAT, "table": self.table.name, "title": self.table.title}
        if sections is not None:
            content["sections"] = sections
        content["cells"] = ordered
        if self.stale:
            content["other_settings"] = self.stale
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        self.write_beside(".json", text.encode() + b"\n")

    def write_beside(self, suffix: str, content: bytes) -> Path:
        """Write a file of the table's name with another ending."""
        path = self.path.with_suffix(suffix)
        try:
            write_atomically(path, content)
        except OSError as error:
            raise RunError(f"--out: {path} cannot be written: {error.strerror}") from error
        return path

    def _fits(self, name: str, row: dict[str, Any]) -> bool:
        cell = self.table.cells.get(name)
        return cell is not None and row.get("settings") == json.loads(json.dumps(cell.settings))


def _read(path: Path, table: str) -> dict[str, dict[str, Any]]:
    try:
        content = parse_json(read_bounded(path, MOST_JSON))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("table") != table:
        raise RunError(f"{path} is not a result file of fedcdp reproduce {table}")
    parts = [content.get("other_settings", {}), content.get("cells")]
    if not all(_is_plain(part) and all(isinstance(row, dict) for row in part.values()) for part in parts):
        raise RunError(f"{path} is damaged: its cells are not what was measured")
    return {**parts[0], **parts[1]}


def _is_plain(value: object) -> bool:
    """Whether this is a table of plain values that can be written again."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def shared(cells: list[Cell], known: list[Table], out: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Those of the cells that some table's result file has already, with its row, which says where it was taken from.

    The same: data, network, plan, learning rate and how it was chosen, and splits.
    """
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for table in known:
        for name, row in TableResults(table, out).cells.items():
            for key in _keys_of_row(table.cells[name], row):
                rows.setdefault(key, (f"{table.name}: {name}", row))
    for cell in cells:
        found = rows.get(_key(cell, rates_of(cell))) if _is_plain_row(cell) else None
        if found is not None:
            origin, row = found
            yield cell, {"taken_from": origin} | row | {"settings": cell.settings}


def _is_plain_row(cell: Cell) -> bool:
    return cell.kind == "training" and "curves" not in cell.settings


def _keys_of_row(cell: Cell, row: dict[str, Any]) -> Iterator[str]:
    """What a row may stand for: the choice among its rates, and the training at the rate that was chosen."""
    if _is_plain_row(cell):
        yield _key(cell, rates_of(cell))
        yield _key(cell, [row["rate"]])


def _key(cell: Cell, rates: list[Rate]) -> str:
    experiment = cell.experiment({"plan": {"learning_rate": rates[0]}})
    told = {
        "data": vars(experiment.data),
        "model": vars(experiment.model),
        "plan": experiment.plan.written() | {"learning_rate": [str(rate) for rate in rates]},
        "splits": cell.settings.get("splits", 1),
        "tuning": tuning_share(cell) if len(rates) > 1 else None,
    }
    return json.dumps(told, sort_keys=True)
