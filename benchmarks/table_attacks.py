"""Attack the rows of tables (`tableak`), and write the figures for docs/attacks.md.

python benchmarks/table_attacks.py         # results/table_attacks.json, about ten minutes on one core
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from clean_tree import clean_commit

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "table_attacks.json"

BATCHES = (1, 8, 32, 128)
METHODS = {
    "nonprivate": "--method nonprivate --leak type1",
    "fed-sdp-server": "--method fed-sdp --noise-at server --leak type0",
    "fed-cdp": "--method fed-cdp --leak type0",
}
SEARCH = {"nonprivate-search": ("tableak-search", METHODS["nonprivate"])}
COMMANDS = {
    f"{dataset}/{method}/{batch}": f"attack --attack {attack} --dataset {dataset} {options} --batch-size {batch} "
    f"--victims {4 if batch < 100 else 2}"
    for dataset in ("adult", "cancer")
    for method, (attack, options) in ({name: ("tableak", each) for name, each in METHODS.items()} | SEARCH).items()
    for batch in BATCHES
}
COMMANDS |= {
    "adult/fed-sdp-client/32": "attack --attack tableak --dataset adult --method fed-sdp --noise-at client --leak type0 "
    "--batch-size 32 --victims 4",
    "adult/fed-cdp/type2": "attack --attack tableak --dataset adult --method fed-cdp --leak type2 --victims 40",
    "adult/fed-cdp-batch/type2": "attack --attack tableak --dataset adult --method fed-cdp --noise batch --leak type2 "
    "--victims 40",
    "adult/secure-aggregation/32": "attack --attack tableak --dataset adult --method nonprivate --leak type0 "
    "--secure-aggregation --batch-size 4 --per-round 8",
    "adult-eps1/type0": "attack --attack tableak --preset adult-eps1 --leak type0 --victims 2",
    "cancer-eps1/type0": "attack --attack tableak --preset cancer-eps1 --leak type0 --victims 4",
}
SHOWN = ("examples", "cells_right", "rows_right", "rows_solved", "label_accuracy")


def run() -> None:
    """Run all commands on a clean tree, one at a time, each in its own process with one thread."""
    cells: dict[str, Any] = {}
    told = {"commit": clean_commit("docs/attacks.md"), "machine": _machine(), "cells": cells}
    for name, command in COMMANDS.items():
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "fedcdp", *shlex.split(command), "--json", "--quiet"], check=True, capture_output=True,
            text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        row = json.loads(done.stdout)
        cells[name] = {"command": f"fedcdp {command} --json", "wall_seconds": round(time.perf_counter() - started, 1)} | row
        guesses = {key: each["cells_right"] for key, each in row["cell_baselines"].items()}
        print(f"{cells[name]['wall_seconds']:6.0f} s  {name}  { ({key: row[key] for key in SHOWN}) } {guesses}", flush=True)
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")


def _machine() -> str:
    return f"{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    run()
