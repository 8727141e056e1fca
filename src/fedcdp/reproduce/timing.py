"""Cells that are timed: what a local iteration of one client costs, by `fedcdp bench`."""

from __future__ import annotations

from typing import Any

from fedcdp.experiment import MachineSettings
from fedcdp.reproduce.catalogue import Cell
from fedcdp.reproduce.place import Place


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:  # noqa: ARG001
    """The paper's setting for a dataset and a method, timed as in the section `steps` of a bench."""
    from fedcdp.bench.sections import Bench

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
