"""The paper's attack table, compression figure and method comparison, and the attacks that a defender is judged by.

    python benchmarks/attacks.py run --device cuda --workers 12 --out results/attacks.json --arrays attack-arrays
    python benchmarks/attacks.py table results/attacks.json > results/attacks.md
    python benchmarks/attacks.py pictures attack-arrays results

`run --list` names the cells, `run --only PREFIX` runs some of them. What is already in the result file is not run again.
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
ROUGH = {"total_variation": 0.0}
TRAINED = ("non-private", "Fed-SDP (server)", "Fed-CDP", "Fed-CDP(decay)")
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
    """All of them."""
    return [
        *_paper_table(), *_presets(), *_clipping(), *_filter(), *_trained_network(), *_comparison(), *_compression(),
        *_averaging(), *_tables(), *_steps(),
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
                Cell(f"table/{dataset}/type01-batch/{name}", dataset, plan, "type1", "batch", recipe=ROUGH),
                Cell(f"table/{dataset}/type01-smooth/{name}", dataset, plan, "type1", "batch", victims=20, recipe=SHORT),
            ]
    return made


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
        for name in TRAINED if share != 0.1 else ():
            plan = METHODS[name] | pruned | {"rounds": 20}
            plan |= {"noise": "cohort"} if name.startswith("Fed-CDP") else {}
            plan |= {"clip": 0.5} if name.startswith("Fed-SDP") else {}
            made.append(Cell(f"compression/{share:g}/accuracy/{name}", "mnist", plan, network="paper", trains=True))
    return made


def _comparison() -> list[Cell]:
    made = []
    for name, plan in METHODS.items():
        for leak in ("type2", "type1"):
            # What was not shared says nothing: whoever reads DSSGD's updates compares the rest only.
            how = "cpl" if leak == "type2" else "unrolled" if name == "DSSGD" else "batch"
            made.append(Cell(f"comparison/{leak}/{name}", "lfw", plan, leak, how, victims=2))
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
    row: dict[str, Any] = {"cell": cell.name, "command": cell.command(), "machine": _machine(device)}
    if cell.trains:
        run = experiment.train(None, splits=splits, quiet=True)
        return row | {"accuracy": run.accuracy, "rounds": run.rounds, "seconds": round(time.perf_counter() - started, 1)}
    how: Any = cell.attack
    if cell.recipe:
        changes = dict(cell.recipe)
        if "total_variation" in changes:
            weight = changes.pop("total_variation")
            changes["objective"] = replace(RECIPES[cell.attack].objective, total_variation=weight)
        how = RECIPES[cell.attack].but(**changes)
    found = attack(
        experiment.plan, model=experiment.network(splits), federation=experiment.federation(splits), leak=cell.leak,
        attack=how, victims=cell.victims, device=device, **cell.look,
    )  # fmt: skip
    if arrays is not None and isinstance(found, Leaks):
        _keep(found, arrays / (cell.name.replace("/", "__") + ".npz"))
    return row | found.summary() | {"attack": cell.attack, "wall_seconds": round(time.perf_counter() - started, 1)}


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU, one thread"
    return f"{name}, torch {torch.__version__}"


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
    todo = [cell for cell in cells() if cell.name.startswith(tuple(only.split(","))) and cell.name not in stored["cells"]]
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


# Showing them --------------------------------------------------------------------------------------------------------


PRINTED: dict[str, dict[str, list[float]]] = {  # the paper's Table "Gradient leakage resilience": distance, iterations
    "mnist/type01": {"non-private": [0.1549, 6], "Fed-SDP": [0.6991, 300], "Fed-CDP": [0.7695, 300],
                     "Fed-CDP(decay)": [0.937, 300]},
    "mnist/type2": {"non-private": [0.0008, 7], "Fed-SDP": [0.0008, 7], "Fed-CDP": [0.739, 300],
                    "Fed-CDP(decay)": [0.943, 300]},
    "lfw/type01": {"non-private": [0.2214, 24], "Fed-SDP": [0.7352, 300], "Fed-CDP": [0.8036, 300],
                   "Fed-CDP(decay)": [0.941, 300]},
    "lfw/type2": {"non-private": [0.0014, 25], "Fed-SDP": [0.0014, 25], "Fed-CDP": [0.6626, 300],
                  "Fed-CDP(decay)": [0.945, 300]},
}  # fmt: skip


def table(stored: dict[str, Any]) -> str:
    """All cells as Markdown, group by group. What it all means is said in docs/attacks.md."""
    found = stored["cells"]
    parts = [
        "# Leakage attacks: what was measured",
        "`python benchmarks/attacks.py run`; the command and the machine of every cell are in `attacks.json`. MSE and RMSE "
        "are of the example clamped to [0, 1], over the pixels that the network can see; "
        "*exact*: MSE < 1e-3; *recognisable*: PSNR of 15 dB or more and closer than the class mean; *identified*: the true "
        "example is the nearest of 1000. Iterations are those until exact, else until the search ended; one is up to 20 "
        "evaluations. [docs/attacks.md](../docs/attacks.md) says how to read this.",
    ]
    for leak in ("type2", "type01-one", "type01-batch", "type01-smooth"):
        for dataset in ("mnist", "lfw"):
            parts += [f"## {dataset}, {TITLES[leak]}", _paper_rows(found, dataset, leak)]
    for group, title in GROUPS.items():
        rows = {name: row for name, row in found.items() if name.startswith(group + "/")}
        if rows:
            parts += [f"## {title}", (_filter_rows if group == "filter" else _rows)(rows)]
    parts += [
        "## Pruned updates",
        "Attacked: the update of one step on one example, 100 iterations. Accuracy: after 20 rounds of the "
        "paper's federation (K = 1000, K_t = 100), Fed-SDP at C = 0.5, Fed-CDP under `cohort` noise, the one that the "
        "printed accuracy fits; the attacks are on `example` noise, the one that the paper describes.",
        _compression_rows(found),
    ]
    return "\n\n".join(parts) + "\n"


TITLES = {
    "type2": "type-2: one example's gradient, the paper's attack",
    "type01-one": "type-0&1 as the authors' code does it: one dummy for a batch of one class, scored by its nearest image",
    "type01-batch": "type-0&1 with a dummy for every image of a batch, no prior",
    "type01-smooth": "type-0&1 with a dummy for every image of a batch, smooth ones preferred (`batch`), 100 iterations",
}
GROUPS = {
    "presets": "Every preset, one release (MNIST, CPL network)",
    "clipping": "Clipping without noise (MNIST, CPL network)",
    "cnn": "The network that the paper trains, at initialisation (MNIST)",
    "filter": "Matched filter on single examples (MNIST, the paper's CNN at initialisation)",
    "averaging": "Averaging R releases of the same example, σ = 6, C = 4 (MNIST, CPL network)",
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


def _paper_rows(found: dict[str, Any], dataset: str, leak: str) -> str:
    printed = PRINTED[f"{dataset}/{leak.partition('-')[0]}"]
    body = []
    for name in TABLE_METHODS:
        row = found.get(f"table/{dataset}/{leak}/{name}")
        paper = printed[name.partition(" ")[0]]
        if row is not None:
            body.append([name, *_figures(row), f"{paper[0]:g}", f"{paper[1]:g}"])
    return _markdown(["method", *HEADINGS, "*paper: distance*", "*iterations*"], body)


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


def _compression_rows(found: dict[str, Any]) -> str:
    body = []
    for share in PRUNED:
        line = [f"{share:.0%}"]
        for how in ("cpl/non-private", "clip-aware/non-private", "cpl/Fed-CDP", "cpl/Fed-CDP(decay)"):
            row = found.get(f"compression/{share:g}/{how}")
            line.append("–" if row is None else f"{row['success_rate']:.0%} / {row['recognisable_rate']:.0%}")
        for name in TRAINED:
            row = found.get(f"compression/{share:g}/accuracy/{name}")
            line.append("–" if row is None else f"{row['accuracy']:.3f}")
        body.append(line)
    leaks = ["non-private, paper's attack", "non-private, knows what was pruned", "Fed-CDP", "Fed-CDP(decay)"]
    return _markdown(
        ["pruned", *(f"exact / recognisable: {name}" for name in leaks), *(f"accuracy: {name}" for name in TRAINED)], body
    )


def pictures(arrays: Path, out: Path) -> None:
    """The compression figure and the method comparison, as pictures."""
    from fedcdp.attacks.pictures import grid, save

    def batch(leak: str, name: str, what: str = "reconstruction") -> list[torch.Tensor]:
        return _images(arrays, f"comparison__{leak}__{name}", what)

    rows = [[*batch("type2", "non-private", "original"), *batch("type1", "non-private", "original")]]
    rows += [[*batch("type2", name), *batch("type1", name)] for name in METHODS]
    titles = ["type-2: one example", *(f"type-0&1: image {number} of a batch" for number in (1, 2, 3))]
    save(grid(rows, titles, ["original", *METHODS]), out / "attack-methods.png")

    ways = {"cpl__non-private": "non-private, the paper's attack", "clip-aware__non-private": "non-private, a reader who "
            "knows what was pruned", "cpl__Fed-CDP": "Fed-CDP", "cpl__Fed-CDP(decay)": "Fed-CDP(decay)"}  # fmt: skip
    rows = [_images(arrays, "compression__0__cpl__non-private", "original")]
    rows += [[_images(arrays, f"compression__{share:g}__{how}")[0] for share in PRUNED] for how in ways]
    save(
        grid(rows, [f"{share:.0%} pruned" for share in PRUNED], ["original", *ways.values()]), out / "attack-compression.png"
    )


def _images(arrays: Path, name: str, what: str = "reconstruction", victim: int = 0) -> list[torch.Tensor]:
    with np.load(arrays / f"{name}.npz") as held:
        images = torch.from_numpy(held[what][victim])
        order = torch.from_numpy(held["order"][victim])
    return list(images if what == "original" else images[order])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, default=Path("results/attacks.json"))
    runs.add_argument("--device", default="cpu")
    runs.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    runs.add_argument("--only", default="", help="Beginnings of names, separated by commas.")
    runs.add_argument("--limit", type=float, default=float("inf"), help="Seconds after which no new cell is begun.")
    runs.add_argument("--arrays", type=Path)
    runs.add_argument("--list", action="store_true")
    tables = commands.add_parser("table")
    tables.add_argument("results", type=Path)
    shows = commands.add_parser("pictures")
    shows.add_argument("arrays", type=Path)
    shows.add_argument("out", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(table(json.loads(given.results.read_text())), end="")
        return
    if given.command == "pictures":
        pictures(given.arrays, given.out)
        return
    if given.list:
        print("\n".join(cell.name for cell in cells() if cell.name.startswith(tuple(given.only.split(",")))))
        return
    run(given.out, given.device, given.workers, given.only, given.limit, given.arrays)


if __name__ == "__main__":
    main()
