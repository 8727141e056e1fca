"""Accuracy of every method on the paper's benchmarks, beside the paper's printed figures.

    python benchmarks/accuracy.py run --device cuda --workers 4 --out results/accuracy.json
    python benchmarks/accuracy.py table results/accuracy.json > results/accuracy.md

The learning rate of each row is chosen on a fifth of the *training* split, held out for that alone, after a third of
the rounds (where `tuning_share` is 1: all of them); then the row is trained on the whole training split with that rate,
and its accuracy on the validation split after the last round is reported. What is already in the result file is not run
again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fedcdp.data.dataset import Splits
from fedcdp.experiment import Experiment, assemble
from fedcdp.presets import preset
from fedcdp.randomness import numpy_generator
from fedcdp.simulation import simulate

COHORT = {"noise": "cohort"}
AVERAGED = {"activation": "tanh", "server_learning_rate": 10.0, "ema": 0.9}
SMALL_CLIP = {"clip": 0.5}
FLAGS = {
    "activation": "--activation",
    "clip": "--clip",
    "ema": "--ema",
    "noise": "--noise",
    "server_learning_rate": "--server-lr",
}


@dataclass(frozen=True)
class Row:
    """One line of the table: the paper's setting for a dataset with changes, and the learning rates to choose from."""

    name: str
    dataset: str
    method: str
    rates: tuple[float | str, ...]
    """Numbers, or schedules in their written form."""
    changes: dict[str, Any] = field(default_factory=dict)
    printed: float | None = None
    splits: int = 1
    tuning_share: float = 1 / 3
    """The share of the rounds that is run to choose the rate."""

    def experiment(self, rate: float | str, split_seed: int, device: str) -> Experiment:
        changes = dict(self.changes)
        model = {"activation": changes.pop("activation")} if "activation" in changes else {}
        return assemble(
            preset(self.dataset),
            {
                "data": {"split_seed": split_seed},
                "model": model,
                "plan": {"method": self.method, "learning_rate": rate, **changes},
                "run": {"device": device, "evaluate_every": 10},
            },
        )

    def command(self, rate: float | str) -> str:
        changed = "".join(f" {FLAGS[key]} {value}" for key, value in self.changes.items())
        arguments = f"--preset {self.dataset} --method {self.method}{changed} --lr {shlex.quote(str(rate))}"
        return f"fedcdp train {arguments} --device cuda --out RUN"


ROWS = [
    Row("non-private", "mnist", "nonprivate", (0.05, 0.1, 0.2), printed=0.980),
    Row("Fed-CDP, cohort noise", "mnist", "fed-cdp", (0.05, 0.1), COHORT, printed=0.956),
    Row("Fed-CDP(decay), cohort noise", "mnist", "fed-cdp-decay", (0.05, 0.1), COHORT, printed=0.975),
    Row("Fed-CDP, example noise", "mnist", "fed-cdp", (5e-4, 1e-3), printed=0.956),
    Row("Fed-CDP, example noise, tanh, server rate 10, average .9", "mnist", "fed-cdp",
        (5e-5, 1e-4), AVERAGED, printed=0.956, tuning_share=1),
    Row("Fed-CDP, batch noise, tanh, average .9", "mnist", "fed-cdp", (1e-3, 2e-3),
        {"noise": "batch", "activation": "tanh", "ema": 0.9}, printed=0.956),
    Row("Fed-SDP, noise at the server, C = 4", "mnist", "fed-sdp", (0.05, 0.1), printed=0.928),
    Row("Fed-SDP, noise at the server, C = 0.5", "mnist", "fed-sdp", (0.05, 0.1), SMALL_CLIP, printed=0.928),
    Row("Fed-SDP, noise at the server, C = 0.5, average .9", "mnist", "fed-sdp",
        (0.05, 0.1), SMALL_CLIP | {"ema": 0.9}, printed=0.928),
    Row("DSSGD, a tenth shared", "mnist", "dssgd", (0.1, 0.2)),
    Row("non-private", "lfw", "nonprivate", (0.03, 0.05, 0.1), printed=0.695),
    Row("Fed-CDP, cohort noise", "lfw", "fed-cdp", (0.03, 0.05, 0.1), COHORT, printed=0.649),
    Row("Fed-CDP, example noise", "lfw", "fed-cdp", (5e-4, 1e-3), printed=0.649),
    Row("non-private", "adult", "nonprivate", (0.02, 0.05, 0.1, 0.2), printed=0.8424, tuning_share=1),
    Row("Fed-CDP, cohort noise", "adult", "fed-cdp", (0.02, 0.05, 0.1, 0.2), COHORT, printed=0.824, tuning_share=1),
    Row("Fed-CDP, example noise", "adult", "fed-cdp", (1e-3, 2e-3, 5e-3), printed=0.824, tuning_share=1),
    Row("non-private", "cancer", "nonprivate", (0.02, 0.05, 0.1, 0.2), printed=0.993, splits=10, tuning_share=1),
    Row("Fed-CDP, cohort noise", "cancer", "fed-cdp", (0.02, 0.05, 0.1, 0.2), COHORT,
        printed=0.979, splits=10, tuning_share=1),
    Row("Fed-CDP, example noise", "cancer", "fed-cdp", (5e-4, 1e-3, 2e-3), printed=0.979, splits=10, tuning_share=1),
    Row("non-private", "cifar10", "nonprivate", (0.02, 0.05, 0.1), printed=0.674),
    Row("non-private, falling rate, average .9", "cifar10", "nonprivate",
        ("cosine(0.05, 0.005)", "cosine(0.07, 0.005)"), {"ema": 0.9}, printed=0.674),
    Row("Fed-CDP, cohort noise", "cifar10", "fed-cdp", (0.02, 0.05, 0.1), COHORT, printed=0.633),
    Row("Fed-CDP, example noise", "cifar10", "fed-cdp", (5e-4, 1e-3), printed=0.633),
]  # fmt: skip


@cache
def splits_of(dataset: str, split_seed: int) -> Splits:
    """The paper's split of a dataset (its files are found through FEDCDP_DATA)."""
    experiment = assemble(preset(dataset), {"data": {"split_seed": split_seed}})
    return experiment.splits(quiet=True)


def for_tuning(splits: Splits) -> Splits:
    """The training split alone, a fifth of it in the place of the validation split."""
    order = torch.from_numpy(numpy_generator(0, "tuning-split").permutation(len(splits.train)))
    held_out = len(order) // 5
    return replace(splits, train=splits.train.take(order[held_out:]), validation=splits.train.take(order[:held_out]))


@dataclass(frozen=True)
class Job:
    """One training run of a row: at a rate on the tuning split, or (final) at the best rate on the real one."""

    row: Row
    rate: float | str
    split_seed: int
    tuning: bool


def train(job: Job, device: str) -> dict[str, Any]:
    """Do one job: the final accuracy, and how long it took."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    experiment = job.row.experiment(job.rate, job.split_seed, device)
    splits, plan = splits_of(job.row.dataset, job.split_seed), experiment.plan
    if job.tuning:
        splits = for_tuning(splits)
        plan = plan.but(rounds=round(plan.rounds * job.row.tuning_share))
    run = simulate(experiment.network(splits), experiment.federation(splits), plan, device=device, evaluate_every=10)
    return {"accuracy": run.accuracy, "seconds": round(run.seconds, 1), "hardware": hardware(device)}


def hardware(device: str) -> str:
    """What a run ran on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {os.cpu_count()} cores, one thread a run"


class Progress:
    """What is known so far, kept in a file; it says which job comes next."""

    def __init__(self, rows: list[Row], out: Path, workers: int) -> None:
        self.rows, self.out = rows, out
        self.about = {"torch": torch.__version__, "workers": workers}
        known = json.loads(out.read_text())["rows"] if out.exists() else []
        self.known = {(each["dataset"], each["name"]): each for each in known}
        self.started: set[tuple[str, str, float | str, int, bool]] = set()

    def next_job(self) -> Job | None:
        """Final runs first, so that what is begun is finished."""
        for tuning in (False, True):
            for row in self.rows:
                known = self.known.get((row.dataset, row.name), {"tuning": {}, "runs": []})
                if tuning:
                    wanted = [Job(row, rate, 0, True) for rate in row.rates if f"{rate}" not in known["tuning"]]
                elif len(known["tuning"]) == len(row.rates):
                    seeds = set(range(row.splits)) - {run["split_seed"] for run in known["runs"]}
                    wanted = [Job(row, known["rate"], seed, False) for seed in sorted(seeds)]
                else:
                    continue
                for job in wanted:
                    key = (row.dataset, row.name, job.rate, job.split_seed, job.tuning)
                    if key not in self.started:
                        self.started.add(key)
                        return job
        return None

    def keep(self, job: Job, result: dict[str, Any]) -> None:
        """Take a result in, choose the rate once all are tried, and write the file."""
        row = job.row
        known = self.known.setdefault((row.dataset, row.name), asdict(row) | {"tuning": {}, "runs": []})
        if job.tuning:
            known["tuning"][f"{job.rate}"] = result["accuracy"]
            known["rate"] = max(row.rates, key=lambda rate: known["tuning"].get(f"{rate}", -1.0))
            known["command"] = row.command(known["rate"])
        else:
            known["runs"].append({"split_seed": job.split_seed} | result)
        print(row.dataset, row.name, "tuning" if job.tuning else "final", f"{job.rate}", result, flush=True)
        order = [self.known[each.dataset, each.name] for each in ROWS if (each.dataset, each.name) in self.known]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.about | {"rows": order}, indent=1) + "\n")


def run_all(rows: list[Row], device: str, workers: int, out: Path, deadline: float) -> None:
    """Choose the rate of every row, then train it; no job starts after the deadline, and the next call goes on."""
    progress = Progress(rows, out, workers)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running: dict[Future[dict[str, Any]], Job] = {}
        while True:
            while len(running) < workers and time.time() < deadline and (job := progress.next_job()):
                running[pool.submit(train, job, device)] = job
            if not running:
                break
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                progress.keep(running.pop(future), future.result())


def markdown(path: Path) -> str:
    """The table for people."""
    content = json.loads(path.read_text())
    lines = [
        "| dataset | method | learning rate | accuracy | paper |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in (each for each in content["rows"] if len(each["runs"]) == each["splits"]):
        accuracies = [run["accuracy"] for run in row["runs"]]
        shown = f"{statistics.mean(accuracies):.3f}"
        if len(accuracies) > 1:
            spread = f"{min(accuracies):.3f} to {max(accuracies):.3f} over {len(accuracies)} splits"
            shown += f" ± {statistics.stdev(accuracies):.3f} ({spread})"
        printed = "" if row["printed"] is None else f"{row['printed']:.3f}"
        lines.append(f"| {row['dataset']} | {row['name']} | {row['rate']} | {shown} | {printed} |")
    return "\n".join(lines)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--device", default="cuda")
    runner.add_argument("--workers", type=int, default=4)
    runner.add_argument("--datasets", default="", help="comma separated; all by default")
    runner.add_argument("--minutes", type=float, default=1e6, help="start no further run after this long")
    runner.add_argument("--out", type=Path, default=Path("results/accuracy.json"))
    tabler = commands.add_parser("table")
    tabler.add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(markdown(given.path))
        return
    wanted = given.datasets.split(",") if given.datasets else list(dict.fromkeys(row.dataset for row in ROWS))
    rows = [row for dataset in wanted for row in ROWS if row.dataset == dataset]
    run_all(rows, given.device, given.workers, given.out, time.time() + 60 * given.minutes)


if __name__ == "__main__":
    main()
