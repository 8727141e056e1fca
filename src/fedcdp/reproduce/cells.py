"""How a cell is measured, by its kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

import fedcdp
from fedcdp.errors import PlanError
from fedcdp.reproduce import attacking, training
from fedcdp.reproduce.catalogue import Cell
from fedcdp.reproduce.place import Place

KINDS = {
    "training": "training",
    "attack": "attacking",
    "epsilon": "accounts",
    "time": "timing",
    "tradeoff": "tradeoff",
}
"""The module that measures each kind."""

_COST: dict[str, Callable[[Cell], float]] = {
    "training": training.cost, "attack": attacking.cost, "tradeoff": training.cost
}  # fmt: skip


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:
    """A cell's row of the result file: what was found, by what command, on what machine, and how long it took."""
    check_kind(cell)
    torch.set_num_threads(1)
    started = time.perf_counter()
    module = import_module(f"fedcdp.reproduce.{KINDS[cell.kind]}")
    found: dict[str, Any] = module.measure(table, cell, place)
    about = {"machine": place.machine(), "fedcdp": fedcdp.__version__, "run": place.run, "settings": cell.settings}
    return found | {"seconds": round(time.perf_counter() - started, 2)} | about


def cost(cell: Cell) -> float:
    """How much work a cell is beside others of its table; for the order in which they are run."""
    check_kind(cell)
    return _COST[cell.kind](cell) if cell.kind in _COST else 0.0


def check_kind(cell: Cell) -> None:
    """Refuse a cell that nothing here can measure."""
    if cell.kind not in KINDS:
        raise PlanError(f"{cell.name}: kind: {cell.kind!r} is not one of {', '.join(KINDS)}")
