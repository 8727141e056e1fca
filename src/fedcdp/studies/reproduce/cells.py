"""Measure cells: by training, by attacking, by timing, or by computing only ε.

**Training**: accuracy after the last round, at a learning rate chosen without the validation split. If a cell has several
`rates`, each is tried on a fifth of the *training* split, held out for that alone, for `tuning_share` of the rounds; the
best (the first of equals) then trains on the whole training split. A rate is a number, a schedule in the plan's notation, or
a rule based on the rate found for the dataset and the noise: `found`, `found * 4 / C` or `found * 6 / sigma`. With these
rules, a cell far from the paper's C = 4 or σ = 6 is not judged at a step size that only fits those. The found rates are in
`presets.learning_rate`, or in the cell's own `found`, by noise convention. Where the best of several numbers or schedules is
the largest or the smallest, twice or half of it is tried as well, until it is neither. `rates` may also be a table of such
lists by dataset.

**Attacks**: what an adversary reconstructs, as `fedcdp attack` measures it, and the pictures of the first victims. Settings,
in the table `attack` of a cell: `leak`, `name`, `victims`, `network` (cpl, or paper: the trained one), `recipe`
(iterations, total_variation) and `look` (steps, releases).

**ε**: as the paper computes it, and the true value. Computed from the plan alone, if dp-accounting is installed.
"""

from __future__ import annotations

import io
import math
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedcdp.config import presets
from fedcdp.config.experiment import Experiment, MachineSettings
from fedcdp.config.schedules import Schedule, as_schedule
from fedcdp.data.dataset import Splits
from fedcdp.engine.runtime import products
from fedcdp.errors import PlanError
from fedcdp.files.disk import write_atomically
from fedcdp.mechanism.randomness import numpy_generator
from fedcdp.studies.reproduce.catalogue import Cell, Place
from fedcdp.studies.reproduce.provenance import digest
from fedcdp.training.prepared import deal_out, network_of
from fedcdp.training.run import Run
from fedcdp.training.trainer import train_experiment

_PAPER_CLIP, _PAPER_NOISE = 4.0, 6.0
_TUNING_SHARE = 1 / 3
_EVALUATIONS = 10
_MOST_FURTHER_RATES = 6
_SECONDS_TIMED = 0.3  # each of three samples; rounds on a GPU take some 0.1 s

Rate = float | str


def measure_training(table: str, cell: Cell, place: Place) -> dict[str, Any]:
    """Choose the rate, train, and report the accuracy (the mean over `splits`, if there are several)."""
    rate, tried = choose_rate(cell, lambda rate: _train(table, cell, rate, 0, place, tuning=True).accuracy or 0.0)
    runs = [_train(table, cell, rate, seed, place) for seed in range(int(cell.settings.get("splits", 1)))]
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    if not accuracies:
        raise PlanError(f"{cell.name}: its data have no validation split")
    told: dict[str, Any] = {
        "command": command(cell, rate),
        "accuracy": statistics.mean(accuracies),
        "rate": rate,
        "rates_tried": {f"{each}": accuracy for each, accuracy in tried.items()},
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
    """The rates to choose from, without duplicates."""
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


def choose_rate(cell: Cell, accuracy: Callable[[Rate], float]) -> tuple[Rate, dict[Rate, float]]:
    """The best rate, and the accuracy with each rate that was tried; a single rate is not tried."""
    rates = rates_of(cell)
    if len(rates) == 1:
        return rates[0], {}
    tried = {rate: accuracy(rate) for rate in rates}
    for _ in range(_MOST_FURTHER_RATES if _are_listed(cell) else 0):
        best = max(tried, key=lambda rate: tried[rate])  # the first of equals
        in_order = sorted(tried, key=_size)
        if best not in (in_order[0], in_order[-1]):
            break
        further = _times(best, 2.0 if best == in_order[-1] else 0.5)
        tried[further] = accuracy(further)
    return max(tried, key=lambda rate: tried[rate]), tried


def _are_listed(cell: Cell) -> bool:
    """Whether the rates are values, not rules: the values of a rule are what its table compares."""
    return not any(str(each).startswith("found") for each in cell.settings.get("rates", ["found"]))


def _size(rate: Rate) -> float:
    return as_schedule(rate, "rates").start


def _times(rate: Rate, factor: float) -> Rate:
    """A rate, or a whole schedule, times a factor."""
    if isinstance(rate, str):
        schedule = as_schedule(rate, "rates")
        start, end = (float(f"{factor * value:.6g}") for value in (schedule.start, schedule.end))
        return str(replace(schedule, start=start, end=end))
    return float(f"{factor * rate:.6g}")


def tuning_share(cell: Cell) -> float:
    """The share of the rounds for which each rate is tried."""
    return float(cell.settings.get("tuning_share", _TUNING_SHARE))


def command(cell: Cell, rate: Rate) -> str:
    """The command line for the same training (of the first split)."""
    return f"fedcdp train{given(cell)} --lr {shlex.quote(str(rate))} --out RUN"


def given(cell: Cell) -> str:
    """A cell's preset and its changes to it, as options."""
    start = f" --preset {cell.settings['preset']}" if "preset" in cell.settings else ""
    changes = [
        f" --set {shlex.quote(f'{section}.{key}={value}')}"
        for section in ("data", "model", "plan")
        for key, value in cell.settings.get(section, {}).items()
    ]
    return start + "".join(changes)


def for_tuning(splits: Splits) -> Splits:
    """The training split alone, with a fifth of it in place of the validation split."""
    order = torch.from_numpy(numpy_generator(0, "tuning-split").permutation(len(splits.train)))
    held_out = len(order) // 5
    return replace(splits, train=splits.train.take(order[held_out:]), validation=splits.train.take(order[:held_out]))


def _train(table: str, cell: Cell, rate: Rate, seed: int, place: Place, tuning: bool = False) -> Run:
    """One run; resumed from its last round if it was killed before."""
    experiment = cell.experiment(
        {"data": {"split_seed": seed}, "plan": {"learning_rate": rate}, "run": _machine_settings(cell, place)}
    )
    splits = place.splits(experiment)
    if tuning:
        splits = for_tuning(splits)
        rounds = max(1, round(experiment.plan.rounds * tuning_share(cell)))
        experiment = replace(experiment, plan=experiment.plan.but(rounds=rounds))
    name = f"{'rate' if tuning else 'split'}-{seed}-{experiment.plan.digest()}-{digest(cell.kind)}"  # no mixture of codes
    folder = place.scratch(table, cell) / name
    return train_experiment(experiment, folder, resume=(folder / "config.toml").exists(), splits=splits)


def _machine_settings(cell: Cell, place: Place) -> dict[str, Any]:
    rounds = cell.experiment().plan.rounds
    return {"evaluate_every": max(1, rounds // _EVALUATIONS), **cell.settings.get("run", {}), **place.run}


def cost_of_training(cell: Cell) -> float:
    """Approximate number of client steps, including a step's fixed cost; used to start with cheap cells."""
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
"""The ε reported for each method: adversary and unit, zero-out."""


def epsilons(cell: Cell) -> dict[str, Any] | None:
    """`printed`: by the paper's own accounting, no guarantee; the others are guarantees. None for a method without any."""
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
        stored_once = unit == "unique" and population.copies == 1  # then a person is exactly one record
        told[f"{adversary}/{unit}"] = privacy.row(adversary, "record" if stored_once else unit).epsilon
    return {"delta": plan.delta, "printed": printed} | {name: _in_json(value) for name, value in told.items()}


def measure_epsilons(table: str, cell: Cell, place: Place) -> dict[str, Any]:  # noqa: ARG001
    """A cell that consists of its ε only."""
    plan = cell.experiment().plan
    command = f"fedcdp account --preset {cell.settings['preset']} --method {plan.method} --local-steps {plan.local_steps}"
    return {"command": command, "epsilon": epsilons(cell)}


def _in_json(value: float) -> float | str:
    return "inf" if value == math.inf else value


_SHOWN = 2  # number of victims whose pictures are stored
_KNOWN = {"leak", "name", "victims", "network", "recipe", "look"}


def measure_attack(table: str, cell: Cell, place: Place) -> dict[str, Any]:
    """Attack, and report the figures; pictures are stored next to the result file."""
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
        raise PlanError(f"{cell.name}: {told['name']} does not reconstruct examples")
    _keep_pictures(found, table, cell, place)
    row = {"command": attack_command(cell)} | found.summary() | {"attack": told["name"]}
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def experiment_of(cell: Cell, place: Place) -> Experiment:
    """The attacked experiment: by default with the network that the paper's authors attack."""
    network = _asked(cell)["network"]
    return cell.experiment({"model": {"network": "auto" if network == "paper" else network}, "run": place.run})


def attack_command(cell: Cell) -> str:
    """The command line for the same attack."""
    told = _asked(cell)
    options = "".join(f" --{key.replace('_', '-')} {value}" for key, value in (told["recipe"] | told["look"]).items())
    where = f"--network {told['network']} --leak {told['leak']} --attack {told['name']} --victims {told['victims']}"
    return f"fedcdp attack{given(cell)}{options} {where}"


def cost_of_attack(cell: Cell) -> float:
    """Roughly in the unit of `cost_of_training`."""
    told = _asked(cell)
    iterations = int(told["recipe"].get("iterations", 300))
    return 30.0 * int(told["victims"]) * iterations * (5 if told["name"] == "batch" else 1)


def _asked(cell: Cell) -> dict[str, Any]:
    asked = cell.settings.get("attack", {})
    if unknown := set(asked) - _KNOWN:
        raise PlanError(f"{cell.name}: attack.{min(unknown)}: there is no such setting")
    return {"leak": "type2", "name": "cpl", "victims": 100, "network": "cpl", "recipe": {}, "look": {}, **asked}


def _keep_pictures(found: Any, table: str, cell: Cell, place: Place) -> None:
    kept = {"original": found.captured.tensor, "reconstruction": found.found.examples, "order": found.scores.order}
    kept |= {f"iteration_{number}": value for number, value in found.snapshots.items()} | {"seed": found.found.seeds}
    written = io.BytesIO()
    # Half precision: these are only viewed, and a folder of them is committed to a repository.
    arrays = {name: value[:_SHOWN].detach().cpu() for name, value in kept.items()}
    plain: dict[str, Any] = {name: (v.half() if v.is_floating_point() else v).numpy() for name, v in arrays.items()}
    np.savez_compressed(written, **plain)
    write_atomically(place.arrays(table, cell), written.getvalue())


def measure_time(table: str, cell: Cell, place: Place) -> dict[str, Any]:  # noqa: ARG001
    """The paper's setting for a dataset and a method, timed as in the section `steps` of a bench."""
    from fedcdp.studies.bench.sections import Bench

    settings = cell.settings
    dataset, method = settings["preset"], settings["plan"]["method"]
    bench = Bench(
        MachineSettings(**place.run),
        place.data_dir,
        int(settings.get("repeat", 3)),
        seconds=float(settings.get("seconds", _SECONDS_TIMED)),
    )
    case = bench.case(cell.name, dataset, method=method)
    alone = bench.case(f"{cell.name}, one client", dataset, method=method, per_round=1)
    (timing,), (single,) = (bench.compare([each], lambda _: None) for each in (case, alone))
    figures = timing.figures()
    return {
        "command": f"fedcdp bench --section steps --device {place.device}",
        "data": case.subject.data,
        "per_round": bench.per_round,
        "us": figures["us_per_client_step"],
        "cpu_us": figures["cpu_us_per_client_step"],
        "engine": figures["trained_by"],
        "local_steps": figures["local_steps"],
        "us_alone": single.figures()["us_per_client_step"],
    }
