"""Cells that train: accuracy after the last round, at a learning rate that was chosen without the validation split.

Where a cell has several `rates`, each is tried on a fifth of the *training* split, held out for that alone, for
`tuning_share` of the rounds; the best (the first of equals) then trains on the whole training split. A rate is a number, a
schedule as the plan writes it, or a rule about the rate found for the dataset and the noise: `found`, `found * 4 / C` or
`found * 6 / sigma`, so that a cell far from the paper's C = 4 or σ = 6 is not judged at a step that fits those. What is
found is in `presets.learning_rate`, or in the cell's own `found`, by noise convention. `rates` may also be a table of such
lists by dataset.

ε of a cell: as the paper computes it, and as it is. Computed from the plan alone, where dp-accounting is installed.
"""

from __future__ import annotations

import math
import shlex
import statistics
from dataclasses import replace
from typing import Any

import torch

from fedcdp.config import presets
from fedcdp.config.experiment import Experiment
from fedcdp.config.schedules import Schedule
from fedcdp.data.dataset import Splits
from fedcdp.errors import PlanError
from fedcdp.mechanism.randomness import numpy_generator
from fedcdp.studies.reproduce.catalogue import Cell
from fedcdp.studies.reproduce.place import Place
from fedcdp.training.simulate import Run, train_experiment

_PAPER_CLIP, _PAPER_NOISE = 4.0, 6.0
_TUNING_SHARE = 1 / 3
_EVALUATIONS = 10

Rate = float | str


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:
    """Choose the rate, train, and tell the accuracy (the mean over `splits`, where there are several)."""
    rates = rates_of(cell)
    tried = {f"{rate}": _train(table, cell, rate, 0, place, tuning=True).accuracy for rate in rates if len(rates) > 1}
    rate = max(rates, key=lambda each: tried.get(f"{each}") or 0.0)
    runs = [_train(table, cell, rate, seed, place) for seed in range(int(cell.settings.get("splits", 1)))]
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    if not accuracies:
        raise PlanError(f"{cell.name}: its data have no validation split")
    told: dict[str, Any] = {
        "command": command(cell, rate),
        "accuracy": statistics.mean(accuracies),
        "rate": rate,
        "rates_tried": tried,
        "rounds": runs[-1].rounds,
        "engine": runs[-1].engine,
        "us_per_client_step": runs[-1].us_per_client_step,
    }
    if len(accuracies) > 1:
        told |= {"accuracies": accuracies, "deviation": statistics.stdev(accuracies)}
    for name in cell.settings.get("curves", []):
        told.setdefault("curves", {})[name] = [
            [row["round"], row[name]] for row in runs[-1].metrics if row.get(name) is not None
        ]
    return told


def rates_of(cell: Cell) -> list[Rate]:
    """The rates to choose from, each once."""
    plan = cell.experiment().plan
    found = presets.learning_rate(cell.experiment().data.dataset, vars(plan))
    found = cell.settings.get("found", {}).get(plan.noise, found)
    rules: dict[object, float | None] = {"found": found}
    if found is not None and plan.private and isinstance(plan.clip, Schedule) and plan.clip.kind == "constant":
        rules["found * 4 / C"] = found * _PAPER_CLIP / plan.clip_at(0)
    if found is not None and plan.private and plan.noise_multiplier:
        rules["found * 6 / sigma"] = found * _PAPER_NOISE / plan.noise_multiplier
    rates: list[Rate] = []
    listed = cell.settings.get("rates", ["found"])
    if isinstance(listed, dict):  # by dataset
        listed = listed[cell.experiment().data.dataset]
    for written in listed:
        rate = rules.get(written, written)
        if rate is None:
            raise PlanError(f"{cell.name}: no learning rate is known for its data; give rates")
        rates.append(float(f"{rate:.6g}") if isinstance(rate, int | float) else str(rate))
    return list(dict.fromkeys(rates))


def tuning_share(cell: Cell) -> float:
    """The share of the rounds that each rate is tried for."""
    return float(cell.settings.get("tuning_share", _TUNING_SHARE))


def command(cell: Cell, rate: Rate) -> str:
    """The same training from the command line (of the first split)."""
    return f"fedcdp train{given(cell)} --lr {shlex.quote(str(rate))} --out RUN"


def given(cell: Cell) -> str:
    """A cell's preset and what it changes of it, as options."""
    start = f" --preset {cell.settings['preset']}" if "preset" in cell.settings else ""
    changes = [
        f" --set {shlex.quote(f'{section}.{key}={value}')}"
        for section in ("data", "model", "plan")
        for key, value in cell.settings.get(section, {}).items()
    ]
    return start + "".join(changes)


def for_tuning(splits: Splits) -> Splits:
    """The training split alone, a fifth of it in the place of the validation split."""
    order = torch.from_numpy(numpy_generator(0, "tuning-split").permutation(len(splits.train)))
    held_out = len(order) // 5
    return replace(splits, train=splits.train.take(order[held_out:]), validation=splits.train.take(order[:held_out]))


def _train(table: str, cell: Cell, rate: Rate, seed: int, place: Place, tuning: bool = False) -> Run:
    """One run, which goes on from its last round where it was killed before."""
    experiment = cell.experiment(
        {"data": {"split_seed": seed}, "plan": {"learning_rate": rate}, "run": _machine_settings(cell, place)}
    )
    splits = place.splits(experiment)
    if tuning:
        splits = for_tuning(splits)
        rounds = max(1, round(experiment.plan.rounds * tuning_share(cell)))
        experiment = replace(experiment, plan=experiment.plan.but(rounds=rounds))
    folder = place.scratch(table, cell) / f"{'rate' if tuning else 'split'}-{seed}-{experiment.plan.digest()}"
    return train_experiment(experiment, folder, resume=(folder / "config.toml").exists(), splits=splits)


def _machine_settings(cell: Cell, place: Place) -> dict[str, Any]:
    rounds = cell.experiment().plan.rounds
    return {"evaluate_every": max(1, rounds // _EVALUATIONS), **cell.settings.get("run", {}), **place.run}


def cost(cell: Cell) -> float:
    """Client steps, about, with what a step costs however few clients take it; to begin with what is cheap."""
    experiment: Experiment = cell.experiment()
    plan, images = experiment.plan, experiment.data.dataset in ("cifar10", "lfw")
    rates = len(rates_of(cell))
    share = tuning_share(cell) * rates if rates > 1 else 0.0
    steps = plan.rounds * plan.local_steps * (300 + plan.per_round * (3 if images else 1))
    return steps * (share + int(cell.settings.get("splits", 1)))


ROWS = {
    "fed-cdp": (("server", "record"), ("server", "unique"), ("example", "record"), ("server", "client")),
    "fed-cdp-decay": (("server", "record"), ("server", "unique"), ("example", "record"), ("server", "client")),
    "fed-sdp": (("model", "client"), ("server", "client"), ("server", "record"), ("example", "record")),
}
"""Which ε are told of a method: adversary and unit, zero-out."""


def epsilons(cell: Cell) -> dict[str, Any] | None:
    """`printed`: by the paper's own accounting, no guarantee; the others are guarantees. None of a method without any."""
    from fedcdp.accounting.statement import state
    from fedcdp.training.prepared import population_of

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


def measure_epsilons(table: str, cell: Cell, place: Place) -> dict[str, Any]:  # noqa: ARG001
    """A cell that is nothing but its ε."""
    plan = cell.experiment().plan
    command = f"fedcdp account --preset {cell.settings['preset']} --method {plan.method} --local-steps {plan.local_steps}"
    return {"command": command, "epsilon": epsilons(cell)}


def _in_json(value: float) -> float | str:
    return "inf" if value == math.inf else value
