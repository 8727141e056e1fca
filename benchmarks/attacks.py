"""The attacks for judging a defence, beyond the paper's own (those are in `fedcdp reproduce attacks`).

    python -m benchmarks.attacks run --device cuda --workers 12 --out results/attacks.json
    python -m benchmarks.attacks table results/attacks.json > results/attacks.md

`run --list` names the cells, `run --only PREFIX` runs some of them. Cells in the result file are not run again.
Many processes share a GPU well only under CUDA's multi-process service (`nvidia-cuda-mps-control -d`).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.attacks import RECIPES, attack
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.presets import preset
from fedcdp.training.prepared import deal_out, load_splits, network_of

METHODS: dict[str, dict[str, Any]] = {
    "non-private": {"method": "nonprivate"},
    "Fed-CDP": {"method": "fed-cdp"},
}
SHORT = {"iterations": 100}
_CLIP = 4.0  # the paper's C
ROUGH = {"total_variation": 0.0}


@dataclass(frozen=True)
class Cell:
    """One attack."""

    name: str
    dataset: str
    plan: dict[str, Any]
    leak: str = "type2"
    attack: str = "cpl"
    network: str = "cpl"
    recipe: dict[str, Any] = field(default_factory=dict)
    look: dict[str, Any] = field(default_factory=dict)
    victims: int = 100
    data: dict[str, Any] = field(default_factory=dict)

    def experiment(self, device: str) -> Experiment:
        network = "auto" if self.network == "paper" else self.network
        changes = {"plan": self.plan, "data": self.data, "model": {"network": network}, "run": {"device": device}}
        return assemble(preset(self.dataset), changes)

    def command(self) -> str:
        """The command line for the same attack."""
        flags = {"learning_rate": "lr"} | {key: key.replace("_", "-") for key in self.look}
        given = self.data | self.plan | self.recipe | self.look
        told = "".join(f" --{flags.get(key, key.replace('_', '-'))} {value}" for key, value in given.items())
        where = f"--network {self.network} --leak {self.leak} --attack {self.attack} --victims {self.victims}"
        return f"fedcdp attack --preset {self.dataset}{told} {where} --device cuda"


def cells() -> list[Cell]:
    """All cells."""
    return [
        *_presets(), *_clipping(), *_filter(), *_trained_network(), *_averaging(), *_prior(), *_accumulated(), *_tables(),
        *_steps(),
    ]  # fmt: skip


def _presets() -> list[Cell]:
    made = []
    for name in ("non-private", "Fed-CDP"):
        plan = METHODS[name]
        for preset_name in ("dlg", "idlg", "inverting-gradients", "clip-aware", "averaging"):
            made.append(Cell(f"presets/{preset_name}/{name}", "mnist", plan, attack=preset_name))
        slow = plan | {"learning_rate": 0.005, "batch_size": 1}
        made.append(Cell(f"presets/unrolled/{name}", "mnist", slow, "type1", "unrolled", look={"steps": 3}, recipe=ROUGH))
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
    for steps, batch, victims in ((1, 1, 50), (2, 1, 50), (5, 1, 10), (1, 5, 50)):
        here, look = plan | {"batch_size": batch}, {"steps": steps}
        made.append(
            Cell(
                f"steps/{steps}x{batch}/unrolled",
                "mnist",
                here,
                "type1",
                "unrolled",
                look=look,
                victims=victims,
                recipe=ROUGH,
            )
        )
    here = METHODS["non-private"] | {"batch_size": 5}
    made.append(Cell("steps/100x5/cpl", "mnist", here, "type1", "cpl", look={"steps": 100}, network="paper", victims=20))
    return made


def _averaging() -> list[Cell]:
    made = []
    for releases in (1, 100, 1000, 2304):
        for name in ("averaging", "clip-aware"):
            plan, look = METHODS["Fed-CDP"] | {"batch_size": 1}, {"releases": releases}
            made.append(
                Cell(f"averaging/{releases}/{name}", "mnist", plan, attack=name, look=look, victims=20, recipe=SHORT)
            )
    return made


def _prior() -> list[Cell]:
    """Single examples under little noise: the deviation of the noise, which is σC, names the cell."""
    made = []
    for deviation in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0):
        plan = METHODS["Fed-CDP"] | {"noise_multiplier": deviation / _CLIP, "batch_size": 1}
        for name in ("averaging", "class-prior"):
            made.append(Cell(f"prior/{deviation:g}/{name}", "mnist", plan, attack=name, victims=20))
    return made


def _accumulated() -> list[Cell]:
    """All rounds of a training in which every client takes part with one record; the cell is σ/rounds/leak/attack.

    One round by `class-prior` is the same observation as the first round of a training.
    """
    made = []
    plan = METHODS["Fed-CDP"] | {"batch_size": 1, "local_steps": 1, "per_round": 20, "learning_rate": 0.01}
    plan |= {"record_sampling": "partition"}
    data = {"partition": "iid", "clients": 20, "records": 1}
    common: dict[str, Any] = {"attack": "accumulated", "victims": 20}
    for sigma, several in ((0.05, (1, 5, 20)), (0.1, (1, 5, 20)), (0.5, (20, 100)), (6.0, (1, 20, 100))):
        for rounds in several:
            here = plan | {"noise_multiplier": sigma, "rounds": rounds}
            made.append(Cell(f"accumulated/{sigma:g}/{rounds}/type2", "mnist", here, data=data, **common))
    here = plan | {"noise_multiplier": 0.1, "rounds": 20}
    made.append(Cell("accumulated/0.1/20/type1", "mnist", here, "type1", data=data, **common))
    here = plan | {"noise_multiplier": 6.0, "rounds": 100}
    made.append(Cell("accumulated/6/100/cnn", "mnist", here, network="paper", data=data, **common))
    several_steps = plan | {"record_sampling": "fixed", "local_steps": 5, "batch_size": 5, "rounds": 100}
    data = {"partition": "iid", "clients": 100, "records": 25}
    for sigma in (0.1, 6.0):
        here = several_steps | {"noise_multiplier": sigma}
        made.append(Cell(f"accumulated/{sigma:g}/100/sampled", "mnist", here, data=data, **common))
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


# Running them --------------------------------------------------------------------------------------------------------


def measure(cell: Cell, device: str) -> dict[str, Any]:
    """Measure one cell; returns its row of the result file."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    started = time.perf_counter()
    experiment = cell.experiment(device)
    splits = load_splits(experiment, quiet=True)
    row: dict[str, Any] = {"cell": cell.name, "command": cell.command(), "machine": _machine(device)}
    how: Any = cell.attack
    if cell.recipe:
        changes = dict(cell.recipe)
        if "total_variation" in changes:
            weight = changes.pop("total_variation")
            changes["objective"] = replace(RECIPES[cell.attack].objective, total_variation=weight)
        how = RECIPES[cell.attack].but(**changes)
    found = attack(
        experiment.plan, model=network_of(experiment, splits), federation=deal_out(experiment, splits), leak=cell.leak,
        attack=how, victims=cell.victims, device=device, **cell.look,
    )  # fmt: skip
    return row | found.summary() | {"attack": cell.attack, "wall_seconds": round(time.perf_counter() - started, 1)}


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU, one thread"
    return f"{name}, torch {torch.__version__}"


def run(out: Path, device: str, workers: int, only: str, limit: float, commit: str) -> None:
    """Run all cells that are not in the result file yet, in parallel."""
    stored: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"cells": {}}
    todo = [cell for cell in cells() if cell.name.startswith(tuple(only.split(","))) and cell.name not in stored["cells"]]
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting: dict[Future[dict[str, Any]], Cell] = {}
        while todo or waiting:
            while todo and len(waiting) < workers and time.perf_counter() - started < limit:
                cell = todo.pop(0)
                waiting[pool.submit(measure, cell, device)] = cell
            if not waiting:
                break
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                cell = waiting.pop(done)
                try:
                    row = {"commit": commit} | done.result()
                except Exception as error:
                    print(f"{cell.name}: {type(error).__name__}: {error}", flush=True)
                    continue
                stored["cells"][cell.name] = row
                told = {key: row.get(key) for key in ("success_rate", "recognisable_rate", "distance_median",
                                                      "label_accuracy", "iterations_median", "auc")}  # fmt: skip
                print(f"{time.perf_counter() - started:5.0f} s  {cell.name}  {told}", flush=True)
                out.write_text(json.dumps(stored, indent=1) + "\n")
    if todo:
        print(f"{len(todo)} cells are not run: {', '.join(cell.name for cell in todo)}")


# Showing them --------------------------------------------------------------------------------------------------------


def table(stored: dict[str, Any]) -> str:
    """All cells as Markdown, group by group. docs/attacks.md explains them."""
    found = stored["cells"]
    parts = [
        "# Leakage attacks beyond the paper's: what was measured",
        "`python -m benchmarks.attacks run`; the command and the machine of every cell are in `attacks.json`. MSE and RMSE "
        "are of the example clamped to [0, 1], over the pixels that the network can see; "
        "*exact*: MSE < 1e-3; *recognisable*: PSNR of 15 dB or more and closer than the class mean; *identified*: the true "
        "example is the nearest of 1000. Iterations are those until exact, else until the search ended; one is up to 20 "
        "evaluations. The paper's own attacks are in [reproduction/attacks.md](reproduction/attacks.md); "
        "[docs/attacks.md](../docs/attacks.md) explains how to read this page.",
    ]
    for group, title in GROUPS.items():
        rows = {name: row for name, row in found.items() if name.startswith(group + "/")}
        if rows:
            parts += [f"## {title}", (_filter_rows if group == "filter" else _rows)(rows)]
    return "\n\n".join(parts) + "\n"


GROUPS = {
    "presets": "Every preset, one release (MNIST, CPL network)",
    "clipping": "Clipping without noise (MNIST, CPL network)",
    "cnn": "The network that the paper trains, at initialisation (MNIST)",
    "filter": "Matched filter on single examples (MNIST, the paper's CNN at initialisation)",
    "averaging": "Averaging R releases of the same example, σ = 6, C = 4 (MNIST, CPL network)",
    "prior": "Priors under little noise: deviation of the noise on a coordinate (MNIST, CPL network, C = 4)",
    "accumulated": "All rounds of a training: σ/rounds/what (MNIST, CPL network; `cnn`: the paper's network; C = 4)",
    "steps": "Updates of several local steps × batch size (MNIST, non-private)",
    "tables": "Tables: closed form (paper's network), dataset/batch size",
}
HEADINGS = (
    "exact",
    "recognisable",
    "identified",
    "MSE median",
    "MSE mean",
    "RMSE at end",
    "PSNR",
    "SSIM",
    "labels",
    "iterations",
)


def _figures(row: dict[str, Any]) -> list[str]:
    keys = ("success_rate", "recognisable_rate", "identified_rate", "distance_median", "distance_mean", "rmse_mean_at_end",
            "psnr_mean", "ssim_mean", "label_accuracy", "iterations_median")  # fmt: skip
    shares = {"success_rate", "recognisable_rate", "identified_rate", "label_accuracy"}
    return [
        "–" if row.get(key) is None else f"{row[key]:.0%}" if key in shares else f"{row[key]:.3g}" for key in keys
    ]  # fmt: skip


def _markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _rows(rows: dict[str, dict[str, Any]]) -> str:
    body = [[name.partition("/")[2], str(row["victims"]), *_figures(row)] for name, row in rows.items()]
    return _markdown(["cell", "victims", *HEADINGS], body)


def _filter_rows(rows: dict[str, dict[str, Any]]) -> str:
    body = []
    for name, row in rows.items():
        sigma, releases = name.split("/")[1:]
        low, high = row["auc_interval_99"]
        picked = f"{row['success_rate']:.1%} of {row['candidates']}"
        body.append([sigma, releases, str(row["victims"]), f"{row['auc']:.3f} ({low:.3f} to {high:.3f})",
                     f"{row['auc_predicted']:.3f}", f"{row['distance_between_worlds']:.2f}", picked])  # fmt: skip
    return _markdown(
        ["σ", "releases R", "victims", "presence AUC (99 %)", "Φ(‖g‖√R/(√2σC))", "mean ‖g‖", "identified"], body
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, default=Path("results/attacks.json"))
    runs.add_argument("--device", default="cpu")
    runs.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    runs.add_argument("--only", default="", help="Prefixes of names, separated by commas.")
    runs.add_argument("--limit", type=float, default=float("inf"), help="Seconds after which no new cell is started.")
    runs.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    runs.add_argument("--list", action="store_true")
    tables = commands.add_parser("table")
    tables.add_argument("results", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(table(json.loads(given.results.read_text())), end="")
        return
    if given.list:
        print("\n".join(cell.name for cell in cells() if cell.name.startswith(tuple(given.only.split(",")))))
        return
    run(given.out, given.device, given.workers, given.only, given.limit, given.commit or clean_commit())


if __name__ == "__main__":
    main()
