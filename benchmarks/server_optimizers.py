"""Accuracy at one ε under different server optimisers (results/server_optimizers.json).

    python -m benchmarks.server_optimizers --device cuda --out results/server_optimizers.json
    python -m benchmarks.server_optimizers --datasets adult --seeds 0                        # a part of it, on a CPU

The federations and the noise are those of the presets mnist-eps2 and adult-eps2, so every training has ε = 2 against the
server: an optimiser is post-processing. Only the server's rule changes. Each optimiser gets a grid of six points (six rates;
for momentum, two shares and three rates), and every point is trained with three seeds.

The presets' local learning rate was tuned for sgd with s = 1. All points are printed with the mean and the spread of their
accuracy on the validation split. The best point of each optimiser was *chosen* by that same accuracy, so all of them, sgd's
included, are optimistic by about the spread; differences below it mean nothing.

No noise is calibrated here: the machine does not need dp-accounting. FEDCDP_DATA names the folder with the datasets.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.config.experiment import assemble
from fedcdp.config.presets import preset
from fedcdp.training.prepared import load_splits, prepare_experiment
from fedcdp.training.trainer import train_experiment

EPSILON = 2.0
PRESETS = {"mnist": "mnist-eps2", "adult": "adult-eps2"}
SEEDS = (0, 1, 2)
CHOSEN = "by the mean accuracy on the validation split over the same seeds, which the figure then repeats"
GRID: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"server_learning_rate": rate} for rate in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)],
    "momentum": [
        {"server_momentum": kept, "server_learning_rate": round(rate * (1 - kept), 3)}
        for kept in (0.5, 0.9)
        for rate in (0.5, 1.0, 2.0)
    ],
    "adam": [{"server_learning_rate": rate} for rate in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)],
}


def train(
    dataset: str, optimizer: str, options: dict[str, Any], seeds: list[int], device: str, splits: Any
) -> dict[str, Any]:
    """One point of the grid: the accuracy with each seed, its mean and its spread."""
    found, started = [], time.perf_counter()
    for seed in seeds:
        given = {"plan": {"server_optimizer": optimizer, "seed": seed} | options, "run": {"device": device}}
        experiment = assemble(preset(PRESETS[dataset]), given, {"run": {"evaluate_every": 1000}})
        prepared = prepare_experiment(experiment, splits=splits, quiet=True)
        found.append(train_experiment(experiment, None, prepared=prepared).accuracy)
    return {
        "dataset": dataset,
        "optimizer": optimizer,
        **options,
        "accuracy": found,
        "mean": statistics.mean(found),
        "spread": statistics.stdev(found) if len(found) > 1 else None,
        "seconds": round(time.perf_counter() - started, 1),
    }


def best(points: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The best point of each optimiser on each dataset, and sgd with s = 1, which is the preset."""
    chosen: dict[str, dict[str, dict[str, Any]]] = {}
    for point in points:
        of_dataset = chosen.setdefault(point["dataset"], {})
        if point["optimizer"] == "sgd" and point["server_learning_rate"] == 1.0:
            of_dataset["preset"] = point
        if point["mean"] > of_dataset.get(point["optimizer"], {"mean": -1.0})["mean"]:
            of_dataset[point["optimizer"]] = point
    return chosen


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    commit = given.commit or (clean_commit() if given.out else None)
    points = []
    for dataset in given.datasets:
        splits = load_splits(assemble(preset(PRESETS[dataset])), quiet=True)
        for optimizer, grid in GRID.items():
            for options in grid:
                points.append(train(dataset, optimizer, options, given.seeds, given.device, splits))
                print(points[-1], flush=True)
    chosen = best(points)
    for dataset, by_optimizer in chosen.items():
        print(dataset, {name: round(point["mean"], 4) for name, point in by_optimizer.items()})
    if given.out is not None:
        on_gpu = given.device.startswith("cuda")
        result = {
            "command": f"python -m benchmarks.server_optimizers --datasets {' '.join(given.datasets)} "
            f"--seeds {' '.join(map(str, given.seeds))} --device {given.device} --out results/server_optimizers.json",
            "commit": commit,
            "machine": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
            "epsilon": EPSILON,
            "adversary": "server",
            "chosen": CHOSEN,
            "best": chosen,
            "points": points,
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
