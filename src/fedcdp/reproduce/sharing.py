"""Trainings that several tables have in common: what one of them has measured, the others need not run again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedcdp.reproduce.catalogue import Cell, Table
from fedcdp.reproduce.results import Results
from fedcdp.reproduce.training import Rate, rates_of, tuning_share


def shared(cells: list[Cell], known: list[Table], out: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Those of the cells that some table's result file has already, with its row, which says where it was taken from.

    The same: data, network, plan, learning rate and how it was chosen, and splits.
    """
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for table in known:
        for name, row in Results(table, out).cells.items():
            for key in _keys_of_row(table.cells[name], row):
                rows.setdefault(key, (f"{table.name}: {name}", row))
    for cell in cells:
        found = rows.get(_key(cell, rates_of(cell))) if _is_plain(cell) else None
        if found is not None:
            origin, row = found
            yield cell, {"taken_from": origin} | row | {"settings": cell.settings}


def _is_plain(cell: Cell) -> bool:
    return cell.kind == "training" and "curves" not in cell.settings


def _keys_of_row(cell: Cell, row: dict[str, Any]) -> Iterator[str]:
    """What a row may stand for: the choice among its rates, and the training at the rate that was chosen."""
    if _is_plain(cell):
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
