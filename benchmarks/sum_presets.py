"""The presets whose server reads the sum of a round (`mnist-sum-eps1`, …): their tuning, and their accuracy.

    python -m benchmarks.sum_presets tune --device cuda --datasets mnist      # on a fifth of the training split
    python -m benchmarks.sum_presets run --device cuda                        # every preset, three seeds, validation split

Federations, networks and splits are those of `benchmarks/recommended.py`, and so are the functions. Each client adds a share
of the noise, and the server has momentum. The noise of a tuning setting comes from the closed form of a Gaussian mechanism:
with noise on the sum, T rounds have z = σ/√T. The accountant checks the presets' own noise in
tests/config/test_recommended.py.

Results are stored in results/sum_presets.json, and stored results are not computed again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from benchmarks.recommended import FIFTHS, SEEDS, SPLITS, Kept, Row, accuracy, multiplier
from fedcdp.config.experiment import assemble
from fedcdp.config.presets import FEDERATIONS, RECOMMENDED, Found

OUT = Path("results/sum_presets.json")
KEPT = 0.9  # server momentum and moving average


@dataclass(frozen=True)
class Grid:
    """Settings to try, in all combinations."""

    rounds: tuple[int, ...]
    clips: tuple[float, ...]
    steps: tuple[float, ...]
    """Learning rate times clip bound: the most that one mean update moves the weights."""

    def __iter__(self) -> Iterator[dict[str, float]]:
        for rounds, clip, step in product(self.rounds, self.clips, self.steps):
            yield {"rounds": rounds, "clip": clip, "learning_rate": step / clip}


GRIDS = {
    "mnist": Grid((200, 500), (0.1,), (6.0, 20.0, 60.0)),
    "cifar10": Grid((40, 60, 100, 150, 300), (0.1, 0.25, 0.5, 1.0), (10.0, 20.0, 40.0, 80.0)),
    "lfw": Grid((75, 150, 300), (0.05, 0.1, 0.25), (1.0, 2.0, 4.0, 8.0)),
    "adult": Grid((100, 300), (0.25,), (1.0, 3.0, 10.0)),
    "cancer": Grid((20, 50), (0.25,), (0.3, 1.0, 3.0)),
}
EPSILONS = (1.0, 2.0, 8.0)


def tried(dataset: str, epsilon: float, setting: dict[str, Any], device: str) -> float:
    """Accuracy of one setting on the held-out fifth, or on several."""
    sigma = multiplier(epsilon, setting["rounds"], 1)
    found = Found(epsilon, noise_multiplier=sigma, ema=KEPT, server_momentum=KEPT, **setting)
    scores = []
    for seed in range(FIFTHS.get(dataset, 1)):
        experiment = assemble(FEDERATIONS[dataset].settings(found), {"plan": {"seed": seed}})
        scores.append(accuracy(experiment, device, tuning=True))
    return statistics.mean(scores)


def tune(datasets: list[str], device: str, deadline: float, kept: Kept) -> None:
    """Try every setting of the grids, and print the best of each with the noise that the preset needs."""
    for dataset, epsilon in product(datasets, EPSILONS):
        scores: dict[tuple[float, ...], float] = {}
        for setting in GRIDS[dataset]:
            if time.time() > deadline:
                return
            words = " ".join(f"{name}={value:g}" for name, value in setting.items())
            key = f"{dataset} eps={epsilon:g} {words}"
            scores[tuple(setting.values())] = kept.get("tuning", key, partial(tried, dataset, epsilon, setting, device))
        for (rounds, clip, rate), score in sorted(scores.items(), key=lambda pair: -pair[1])[:3]:
            sigma = math.ceil(multiplier(epsilon, int(rounds), 1) * 1e4) / 1e4
            print(f"best: {dataset} {score:.4f} Found({epsilon:g}, {rounds:g}, {clip:g}, {sigma:g}, {rate:g}, 0.9, 0.9)")


def finish(name: str, device: str, commit: str) -> dict[str, Any]:
    """A preset's accuracy on the validation split, with several seeds."""
    started, row = time.perf_counter(), Row("sum", "recommended", name)
    found = [accuracy(each, device, tuning=False) for each in row.experiments()]
    return {
        "plan": row.experiment().plan.written(),
        "accuracies": found,
        "mean": statistics.mean(found),
        "spread": statistics.stdev(found),
        "seeds": list(range(SPLITS[name.partition("-")[0]])) if name.partition("-")[0] in SPLITS else list(SEEDS),
        "seconds": round(time.perf_counter() - started, 1),
        "hardware": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU, one thread",
        "command": f"python -m benchmarks.sum_presets run --device {device}",
        "commit": commit,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "run"))
    parser.add_argument("--datasets", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after so many")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    deadline, kept = time.time() + given.seconds, Kept(given.out)
    if given.what == "tune":
        tune(given.datasets, given.device, deadline, kept)
        return
    commit = given.commit or clean_commit()
    for name in (name for name in RECOMMENDED if "-sum-" in name):
        if name.partition("-")[0] in given.datasets and time.time() < deadline:
            kept.get("presets", name, partial(finish, name, given.device, commit))


if __name__ == "__main__":
    main()
