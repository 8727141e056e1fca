"""Train by the recommended recipe, as commands without a plan do, and write the accuracies for docs/recommended.md.

python benchmarks/default_recipe.py                        # results/default_recipe.json, about two minutes on one core
python benchmarks/default_recipe.py --secure-aggregation   # its part `sums`: the server reads only the sum of a round
python -m tools.pages                                      # the page

Tables are written as CSV files from scikit-learn's embedded datasets, with their columns as they are. Adult needs its files
(FEDCDP_DATA).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sklearn import datasets

from clean_tree import clean_commit
from fedcdp.data import load, load_file
from fedcdp.data.dataset import Splits

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "default_recipe.json"
SEEDS = (0, 1, 2)
TABLES = ("breast_cancer", "wine", "digits", "iris")
NAMED = ("mnist5k", "cancer", "adult")


def main() -> None:
    """Three trainings of each dataset on a clean tree: seed and split differ. The other trust model's figures stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--secure-aggregation", action="store_true", help="the server reads only the sum of a round")
    sums = parser.parse_args().secure_aggregation
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    told, cells = found.setdefault("sums", {}) if sums else found, dict[str, Any]()
    told |= {"commit": clean_commit("docs/recommended.md"), "cells": cells}
    with tempfile.TemporaryDirectory() as place:
        for name in (*NAMED, *TABLES):
            data = ["--dataset", name] if name in NAMED else ["--data", str(_written(name, Path(place)))]
            options = [*data, *(["--secure-aggregation"] if sums else [])]
            runs = [_trained(options, seed, Path(place) / f"{name}-{seed}") for seed in SEEDS]
            cells[name] = {"runs": runs, "largest_class": _largest_class(data, SEEDS[0])}
            print(name, [round(run["accuracy"], 4) for run in runs], cells[name]["largest_class"], flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _trained(options: list[str], seed: int, out: Path) -> dict[str, Any]:
    command = ["train", *options, "--seed", str(seed), "--split-seed", str(seed), "--out", str(out), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fedcdp", *command],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found = json.loads(done.stdout)
    epsilon = next(row["epsilon"] for row in found["epsilon"] if (row["adversary"], row["unit"]) == ("server", "record"))
    return {"seed": seed, "accuracy": found["accuracy"], "epsilon": epsilon, "seconds": found["seconds"]}


def _largest_class(options: list[str], seed: int) -> float:
    kind, name = options
    splits: Splits = load(name, split_seed=seed, quiet=True) if kind == "--dataset" else load_file(name, split_seed=seed)
    assert splits.validation is not None
    return float(splits.validation.targets.bincount().max()) / len(splits.validation)


def _written(name: str, place: Path) -> Path:
    inputs, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    path = place / f"{name}.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*(f"column {number}" for number in range(inputs.shape[1])), "label"])
        table.writerows([*map(float, record), int(label)] for record, label in zip(inputs, labels, strict=True))
    return path


if __name__ == "__main__":
    main()
