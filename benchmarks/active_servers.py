"""Attacks by active servers, each against every method and both trust models.

    python benchmarks/active_servers.py run                                                  # results/active_servers.json
    python benchmarks/active_servers.py table results/active_servers.json > results/active_servers.md

A cell is one command, run in its own process with one thread; all take about ten CPU minutes. `run --only PREFIX` runs some.
Cells in the result file are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from clean_tree import clean_commit

ROOT = Path(__file__).parents[1]
_REFUSED = 2  # exit status
RESULTS = ROOT / "results" / "active_servers.json"

METHODS = {
    "non-private": "--method nonprivate",
    "DSSGD": "--method dssgd",
    "Fed-SDP, noise at server": "--method fed-sdp --noise-at server",
    "Fed-SDP, noise at client": "--method fed-sdp --noise-at client",
    "Fed-CDP σ = 6": "--method fed-cdp --noise-multiplier 6 --clip 4 --clip-mode flat",
}
_DIGITS = "--dataset mnist5k --leak type0 --local-steps 1 --partition iid --record-sampling partition"
_ALONE = {
    "imprint": f"{_DIGITS} --clients 20 --per-round 20 --records 64 --batch-size 64 --victims 5",
    "trap-weights": f"{_DIGITS} --network mlp --clients 20 --per-round 20 --records 8 --batch-size 8 --victims 10",
    "fishing": f"{_DIGITS} --network mlp --clients 10 --per-round 10 --records 400 --batch-size 400 --victims 5",
    "frozen-weights": f"{_DIGITS} --network oriented-gradients --clients 20 --per-round 20 --records 8 --batch-size 8 "
    "--rounds 10 --victims 10",
}
_SUMMED = {
    "imprint": f"{_DIGITS} --secure-aggregation --clients 4 --per-round 4 --records 16 --batch-size 16",
    "trap-weights": f"{_DIGITS} --secure-aggregation --network mlp --clients 4 --per-round 4 --records 4 --batch-size 4",
    "fishing": f"{_DIGITS} --secure-aggregation --network mlp --clients 4 --per-round 4 --records 100 --batch-size 100",
    "frozen-weights": f"{_DIGITS} --secure-aggregation --network oriented-gradients --clients 4 --per-round 4 --records 8 "
    "--batch-size 8 --rounds 10",
    "inconsistent-models": f"{_DIGITS} --secure-aggregation --network mlp --clients 4 --per-round 4 --records 8 "
    "--batch-size 8",
}
TRUST = {"each update": _ALONE, "the sum": _SUMMED}
# The noise of a sum is σC whatever the number of clients and records, and so is ε: fewer records are easier to tell apart.
_SMALL_SUM = "--preset mnist-sum-eps1 --clip-mode flat --clients 8 --per-round 8 --records 8 --batch-size 8 --leak type0"
_PRESET = "--preset mnist-eps1 --clip-mode flat"
PRESETS = {
    "mnist-eps1/type2/frozen-weights/1": f"{_PRESET} --leak type2 --attack frozen-weights --rounds 1",
    "mnist-eps1/type2/frozen-weights/5": f"{_PRESET} --leak type2 --attack frozen-weights --rounds 5",
    "mnist-eps1/type2/frozen-weights/20": f"{_PRESET} --leak type2 --attack frozen-weights",
    "mnist-eps1/type0/frozen-weights": f"{_PRESET} --leak type0 --attack frozen-weights --victims 2",
    "mnist-eps1/type0/fishing": f"{_PRESET} --leak type0 --attack fishing --victims 5",
    "mnist-eps1/type0/imprint": f"{_PRESET} --leak type0 --attack imprint --network mlp --victims 5",
    "mnist-eps1/type0/trap-weights": f"{_PRESET} --leak type0 --attack trap-weights --network mlp --victims 5",
    "mnist-sum-eps1/type0/imprint": f"{_SMALL_SUM} --attack imprint",
    "mnist-sum-eps1/type0/trap-weights": f"{_SMALL_SUM} --attack trap-weights --network mlp",
    "mnist-sum-eps1/type0/fishing": f"{_SMALL_SUM} --attack fishing",
    "mnist-sum-eps1/type0/frozen-weights": f"{_SMALL_SUM} --attack frozen-weights",
    "mnist-sum-eps1/type0/inconsistent-models": f"{_SMALL_SUM} --attack inconsistent-models --network mlp",
}


def cells() -> Iterator[tuple[str, str]]:
    """The name and the command of every cell."""
    for trust, settings in TRUST.items():
        for attack, setting in settings.items():
            for method, options in METHODS.items():
                noise = " --noise sum" if trust == "the sum" and method.startswith("Fed-CDP") else ""
                yield f"{attack}/{trust}/{method}", f"attack --attack {attack} {setting} {options}{noise}"
    for name, setting in PRESETS.items():
        yield name, f"attack {setting}"


def run(only: str) -> None:
    """Run the cells that are not in the result file yet, one at a time."""
    told: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    told = {"commit": clean_commit(), "machine": _machine(), "cells": told["cells"]}
    for preset in ("mnist-eps1", "mnist-sum-eps1"):
        account = _program(f"account --preset {preset}")
        row = next(each for each in account["rows"] if (each["adversary"], each["unit"]) == ("server", "record"))
        told[preset] = {"epsilon": row["epsilon"], "delta": account["delta"],
                        "auc_allowed": auc_allowed(row["epsilon"], account["delta"])}  # fmt: skip
    for name, command in cells():
        if not name.startswith(only) or name in told["cells"]:
            continue
        before = _cpu()
        row = _program(command)
        told["cells"][name] = {"command": f"fedcdp {command} --json", "cpu_seconds": round(_cpu() - before, 1)} | row
        shown = {key: row.get(key) for key in ("success_rate", "recognisable_rate", "identified_rate", "auc_predicted")}
        print(f"{told['cells'][name]['cpu_seconds']:6.0f} s  {name}  {shown}", flush=True)
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")


def auc_allowed(epsilon: float, delta: float) -> float:
    """The largest AUC of any test between two worlds that (ε, δ) keeps apart: the area under the bound on its curve."""
    return 1 - (1 - delta) ** 2 / (1 + math.exp(epsilon))


def _program(command: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "fedcdp", *shlex.split(command), "--json"], check=False, capture_output=True, text=True,
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode == _REFUSED:
        return {"refused": done.stderr.strip().splitlines()[-1].removeprefix("fedcdp: ")}
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _machine() -> str:
    return f"{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch {torch.__version__}"


# Showing them --------------------------------------------------------------------------------------------------------


def table(told: dict[str, Any]) -> str:
    """All cells as Markdown."""
    found = told["cells"]
    parts = [
        "# Active servers: what was measured",
        "`python benchmarks/active_servers.py run`; `active_servers.json` has the command of every cell. "
        "[docs/attacks.md](../docs/attacks.md#active-servers) explains the attacks. *Exact*: MSE < 1e-3; *recognisable*: "
        "PSNR of 15 dB or more and closer than the class mean; MSE next to that of the public mean image and of the class "
        "mean, which know nothing and the class alone.",
    ]
    for trust, settings in TRUST.items():
        rows = [
            [attack, method, *_figures(found[f"{attack}/{trust}/{method}"])]
            for attack in settings
            for method in METHODS
            if f"{attack}/{trust}/{method}" in found
        ]
        parts += [f"## The server reads {trust}", _markdown(["attack", "method", *HEADINGS], rows)]
    rows = [[name, *_figures(found[name]), *_presence(told, name)] for name in PRESETS if name in found]
    parts += [
        "## Presets at ε = 1",
        "The presence test asks for a client's first record at the crafted weights. *Predicted* is its AUC by the formula, "
        "from distances that the method's own code gives, for one release (*all rounds*: at frozen weights). *Allowed* is "
        "the largest AUC that the preset's (ε, δ) against the server permits over all its rounds.",
        _markdown(["cell", *HEADINGS, "AUC measured (99 %)", "predicted", "all rounds", "allowed"], rows),
    ]
    return "\n\n".join(parts) + "\n"


HEADINGS = ("records read", "exact", "recognisable", "identified", "MSE", "public mean", "class mean")


def _figures(row: dict[str, Any]) -> list[str]:
    if row.get("refused"):
        return [f"refused: {row['refused']}", *["–"] * (len(HEADINGS) - 1)]
    nothing = row["knowing_nothing"]
    shares = [f"{row[key]:.1%}" for key in ("success_rate", "recognisable_rate", "identified_rate")]
    distances = (row["distance_mean"], nothing["dataset_mean"]["mse"], nothing["class_mean"]["mse"])
    return [str(row["examples"]), *shares, *(f"{each:.3g}" for each in distances)]


def _presence(told: dict[str, Any], name: str) -> list[str]:
    row = told["cells"][name]
    if row.get("auc") is None:
        return ["–"] * 4
    low, high = row["auc_interval_99"]
    throughout = row.get("auc_predicted_all_rounds")
    allowed = told[name.partition("/")[0]]["auc_allowed"]
    return [f"{row['auc']:.2f} ({low:.2f} to {high:.2f})", f"{row['auc_predicted']:.4f}",
            "–" if throughout is None else f"{throughout:.4f}", f"{allowed:.4f}"]  # fmt: skip


def _markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--only", default="", help="Prefix of names.")
    tables = commands.add_parser("table")
    tables.add_argument("results", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(table(json.loads(given.results.read_text())), end="")
        return
    run(given.only)


if __name__ == "__main__":
    main()
