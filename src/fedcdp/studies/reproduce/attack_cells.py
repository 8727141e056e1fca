"""Cells that attack: what a reader reconstructs, as `fedcdp attack` measures it, and the pictures of the first victims.

Settings, in the table `attack` of a cell: `leak`, `name`, `victims`, `network` (cpl, or paper: the one that is trained),
`recipe` (iterations, total_variation) and `look` (steps, releases).
"""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedcdp.config.experiment import Experiment
from fedcdp.engine.runtime import products
from fedcdp.errors import PlanError
from fedcdp.files.disk import write_atomically
from fedcdp.studies.reproduce.catalogue import Cell
from fedcdp.studies.reproduce.place import Place
from fedcdp.studies.reproduce.trained_cells import given
from fedcdp.training.prepared import deal_out, network_of

_SHOWN = 2  # victims whose pictures are kept
_KNOWN = {"leak", "name", "victims", "network", "recipe", "look"}


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:
    """Attack, and tell the figures; pictures go beside the result file."""
    from fedcdp.attacks import RECIPES, Leaks, attack

    torch.manual_seed(0)
    told = _asked(cell)
    started = time.perf_counter()
    experiment = experiment_of(cell, place)
    splits = place.splits(experiment)
    how: Any = told["name"]
    if told["recipe"]:
        changes = dict(told["recipe"])
        if "total_variation" in changes:
            weight = changes.pop("total_variation")
            changes["objective"] = replace(RECIPES[how].objective, total_variation=weight)
        how = RECIPES[how].but(**changes)
    with products(tf32=False):
        found = attack(
            experiment.plan,
            model=network_of(experiment, splits),
            federation=deal_out(experiment, splits),
            leak=told["leak"],
            attack=how,
            victims=told["victims"],
            device=place.device,
            **told["look"],
        )
    if not isinstance(found, Leaks):
        raise PlanError(f"{cell.name}: {told['name']} reconstructs nothing")
    _keep_pictures(found, table, cell, place)
    row = {"command": command(cell)} | found.summary() | {"attack": told["name"]}
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def experiment_of(cell: Cell, place: Place) -> Experiment:
    """What is attacked: by default the network that the paper's authors attack."""
    network = _asked(cell)["network"]
    return cell.experiment({"model": {"network": "auto" if network == "paper" else network}, "run": place.run})


def command(cell: Cell) -> str:
    """The same attack from the command line."""
    told = _asked(cell)
    options = "".join(f" --{key.replace('_', '-')} {value}" for key, value in (told["recipe"] | told["look"]).items())
    where = f"--network {told['network']} --leak {told['leak']} --attack {told['name']} --victims {told['victims']}"
    return f"fedcdp attack{given(cell)}{options} {where}"


def cost(cell: Cell) -> float:
    """In the unit of `training.cost`, roughly."""
    told = _asked(cell)
    iterations = int(told["recipe"].get("iterations", 300))
    return 30.0 * int(told["victims"]) * iterations * (5 if told["name"] == "batch" else 1)


def _asked(cell: Cell) -> dict[str, Any]:
    asked = cell.settings.get("attack", {})
    if unknown := set(asked) - _KNOWN:
        raise PlanError(f"{cell.name}: attack.{min(unknown)}: there is no such setting")
    return {"leak": "type2", "name": "cpl", "victims": 100, "network": "cpl", "recipe": {}, "look": {}, **asked}


def _keep_pictures(found: Any, table: str, cell: Cell, place: Place) -> None:
    kept = {"original": found.captured.inputs, "reconstruction": found.found.examples, "order": found.scores.order}
    kept |= {f"iteration_{number}": value for number, value in found.snapshots.items()} | {"seed": found.found.seeds}
    written = io.BytesIO()
    # Half precision: these are looked at, and a folder of them is to be kept in a repository.
    arrays = {name: value[:_SHOWN].detach().cpu() for name, value in kept.items()}
    plain: dict[str, Any] = {name: (v.half() if v.is_floating_point() else v).numpy() for name, v in arrays.items()}
    np.savez_compressed(written, **plain)
    write_atomically(place.arrays(table, cell), written.getvalue())
