"""The recommended presets: how they were tuned, and what they reach.

    python benchmarks/recommended.py tune --datasets mnist        # settings tried on a fifth of the training split
    python benchmarks/recommended.py run                          # every preset, three seeds, on the validation split
    python benchmarks/recommended.py table > results/recommended.md

All of it runs on a CPU; `--device cuda` is faster. Results are kept in results/recommended.json, and what is there is not
run again. The noise of a setting that is tried comes from the closed form of a Gaussian mechanism (a record is used once a
round, at a known step), so that no accountant is needed; the presets' own noise is checked by the accountant in
tests/test_recommended.py.

Only the final runs see the validation split, once. The search itself looked at training data and is covered by no ε.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import partition
from fedcdp.experiment import assemble
from fedcdp.frozen import split, through
from fedcdp.models import build, prepare
from fedcdp.plan import Plan
from fedcdp.randomness import numpy_generator
from fedcdp.recommended import FEDERATIONS, FOUND
from fedcdp.simulation import simulate

OUT = Path("results/recommended.json")
DELTA = 1e-5
EPSILONS = (1.0, 2.0, 8.0)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Grid:
    """Settings to try: all combinations."""

    rounds: tuple[int, ...]
    clips: tuple[float, ...]
    steps: tuple[float, ...]
    """Learning rate times clip bound: how far a round moves the weights at most."""
    emas: tuple[float, ...] = (0.8,)

    def __iter__(self) -> Iterator[dict[str, float]]:
        for rounds, clip, step, ema in product(self.rounds, self.clips, self.steps, self.emas):
            yield {"rounds": rounds, "clip": clip, "learning_rate": step / clip, "ema": ema}


# Less noise allows more rounds, and further ones.
GRIDS = {
    ("mnist", 1): Grid((20, 40), (0.1, 0.25), (40.0, 80.0)),
    ("mnist", 2): Grid((40, 80), (0.1, 0.25), (40.0, 80.0)),
    ("mnist", 8): Grid((80, 160), (0.1, 0.25), (40.0, 80.0)),
    ("cifar10", 1): Grid((20, 40), (0.25, 0.5), (10.0, 20.0)),
    ("cifar10", 2): Grid((20, 40), (0.25, 0.5), (20.0, 40.0)),
    ("cifar10", 8): Grid((40, 80), (0.25, 0.5), (40.0, 80.0)),
    ("lfw", 1): Grid((5, 10, 20), (0.25, 0.5), (2.0, 5.0, 10.0)),
    ("lfw", 2): Grid((5, 10, 20), (0.25, 0.5), (5.0, 10.0, 20.0)),
    ("lfw", 8): Grid((10, 20, 40), (0.25, 0.5), (10.0, 20.0, 40.0)),
    ("adult", 1): Grid((20, 40), (0.25, 0.5), (2.0, 5.0, 10.0)),
    ("adult", 2): Grid((20, 40), (0.25, 0.5), (2.0, 5.0, 10.0)),
    ("adult", 8): Grid((40, 80), (0.25, 0.5), (2.0, 5.0, 10.0)),
    ("cancer", 1): Grid((3, 5, 10), (0.25, 0.5, 1.0), (0.2, 0.5, 1.0), (0.5,)),
    ("cancer", 2): Grid((3, 5, 10), (0.25, 0.5, 1.0), (0.2, 0.5, 1.0, 2.0), (0.5,)),
    ("cancer", 8): Grid((5, 10, 20), (0.25, 0.5, 1.0), (0.5, 1.0, 2.0), (0.5,)),
}


def multiplier(epsilon: float, rounds: int, batch: int) -> float:
    """σ for which `rounds` sums of `batch` noised gradients give (ε, δ) in all: the Gaussian mechanism in closed form."""

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
def splits_of(dataset: str) -> Splits:
    """The benchmark's own split (its files are found through FEDCDP_DATA)."""
    return assemble({"data": {"dataset": dataset, "scaling": "public"}}).splits(quiet=True)


@cache
def featured(dataset: str, network: str, device: str) -> tuple[Splits, nn.Module]:
    """The splits behind the network's fixed layers, which are computed once for all runs, and the rest of the network."""
    splits = splits_of(dataset)
    whole = prepare(build(network, splits.train.shape, splits.train.classes), Plan(), device)
    front, rest = split(whole, splits.train.inputs, torch.device(device))

    def seen(data: Dataset) -> Dataset:
        return replace(data, inputs=through(front, data.inputs, torch.device(device)), targets=data.targets.to(device))

    return replace(splits, train=seen(splits.train), validation=seen(splits.validation), test=None), rest


def for_tuning(splits: Splits) -> Splits:
    """The training split alone, a fifth of it in the place of the validation split."""
    order = torch.from_numpy(numpy_generator(0, "tuning-split").permutation(len(splits.train)))
    held_out = len(order) // 5
    return replace(splits, train=splits.train.take(order[held_out:]), validation=splits.train.take(order[:held_out]))


def tried(dataset: str, epsilon: float, setting: dict[str, Any], device: str) -> float:
    """Accuracy of one setting on the held-out fifth: four fifths of the clients, each with as many records as ever."""
    federated = FEDERATIONS[dataset]
    splits, network = featured(dataset, federated.network, device)
    splits = for_tuning(splits)
    clients = federated.clients * 4 // 5
    sigma = multiplier(epsilon, setting["rounds"], federated.records)
    plan = assemble(
        FEDERATIONS[dataset].settings(FOUND["mnist"][0]),
        {"plan": {**setting, "noise_multiplier": sigma, "per_round": clients}},
    ).plan
    federation = partition(splits, clients=clients, scheme=federated.partition, records=federated.records, seed=plan.seed)
    run = simulate(network, federation, plan, device=device, evaluate_every=plan.rounds)
    assert run.accuracy is not None
    return run.accuracy


class Kept:
    """Results in a file, by key; what is known is not computed again."""

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


def tune(datasets: list[str], epsilons: list[float], device: str, kept: Kept) -> None:
    """Try every setting of the grids, and print the best of each."""
    for dataset, epsilon in product(datasets, epsilons):
        scores = {}
        for setting in GRIDS[dataset, round(epsilon)]:
            words = " ".join(f"{name}={value:g}" for name, value in setting.items())
            key = f"{dataset} eps={epsilon:g} {words}"
            scores[words] = kept.get("tuning", key, partial(tried, dataset, epsilon, setting, device))
        for words, score in sorted(scores.items(), key=lambda pair: -pair[1])[:5]:
            print(f"best of {dataset} at eps {epsilon:g}: {score:.4f} {words}")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("tune", "run", "table"))
    parser.add_argument("--datasets", default=",".join(FEDERATIONS), help="comma separated")
    parser.add_argument("--epsilons", default="1,2,8", help="comma separated, for tune")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    datasets = given.datasets.split(",")
    if given.command == "tune":
        tune(datasets, [float(each) for each in given.epsilons.split(",")], given.device, Kept(given.out))


if __name__ == "__main__":
    main()
