"""ε of a cell: as the paper computes it, and as it is. Computed from the plan alone, where dp-accounting is installed."""

from __future__ import annotations

import math
from typing import Any

from fedcdp.reproduce.catalogue import Cell
from fedcdp.reproduce.place import Place

ROWS = {
    "fed-cdp": (("server", "record"), ("server", "unique"), ("example", "record"), ("server", "client")),
    "fed-cdp-decay": (("server", "record"), ("server", "unique"), ("example", "record"), ("server", "client")),
    "fed-sdp": (("model", "client"), ("server", "client"), ("server", "record"), ("example", "record")),
}
"""Which ε are told of a method: adversary and unit, zero-out."""


def epsilons(cell: Cell) -> dict[str, Any] | None:
    """`printed`: by the paper's own accounting, no guarantee; the others are guarantees. None of a method without any."""
    from fedcdp.accounting.described import population_of
    from fedcdp.accounting.statement import state

    experiment = cell.experiment()
    plan = experiment.plan
    if plan.method not in ROWS:
        return None
    population = population_of(experiment)
    printed = state(plan, population, mode="paper").rows[0].epsilon
    privacy = state(plan, population)
    told = {}
    for adversary, unit in ROWS[plan.method]:
        stored_once = unit == "unique" and population.copies == 1  # then a record is all that there is of its person
        told[f"{adversary}/{unit}"] = privacy.row(adversary, "record" if stored_once else unit).epsilon
    return {"delta": plan.delta, "printed": printed} | {name: _in_json(value) for name, value in told.items()}


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:  # noqa: ARG001
    """A cell that is nothing but its ε."""
    plan = cell.experiment().plan
    command = f"fedcdp account --preset {cell.settings['preset']} --method {plan.method} --local-steps {plan.local_steps}"
    return {"command": command, "epsilon": epsilons(cell)}


def _in_json(value: float) -> float | str:
    return "inf" if value == math.inf else value
