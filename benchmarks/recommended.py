"""The recommended presets: their accuracy, what their ingredients contribute, and the paper's network beside them.

    python -m benchmarks.recommended run                          # every preset, three seeds, on the validation split
    python -m benchmarks.recommended curator                      # the features under one trusted curator, at ε = 3
    python -m benchmarks.recommended table > results/recommended.md

All of it runs on a CPU; `--device cuda` is faster. Results are stored in results/recommended.json, and stored results are
not computed again. `benchmarks.preset_search` found the settings, on a fifth of the training split. The accountant checks
the presets' noise in tests/config/test_recommended.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.clean_tree import clean_commit
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.plan import Plan
from fedcdp.config.presets import RECOMMENDED, Settings, preset
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.engine.frozen import split
from fedcdp.mechanism.randomness import numpy_generator
from fedcdp.models.networks import build, prepare
from fedcdp.training.feature_cache import features_of
from fedcdp.training.prepared import deal_out, load_splits, network_of
from fedcdp.training.simulate import simulate

OUT = Path("results/recommended.json")
DELTA = 1e-5
SEEDS = (0, 1, 2)
FIFTHS = {"cancer": 20, "lfw": 3}
SPLITS = {"cancer": 10}  # with 143 validation records each: one split says little


@dataclass(frozen=True)
class Row:
    """One line of the tables: a preset with changes, and the learning rates to choose from if the changes need another."""

    section: str
    name: str
    preset: str
    changes: Settings = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    needs_gpu: bool = False

    @property
    def key(self) -> str:
        return f"{self.preset}: {self.name}"

    def experiment(self, **plan: Any) -> Experiment:
        return assemble(preset(self.preset), self.changes, {"plan": plan})

    def experiments(self, **plan: Any) -> list[Experiment]:
        """One experiment for each seed, and for each split if there are several."""
        splits = SPLITS.get(self.preset.partition("-")[0])
        seeds = SEEDS[:1] if self.section == "non-private" else SEEDS  # without noise, all seeds give the same result
        every = [self.experiment(seed=seed, **plan) for seed in (range(splits) if splits else seeds)]
        return [replace(each, data=replace(each.data, split_seed=each.plan.seed)) for each in every] if splits else every


def rows() -> list[Row]:
    """All rows. Rows with another mechanism have their noise from `fedcdp calibrate`."""
    found = [Row("sum" if chosen.on_sum else "recommended", "recommended", name) for name, chosen in RECOMMENDED.items()]
    found += [Row("recommended", "dealt out at random", f"mnist-eps{e}", {"data": {"partition": "iid"}}) for e in (1, 2, 8)]
    clean = {"method": "nonprivate", "noise_multiplier": 0.0, "rounds": 100, "server_optimizer": "sgd"}
    rates = {
        "mnist": (100.0, 300.0),
        "cifar10": (100.0, 300.0),
        "lfw": (100.0, 300.0),
        "adult": (30.0, 100.0),
        "cancer": (10.0, 30.0),
    }
    found += [Row("non-private", "non-private", f"{dataset}-eps8", {"plan": clean}, rates[dataset]) for dataset in rates]
    ablation = partial(Row, "ablation", preset="mnist-eps1")
    rate, clip, rounds = (getattr(RECOMMENDED["mnist-eps1"].found, name) for name in ("learning_rate", "clip", "rounds"))
    step = rate * clip
    found += [
        ablation(
            "pixels in the place of features", changes={"model": {"network": "linear"}}, rates=(rate, 4 * rate, 16 * rate)
        ),
        ablation("clip bound 1", changes={"plan": {"clip": 1.0}}, rates=(step / 4, step / 2, step)),
        ablation("no moving average", changes={"plan": {"ema": 0.0}}, rates=(rate / 4, rate / 2, rate)),
        ablation("no momentum", changes={"plan": {"server_optimizer": "sgd"}}, rates=(2.5 * rate, 5 * rate, 10 * rate)),
        ablation(
            "ten local steps in a tenth of the rounds",
            changes={"plan": {"local_steps": 10, "rounds": rounds // 10, "ema": 0.0, "server_optimizer": "sgd"}},
            rates=(rate / 16, rate / 4, rate),
        ),
        ablation(
            "the paper's batch: 5 records, 100 local steps, half of the clients, 100 rounds",
            changes={"plan": PAPERS_BATCH | {"noise_multiplier": 0.7251}},
            rates=(1.0, 3.0, 10.0),
        ),
        ablation(
            "the paper's network (tanh, clipped at once at 1), 100 rounds",
            changes={
                "model": {"network": "cnn", "activation": "tanh"},
                "plan": {
                    "clip_mode": "flat",
                    "clip": 1.0,
                    "rounds": 100,
                    "noise_multiplier": 1.6695,
                    "server_optimizer": "sgd",
                },
            },
            rates=(0.5, 1.0, 2.0),
            needs_gpu=True,
        ),
    ]
    plain = {"network": "cnn", "activation": "tanh"}
    for epsilon, sigma in ((1, 1.2554), (2, 0.7251), (8, 0.3531)):
        changes = {
            "model": plain,
            "plan": PAPERS_BATCH | {"noise_multiplier": sigma, "clip": 1.0, "server_learning_rate": 10.0, "ema": 0.9},
        }
        rates_tried = (5e-4, 1e-3, 2e-3, 4e-3)
        found.append(Row("baseline", "the paper's network and batch", f"mnist-eps{epsilon}", changes, rates_tried, True))
    return found


PAPERS_BATCH = {
    "record_sampling": "poisson",
    "batch_size": 5,
    "local_steps": 100,
    "per_round": 50,
    "rounds": 100,
    "ema": 0.9,
    "server_optimizer": "sgd",
}


def multiplier(epsilon: float, rounds: int, batch: int) -> float:
    """σ for which `rounds` sums of `batch` noised gradients give (ε, δ) in total: the Gaussian mechanism in closed form."""

    def delta(shift: float) -> float:
        return _normal(shift / 2 - epsilon / shift) - math.exp(epsilon) * _normal(-shift / 2 - epsilon / shift)

    low, high = 1e-3, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) < DELTA else (low, middle)
    return math.sqrt(rounds / batch) / low


def _normal(value: float) -> float:
    return math.erfc(-value / math.sqrt(2)) / 2


@cache
def splits_of(dataset: str, split_seed: int) -> Splits:
    """The benchmark's own split (its files are found with FEDCDP_DATA)."""
    return load_splits(assemble({"data": {"dataset": dataset, "scaling": "public", "split_seed": split_seed}}), quiet=True)


@cache
def featured(dataset: str, split_seed: int, network: str, device: str) -> tuple[Splits, nn.Module | None]:
    """The splits after the network's fixed layers, which are computed once for all runs, and the rest of the network.

    The rest is None if there are no fixed layers: the trained network then starts from the run's own seed.
    """
    splits = splits_of(dataset, split_seed)
    whole = prepare(build(network, splits.train.shape, splits.train.classes), Plan(), device)
    front, rest = split(whole, splits.train.inputs, torch.device(device))

    def seen(data: Dataset) -> Dataset:
        return replace(data, inputs=features_of(front, data, torch.device(device)))

    test = seen(splits.test) if dataset == "cifar10" and splits.test is not None else None  # for `curator`
    seen_splits = replace(splits, train=seen(splits.train), validation=seen(splits.validation), test=test)
    return seen_splits, rest if front is not None else None


def for_tuning(splits: Splits, seed: int) -> Splits:
    """The training split alone, with a fifth of it in place of the validation split."""
    order = torch.from_numpy(numpy_generator(seed, "tuning-split").permutation(len(splits.train)))
    held_out = len(order) // 5
    return replace(splits, train=splits.train.take(order[held_out:]), validation=splits.train.take(order[:held_out]))


def accuracy(experiment: Experiment, device: str, tuning: bool) -> float:
    """Train: for a result, on the whole training split; for tuning, on four fifths, with four fifths of the clients."""
    data, plan = experiment.data, experiment.plan
    splits, network = featured(str(data.dataset), data.split_seed, experiment.model.network, device)
    if network is None:
        network = network_of(experiment, splits)
    if tuning:
        splits = for_tuning(splits, plan.seed)
        data = replace(data, clients=data.clients * 4 // 5)
        plan = plan.but(per_round=plan.per_round * 4 // 5)
    federation = deal_out(replace(experiment, data=data, plan=plan), splits)
    run = simulate(network, federation, plan, device=device, evaluate_every=plan.rounds)
    assert run.accuracy is not None
    return run.accuracy


class Kept:
    """Results in a file, by key; known results are not computed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, section: str, key: str, compute: Any) -> Any:
        part = self.known.setdefault(section, {})
        if key not in part:
            started = time.perf_counter()
            part[key] = compute()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.known, indent=1) + "\n")
            print(f"{section}: {key}: {part[key]} ({time.perf_counter() - started:.1f} s)", flush=True)
        return part[key]


def finish(row: Row, device: str, commit: str) -> dict[str, Any]:
    """A row's accuracy on the validation split, with several seeds, and its ε if accounting is installed."""
    started = time.perf_counter()
    tuned = {rate: accuracy(row.experiment(learning_rate=rate), device, tuning=True) for rate in row.rates}
    chosen = {"learning_rate": max(tuned, key=lambda rate: tuned[rate])} if tuned else {}
    accuracies = [accuracy(each, device, tuning=False) for each in row.experiments(**chosen)]
    return {
        "section": row.section,
        "preset": row.preset,
        "name": row.name,
        "tuning": tuned,
        "plan": row.experiment(**chosen).plan.written(),
        "network": row.experiment().model.network,
        "accuracies": accuracies,
        "mean": statistics.mean(accuracies),
        "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "command": f"python -m benchmarks.recommended run --device {device}",
        "commit": commit,
        "seconds": round(time.perf_counter() - started, 1),
        "hardware": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU, one thread",
    }


def run_all(datasets: list[str], sections: list[str], device: str, commit: str, deadline: float, kept: Kept) -> None:
    """Every row that is not known yet; rows that need a GPU only run on one. No row is started after the deadline."""
    for row in sorted(rows(), key=lambda row: "10k" in row.preset):  # ten thousand clients take the longest
        if time.time() > deadline:
            return
        wanted = row.preset.partition("-")[0] in datasets and row.section in sections
        if wanted and (device.startswith("cuda") or not row.needs_gpu):
            kept.get("rows", row.key, partial(finish, row, device, commit))


def curator(device: str, commit: str) -> dict[str, Any]:
    """One trusted curator at ε = 3 with all 50,000 training images of CIFAR-10, scored on the 10,000 test images.

    Tramèr and Boneh (2021) measure features this way. The settings are those of `cifar10-sum-eps2`, not tuned for this.
    """
    started, chosen = time.perf_counter(), RECOMMENDED["cifar10-sum-eps2"]
    splits, network = featured("cifar10", 0, chosen.federated.network, device)
    assert network is not None
    assert splits.test is not None
    records = len(splits.train) + len(splits.validation)
    sigma = math.ceil(1e4 * multiplier(3.0, chosen.found.rounds, records)) / 1e4
    settings = replace(chosen.federated, clients=1, records=records, partition="iid").settings(
        replace(chosen.found, noise_multiplier=sigma)
    )
    together = (
        torch.cat([getattr(part, name) for part in (splits.train, splits.validation)]) for name in ("inputs", "targets")
    )
    all_of_them = replace(splits, train=Dataset(*together, splits.train.classes), validation=splits.test, test=None)
    accuracies = []
    for seed in SEEDS:
        experiment = assemble(settings, {"plan": {"seed": seed}})
        run = simulate(network, deal_out(experiment, all_of_them), experiment.plan, device=device, evaluate_every=10**6)
        accuracies.append(run.evaluate()["accuracy"])
    return {
        "epsilon": 3.0,
        "records": records,
        "plan": experiment.plan.written(),
        "accuracies": accuracies,
        "mean": statistics.mean(accuracies),
        "spread": statistics.stdev(accuracies),
        "seconds": round(time.perf_counter() - started, 1),
        "hardware": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU, one thread",
        "command": f"python -m benchmarks.recommended curator --device {device}",
        "commit": commit,
    }


def epsilons_of(row: Row) -> dict[str, float]:
    """ε of a row: the server's for a record and a person, and that of an adversary who sees single gradients."""
    from fedcdp.accounting.statement import state
    from fedcdp.training.prepared import population_of  # not needed on a machine that only trains

    experiment = row.experiment()
    found = state(experiment.plan, population_of(experiment)).rows
    return {f"{each.adversary} {each.unit}": each.epsilon for each in found if each.relation == "zero-out"}


def markdown(known: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines: list[str] = []
    titles = {
        "recommended": "Recommended presets: the server reads each update",
        "sum": "Recommended presets: the server reads the sum",
        "non-private": "The same networks without privacy",
        "ablation": "mnist-eps1, one ingredient at a time taken away (the noise always for the same ε)",
        "baseline": "The paper's network and batch, tuned, at the same ε",
    }
    for section, title in titles.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| preset | | ε server, record | ε server, person | ε example | σ | T | C | learning rate | accuracy |",
        ]
        lines += ["| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
        for row in rows():
            result = known.get("rows", {}).get(row.key)
            if row.section != section or result is None:
                continue
            plan, epsilon = result["plan"], epsilons_of(row)
            server = epsilon.get("server record", math.inf)
            figures = (server, epsilon.get("server unique", server), epsilon.get("example record", math.inf))
            shown = " | ".join("∞" if math.isinf(each) else f"{each:.3g}" for each in figures)
            noise = f"{plan['noise_multiplier']:g} | {plan['rounds']} | {plan['clip']} | {plan['learning_rate']}"
            lines.append(f"| {row.preset} | {row.name} | {shown} | {noise} | {_spread(result['accuracies'])} |")
    return "\n".join(lines[1:])


def _spread(accuracies: list[float]) -> str:
    mean = f"{statistics.mean(accuracies):.4f}"
    return mean if len(accuracies) == 1 else f"{mean} ± {statistics.stdev(accuracies):.4f}"


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "curator", "table"))
    parser.add_argument("--datasets", default="mnist,cifar10,lfw,adult,cancer", help="comma separated")
    parser.add_argument(
        "--sections", default="recommended,sum,non-private,ablation,baseline", help="comma separated, for run"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="start no further row after this time; run again to continue"
    )
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    datasets, kept = given.datasets.split(","), Kept(given.out)
    if given.command == "curator":
        found = curator(given.device, given.commit or clean_commit())
        given.out.with_name("curator.json").write_text(json.dumps(found, indent=1) + "\n")
    elif given.command == "run":
        commit, deadline = given.commit or clean_commit(), time.time() + 60 * given.minutes
        run_all(datasets, given.sections.split(","), given.device, commit, deadline, kept)
    else:
        print(markdown(kept.known))


if __name__ == "__main__":
    main()
