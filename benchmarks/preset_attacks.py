"""What readers get out of the recommended presets: the commands, their figures, and the table in docs/recommended.md.

python benchmarks/preset_attacks.py run        # results/preset_attacks.json, about five minutes on one core
python benchmarks/preset_attacks.py page       # the table between the two marks in docs/recommended.md
"""

from __future__ import annotations

import argparse
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
PAGE = ROOT / "docs" / "recommended.md"
BEGIN, END = "<!-- attacks on the presets: begin -->", "<!-- attacks on the presets: end -->"

COMMANDS = {
    "mnist-eps1/type2/example": "attack --preset mnist-eps1 --leak type2",
    "mnist-eps1/type2/batch": "attack --preset mnist-eps1 --leak type2 --noise batch",
    "mnist-eps1/type0/example": "attack --preset mnist-eps1 --leak type0",
    "mnist-eps1/type0/batch": "attack --preset mnist-eps1 --leak type0 --noise batch",
    "mnist-eps8/type2/example": "attack --preset mnist-eps8 --leak type2",
}


def run() -> None:
    """All commands on a clean tree, one after the other, each in a process of its own with one thread."""
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


def page() -> None:
    """The table, in which every figure names its place in the result file."""
    cells = json.loads(RESULTS.read_text())["cells"]
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(cells)}\n\n{END}{after}")


def table(cells: dict[str, Any]) -> str:
    """Markdown: a row a command, and below it what knowing nothing scores on the same victims."""
    lines = [
        "| preset, noise | reader | releases read | labels | recognisable | identified among 1,000 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in cells.items():
        preset, leak, noise = name.split("/")
        shares = [_share(name, row, key) for key in ("label_accuracy", "recognisable_rate", "identified_rate")]
        releases = f"{row['releases_mean']:.0f}<!-- = preset_attacks.json / cells / {name} / releases_mean -->"
        what = f"{row['victims']} records" if leak == "type2" else f"{row['victims']} clients of 500"
        lines.append(
            f"| `{preset}`, `{noise}` | {leak.replace('type', 'type-')}, {what} | {releases} | {' | '.join(shares)} |"
        )
    name, row = next(iter(cells.items()))
    mean = row["knowing_nothing"]["class_mean"]
    shares = [_share(f"{name} / knowing_nothing / class_mean", mean, key) for key in ("recognisable", "identified")]
    lines.append(f"| knowing nothing but the class: its mean image | | | | {' | '.join(shares)} |")
    return "\n".join(lines)


def _share(name: str, row: dict[str, Any], key: str) -> str:
    digits = 1 if 0 < row[key] < 0.01 else 0
    return f"{100 * row[key]:.{digits}f} %<!-- = preset_attacks.json / cells / {name} / {key} -->"


def _machine() -> str:
    return f"{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    {"run": run, "page": page}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
