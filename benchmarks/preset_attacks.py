"""Attack the recommended presets, and write the figures for docs/recommended.md.

python benchmarks/preset_attacks.py        # results/preset_attacks.json, about five minutes on one core
python -m tools.pages                      # the page
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
RESULTS = ROOT / "results" / "preset_attacks.json"

COMMANDS = {
    "mnist-eps1/type2/example": "attack --preset mnist-eps1 --leak type2",
    "mnist-eps1/type2/batch": "attack --preset mnist-eps1 --leak type2 --noise batch",
    "mnist-eps1/type0/example": "attack --preset mnist-eps1 --leak type0",
    "mnist-eps1/type0/batch": "attack --preset mnist-eps1 --leak type0 --noise batch",
    "mnist-eps8/type2/example": "attack --preset mnist-eps8 --leak type2",
}


def run() -> None:
    """Run all commands on a clean tree, one at a time, each in its own process with one thread."""
    cells: dict[str, Any] = {}
    told = {"commit": clean_commit("docs/recommended.md"), "machine": _machine(), "cells": cells}
    for name, command in COMMANDS.items():
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "fedcdp", *shlex.split(command), "--json"], check=True, capture_output=True, text=True,
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        row = json.loads(done.stdout)
        cells[name] = {"command": f"fedcdp {command} --json", "wall_seconds": round(time.perf_counter() - started, 1)} | row
        shown = {key: row[key] for key in ("attack", "label_accuracy", "recognisable_rate", "identified_rate")}
        print(f"{cells[name]['wall_seconds']:6.0f} s  {name}  {shown}", flush=True)
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")


def _machine() -> str:
    return f"{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    run()
