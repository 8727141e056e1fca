"""How a cell is measured, by its kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fedcdp._version import __version__
from fedcdp.config.experiment import MachineSettings
from fedcdp.errors import PlanError
from fedcdp.studies.reproduce import attack_cells, tradeoff, trained_cells
from fedcdp.studies.reproduce.catalogue import Cell
from fedcdp.studies.reproduce.place import Place

Measure = Callable[[str, Cell, Place], dict[str, Any]]


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:
    """A cell's row of the result file: what was found, by what command, on what machine, and how long it took."""
    check_kind(cell)
    torch.set_num_threads(1)
    started = time.perf_counter()
    found = KINDS[cell.kind](table, cell, place)
    about = {"machine": place.machine(), "fedcdp": __version__, "run": place.run, "settings": cell.settings}
    return found | {"seconds": round(time.perf_counter() - started, 2)} | about


def cost(cell: Cell) -> float:
    """How much work a cell is beside others of its table; for the order in which they are run."""
    check_kind(cell)
    return _COST[cell.kind](cell) if cell.kind in _COST else 0.0


def check_kind(cell: Cell) -> None:
    """Refuse a cell that nothing here can measure."""
    if cell.kind not in KINDS:
        raise PlanError(f"{cell.name}: kind: {cell.kind!r} is not one of {', '.join(KINDS)}")


def measure_time(table: str, cell: Cell, place: Place) -> dict[str, Any]:  # noqa: ARG001
    """The paper's setting for a dataset and a method, timed as in the section `steps` of a bench."""
    from fedcdp.studies.bench.sections import Bench

    settings = cell.settings
    dataset, method = settings["preset"], settings["plan"]["method"]
    bench = Bench(
        MachineSettings(**place.run),
        place.data_dir,
        int(settings.get("repeat", 3)),
        seconds=float(settings.get("seconds", 1)),
    )
    case = bench.case(cell.name, dataset, method=method)
    (timing,) = bench.compare([case], lambda _: None)
    figures = timing.figures()
    return {
        "command": f"fedcdp bench --section steps --device {place.device}",
        "data": case.subject.data,
        "per_round": bench.per_round,
        "us": figures["us_per_client_step"],
        "cpu_us": figures["cpu_us_per_client_step"],
        "engine": figures["trained_by"],
        "local_steps": figures["local_steps"],
    }


KINDS: dict[str, Measure] = {
    "training": trained_cells.measure,
    "attack": attack_cells.measure,
    "epsilon": trained_cells.measure_epsilons,
    "time": measure_time,
    "tradeoff": tradeoff.measure,
}
"""What measures each kind."""

_COST: dict[str, Callable[[Cell], float]] = {
    "training": trained_cells.cost,
    "attack": attack_cells.cost,
    "tradeoff": trained_cells.cost,
}
