"""The paper's attack table, compression figure and method comparison, and the attacks that a defender is judged by.

    python benchmarks/attacks.py run --device cuda --workers 12 --out results/attacks.json --arrays attack-arrays
    python benchmarks/attacks.py table results/attacks.json > results/attacks.md
    python benchmarks/attacks.py pictures results/attacks.json attack-arrays results

`run --list` names the cells, `run --only PREFIX` runs some of them. What is already in the result file is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcdp.attacks import RECIPES, Leaks, attack
from fedcdp.experiment import Experiment, assemble
from fedcdp.presets import preset

SHOWN = 6  # victims of a cell whose pictures are kept
METHODS: dict[str, dict[str, Any]] = {
    "non-private": {"method": "nonprivate"},
    "DSSGD": {"method": "dssgd"},
    "Fed-SDP (client)": {"method": "fed-sdp", "noise_at": "client"},
    "Fed-SDP (server)": {"method": "fed-sdp", "noise_at": "server"},
    "Fed-CDP": {"method": "fed-cdp"},
    "Fed-CDP(decay)": {"method": "fed-cdp-decay"},
}
TABLE_METHODS = [name for name in METHODS if name != "DSSGD"]
SHORT = {"iterations": 100}
PRUNED = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Cell:
    """One attack, or one training run of the compression figure."""

    name: str
    dataset: str
    plan: dict[str, Any]
    leak: str = "type2"
    attack: str = "cpl"
    network: str = "cpl"
    data: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    look: dict[str, Any] = field(default_factory=dict)
    victims: int = 100
    trains: bool = False

    def experiment(self, device: str) -> Experiment:
        network = "auto" if self.network == "paper" else self.network
        run = {"device": device, "evaluate_every": 10}
        return assemble(
            preset(self.dataset), {"data": self.data, "plan": self.plan, "model": {"network": network}, "run": run}
        )

    def command(self) -> str:
        """The same from the command line."""
        flags = {"learning_rate": "lr"} | {key: key.replace("_", "-") for key in self.look}
        given = self.data | self.plan | ({} if self.trains else self.recipe | self.look)
        told = "".join(f" --{flags.get(key, key.replace('_', '-'))} {value}" for key, value in given.items())
        if self.trains:
            return f"fedcdp train --preset {self.dataset}{told} --device cuda --out RUN"
        where = f"--network {self.network} --leak {self.leak} --attack {self.attack} --victims {self.victims}"
        return f"fedcdp attack --preset {self.dataset}{told} {where} --device cuda"


def cells() -> list[Cell]:
    """All of them, the longest first within a group."""
    return [
        *_paper_table(), *_presets(), *_clipping(), *_trained_network(), *_steps(), *_averaging(), *_filter(), *_tables(),
        *_compression(), *_comparison(),
    ]  # fmt: skip


def _paper_table() -> list[Cell]:
    """Type-2 as in the paper; type-0&1 as in its authors' code (one dummy for a batch of one class), and done properly."""
    made = []
    for dataset in ("mnist", "lfw"):
        for name in TABLE_METHODS:
            plan = METHODS[name]
            made += [
                Cell(f"table/{dataset}/type2/{name}", dataset, plan),
                Cell(f"table/{dataset}/type01-one/{name}", dataset, plan, "type1", data={"classes_per_client": 1}),
                Cell(f"table/{dataset}/type01-batch/{name}", dataset, plan, "type1", "batch"),
            ]
    return made


def _presets() -> list[Cell]:
    made = []
    for name in ("non-private", "Fed-CDP"):
        plan = METHODS[name]
        for preset_name in ("dlg", "idlg", "inverting-gradients", "clip-aware", "averaging"):
            made.append(Cell(f"presets/{preset_name}/{name}", "mnist", plan, attack=preset_name))
        slow = plan | {"learning_rate": 0.005, "batch_size": 1}
        made.append(Cell(f"presets/unrolled/{name}", "mnist", slow, "type1", "unrolled", look={"steps": 3}))
        made.append(Cell(f"presets/per-layer/{name}", "mnist", plan, attack="per-layer", victims=20))
    return made


def _clipping() -> list[Cell]:
    plan = METHODS["Fed-CDP"] | {"noise_multiplier": 0.0}
    return [Cell(f"clipping/{name}", "mnist", plan, attack=name) for name in ("cpl", "clip-aware")]


def _trained_network() -> list[Cell]:
    made = []
    for name in ("non-private", "Fed-CDP"):
        for preset_name in ("cpl", "inverting-gradients"):
            made.append(Cell(f"cnn/{preset_name}/{name}", "mnist", METHODS[name], attack=preset_name, network="paper"))
    return made


def _steps() -> list[Cell]:
    made = []
    plan = METHODS["non-private"] | {"learning_rate": 0.005}
    for steps, batch in ((1, 1), (2, 1), (5, 1), (10, 1), (1, 5), (2, 5)):
        here = plan | {"batch_size": batch}
        made.append(
            Cell(f"steps/{steps}x{batch}/unrolled", "mnist", here, "type1", "unrolled", look={"steps": steps}, victims=50)
        )
    here = METHODS["non-private"] | {"batch_size": 5}
    made.append(Cell("steps/100x5/cpl", "mnist", here, "type1", "cpl", look={"steps": 100}, network="paper"))
    return made


def _averaging() -> list[Cell]:
    made = []
    for releases in (10, 100, 1000, 2304):
        for name in ("averaging", "clip-aware"):
            plan = METHODS["Fed-CDP"] | {"batch_size": 1}
            here = {"releases": releases}
            made.append(Cell(f"averaging/{releases}/{name}", "mnist", plan, attack=name, look=here, victims=50))
    return made


def _filter() -> list[Cell]:
    made = []
    for sigma, several in ((6.0, (1, 10, 100, 1000)), (0.5, (1, 50))):
        for releases in several:
            plan = METHODS["Fed-CDP"] | {"noise_multiplier": sigma, "batch_size": 1}
            made.append(
                Cell(f"filter/{sigma:g}/{releases}", "mnist", plan, attack="matched-filter", network="paper",
                     look={"releases": releases}, victims=1000 if releases < 1000 else 300)
            )  # fmt: skip
    return made


def _tables() -> list[Cell]:
    made = []
    for dataset in ("adult", "cancer"):
        for batch in (1, 2, 3, 4, 6, 8):
            for name in ("non-private", "Fed-CDP") if batch in (1, 3) else ("non-private",):
                plan = METHODS[name] | {"batch_size": batch}
                made.append(
                    Cell(f"tables/{dataset}/{batch}/{name}", dataset, plan, "type1", "analytic", "paper", victims=200)
                )
    return made


def _compression() -> list[Cell]:
    """Pruned gradients of single examples (an update of one step on one example), and accuracy after 20 rounds."""
    made = []
    for share in PRUNED:
        pruned = {"compression": share}
        for name in ("non-private", "Fed-CDP", "Fed-CDP(decay)"):
            plan = METHODS[name] | pruned | {"batch_size": 1}
            made.append(Cell(f"compression/{share:g}/cpl/{name}", "mnist", plan, "type1", "cpl", victims=50, recipe=SHORT))
        plan = METHODS["non-private"] | pruned | {"batch_size": 1}
        made.append(
            Cell(
                f"compression/{share:g}/clip-aware/non-private",
                "mnist",
                plan,
                "type1",
                "clip-aware",
                victims=50,
                recipe=SHORT,
            )
        )
        for name in ("non-private", "Fed-SDP (server)", "Fed-CDP", "Fed-CDP(decay)"):
            plan = METHODS[name] | pruned | {"rounds": 20}
            plan |= {"noise": "cohort"} if name.startswith("Fed-CDP") else {}
            plan |= {"clip": 0.5} if name.startswith("Fed-SDP") else {}
            made.append(Cell(f"compression/{share:g}/accuracy/{name}", "mnist", plan, network="paper", trains=True))
    return made


def _comparison() -> list[Cell]:
    made = []
    for name, plan in METHODS.items():
        for leak in ("type2", "type1", "type0"):
            how = "cpl" if leak == "type2" else "batch"
            made.append(Cell(f"comparison/{leak}/{name}", "lfw", plan, leak, how, victims=8))
    return made


# Running them --------------------------------------------------------------------------------------------------------


def measure(cell: Cell, device: str, arrays: Path | None) -> dict[str, Any]:
    """One cell, as a row of the result file."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    started = time.perf_counter()
    experiment = cell.experiment(device)
    splits = experiment.splits(quiet=True)
    row: dict[str, Any] = {"cell": cell.name, "command": cell.command()}
    if cell.trains:
        run = experiment.train(None, splits=splits, quiet=True)
        return row | {"accuracy": run.accuracy, "rounds": run.rounds, "seconds": round(time.perf_counter() - started, 1)}
    how: Any = RECIPES[cell.attack].but(**cell.recipe) if cell.recipe else cell.attack
    found = attack(
        experiment.plan, model=experiment.network(splits), federation=experiment.federation(splits), leak=cell.leak,
        attack=how, victims=cell.victims, device=device, **cell.look,
    )  # fmt: skip
    if arrays is not None and isinstance(found, Leaks):
        _keep(found, arrays / (cell.name.replace("/", "__") + ".npz"))
    return row | found.summary() | {"attack": cell.attack, "wall_seconds": round(time.perf_counter() - started, 1)}


def _keep(found: Leaks, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    order = found.scores.order if found.scores is not None else None
    kept = {"original": found.captured.inputs[:SHOWN], "reconstruction": found.found.examples[:SHOWN],
            "end": found.found.last[:SHOWN], "seed": found.found.seeds[:SHOWN]}  # fmt: skip
    kept |= {f"iteration_{number}": value[:SHOWN] for number, value in found.snapshots.items()}
    if order is not None:
        kept["order"] = order[:SHOWN]
        kept["mse"] = found.scores.mse[:SHOWN]  # type: ignore[union-attr]
    np.savez_compressed(path, **{name: value.cpu().numpy() for name, value in kept.items()})


def run(out: Path, device: str, workers: int, only: str, limit: float, arrays: Path | None) -> None:
    """All cells that are not in the result file yet, in parallel."""
    stored: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"cells": {}}
    todo = [cell for cell in cells() if cell.name.startswith(only) and cell.name not in stored["cells"]]
    stored["machine"] = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    stored["torch"] = torch.__version__
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting: dict[Future[dict[str, Any]], Cell] = {}
        while todo or waiting:
            while todo and len(waiting) < workers and time.perf_counter() - started < limit:
                cell = todo.pop(0)
                waiting[pool.submit(measure, cell, device, arrays)] = cell
            if not waiting:
                break
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                cell = waiting.pop(done)
                try:
                    row = done.result()
                except Exception as error:
                    print(f"{cell.name}: {type(error).__name__}: {error}", flush=True)
                    continue
                stored["cells"][cell.name] = row
                told = {key: row.get(key) for key in ("success_rate", "recognisable_rate", "distance_median",
                                                      "label_accuracy", "iterations_median", "auc", "accuracy")}  # fmt: skip
                print(f"{time.perf_counter() - started:5.0f} s  {cell.name}  {told}", flush=True)
                out.write_text(json.dumps(stored, indent=1) + "\n")
    if todo:
        print(f"{len(todo)} cells are left: {', '.join(cell.name for cell in todo)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, default=Path("results/attacks.json"))
    runs.add_argument("--device", default="cpu")
    runs.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    runs.add_argument("--only", default="")
    runs.add_argument("--limit", type=float, default=float("inf"), help="Seconds after which no new cell is begun.")
    runs.add_argument("--arrays", type=Path)
    runs.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list:
        print("\n".join(cell.name for cell in cells() if cell.name.startswith(given.only)))
        return
    run(given.out, given.device, given.workers, given.only, given.limit, given.arrays)


if __name__ == "__main__":
    main()
