"""Membership inference by LiRA: an overfitted model, presets of Fed-CDP, and the time for 256 shadow federations.

python -m benchmarks.lira --device cuda [--only NAME ...]       # results/lira.json; a GPU takes minutes
python -m benchmarks.lira --finish                              # adds ε where dp-accounting was missing

A cell that is in the file already is kept; `--only` measures its cells again.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.attacks.leaks import finite
from fedcdp.attacks.lira import Lira, allowed_rate, epsilon_of_model, lira
from fedcdp.config.experiment import assemble
from fedcdp.config.presets import Settings, preset
from fedcdp.engine.runtime import usable_device
from fedcdp.training.prepared import Prepared, prepare_experiment

RESULTS = Path(__file__).resolve().parents[1] / "results" / "lira.json"
SHADOWS = 256
_SMALL: Settings = {
    "data": {"dataset": "mnist5k", "partition": "iid", "clients": 10, "records": 50},
    "model": {"network": "mlp"},
    "plan": {"per_round": 10, "rounds": 20, "local_steps": 40, "batch_size": 5, "learning_rate": 0.1},
}
_EMBEDDED: Settings = {"data": {"dataset": "mnist5k"}, "plan": {}}  # as `fedcdp attack --dataset mnist5k --attack lira`


def _with_plan(settings: Settings, **plan: Any) -> Settings:
    return settings | {"plan": settings["plan"] | plan}


CELLS: dict[str, Settings] = {
    "overfitted, non-private": _with_plan(_SMALL, method="nonprivate"),
    "overfitted, Fed-CDP": _with_plan(_SMALL, method="fed-cdp", noise_multiplier=0.4),
    "embedded digits, non-private": _with_plan(_EMBEDDED, method="nonprivate"),
    "embedded digits, Fed-CDP": _with_plan(_EMBEDDED, method="fed-cdp"),
    "demo": preset("demo"),
    "mnist-eps1": preset("mnist-eps1"),
    "mnist-eps8": preset("mnist-eps8"),
}


def measure(name: str, device: str, data_dir: Path | None, shadows: int) -> dict[str, Any]:
    """Attack one cell."""
    prepared = prepare_experiment(assemble(CELLS[name]), data_dir, quiet=True)
    found: Lira = lira(
        prepared.plan, prepared.network, prepared.federation, shadows=shadows, device=usable_device(device),
        progress=lambda done, total: print(f"\r{name}: {done} of {total}", end="", file=sys.stderr, flush=True),
    )  # fmt: skip
    told: dict[str, Any] = finite(found.summary())
    return told


def within(row: dict[str, Any]) -> bool | None:
    """Whether no point of the curve exceeds what ε allows; None without an ε."""
    if row["epsilon"] is None:
        return None
    epsilon = math.inf if row["epsilon"] == "inf" else row["epsilon"]
    return all(true <= allowed_rate(epsilon, row["delta"], false) for false, true in row["roc"]["online"])


def closeness(stored: dict[str, Any]) -> str:
    """For every cell: the members that are found at 1 % false positives, and how many ε allows to be found."""
    lines = [
        "| federation | ε of the model | AUC | members found at 1 % false positives | allowed by ε |",
        "| --- " * 5 + "|",
    ]
    for name in CELLS:
        if (row := stored.get(name)) is None or row["epsilon"] is None:
            continue
        epsilon = math.inf if row["epsilon"] == "inf" else row["epsilon"]
        limit = allowed_rate(epsilon, row["delta"], 0.01)
        shown = "∞" if epsilon == math.inf else f"{epsilon:.3g}"
        found = f"{100 * row['tpr_at_1_percent']:.2f} %"
        auc = f"{row['auc']:.3f}".lstrip("0")
        lines.append(f"| {name} | {shown} | {auc} | {found} | {100 * limit:.3g} % |")
    return "\n".join(lines)


def finish(name: str, row: dict[str, Any], data_dir: Path | None) -> None:
    """Add ε, and what it says about the curve."""
    prepared: Prepared = prepare_experiment(assemble(CELLS[name]), data_dir, quiet=True)
    epsilon, row["epsilon_unit"] = epsilon_of_model(prepared)
    row["epsilon"] = "inf" if epsilon == math.inf else epsilon
    row["within_epsilon"] = within(row)


def main() -> None:
    """Measure, or finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=CELLS, default=None)
    parser.add_argument("--shadows", type=int, default=SHADOWS)
    parser.add_argument("--data-dir", type=Path, default=None, help="directory of dataset files, for the mnist presets")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--finish", action="store_true", help="compute ε for the cells of the file")
    given = parser.parse_args()
    told: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"cells": {}}
    commit = None if given.finish else given.commit or clean_commit()
    machine = torch.cuda.get_device_name() if given.device.startswith("cuda") else f"{platform.machine()} CPU"
    for name in given.only or CELLS:
        cells = told["cells"]
        if given.finish:
            if name in cells:
                finish(name, cells[name], given.data_dir)
        elif given.only or name not in cells:
            row = measure(name, given.device, given.data_dir, given.shadows)
            command = f"python -m benchmarks.lira --only '{name}' --device {given.device} --shadows {given.shadows}"
            about = {"command": command, "commit": commit, "machine": f"{machine}, torch {torch.__version__}"}
            cells[name] = about | row | {"within_epsilon": within(row)}
            print(f"\r{name}: AUC {row['auc']:.3f}, {row['seconds']:.0f} s", flush=True)
        given.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
