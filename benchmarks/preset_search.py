"""The search for the settings of the recommended presets, on a fifth of the training split.

    python -m benchmarks.preset_search settings --device cuda     # rounds, clip bound and learning rate, for each preset
    python -m benchmarks.preset_search features --device cuda     # which fixed features to use
    python -m benchmarks.preset_search best                       # the best settings that are stored

A preset trains one linear layer from zero on fixed features, with one step of all clients on all their records in a round.
Such a training is a few matrix products, and many settings share them: here they train side by side, with float32 sums.
`benchmarks.recommended` measures the settings that were chosen with the product's own code.

The noise comes from the closed form of a Gaussian mechanism. If the server reads each update, the noise of the sum is √K
times as large. Training uses four fifths of the training split and of the clients; the other fifth scores. No ε covers the
search. Results are stored in results/preset_search.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.recommended import FIFTHS, featured, for_tuning, multiplier, splits_of
from fedcdp.config.presets import FEDERATIONS
from fedcdp.data.dataset import Splits
from fedcdp.models.random_process import STAGES, RandomProcess

OUT = Path("results/preset_search.json")
EPSILONS = (1.0, 2.0, 8.0)
KEPT = 0.9  # server momentum and moving average
AT_ONCE = 40

Setting = tuple[int, float, float]
"""Rounds, clip bound, and learning rate times clip bound: how far a round moves the weights at most, up to momentum."""


@dataclass(frozen=True)
class Grid:
    """Settings to try, in all combinations."""

    rounds: tuple[int, ...]
    clips: tuple[float, ...]
    steps: tuple[float, ...]

    def settings(self) -> list[Setting]:
        return list(itertools.product(self.rounds, self.clips, self.steps))


CIFAR10 = {
    ("each", 1): Grid((25, 50, 100, 200), (0.1, 0.2, 0.4), (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)),
    ("each", 2): Grid((50, 100, 200), (0.1, 0.2, 0.4), (1.0, 2.0, 3.0, 4.0, 6.0)),
    ("each", 8): Grid((100, 200, 400), (0.1, 0.2, 0.4), (2.0, 3.0, 4.0, 6.0, 9.0)),
    ("sum", 1): Grid((100, 200, 400), (0.1, 0.2, 0.5), (3.0, 6.0, 9.0, 12.0, 18.0)),
    ("sum", 2): Grid((100, 200, 400), (0.1, 0.2, 0.5), (4.0, 6.0, 9.0, 12.0, 18.0)),
    ("sum", 8): Grid((200, 400, 800), (0.1, 0.2, 0.5), (6.0, 9.0, 12.0, 18.0, 24.0)),
}
MNIST = {
    ("each", 1): Grid((20, 40, 80), (0.03, 0.05, 0.1), (3.0, 4.0, 6.0, 8.0, 12.0)),
    ("each", 2): Grid((40, 80, 160), (0.03, 0.05, 0.1), (3.0, 4.0, 6.0, 8.0, 12.0)),
    ("each", 8): Grid((80, 160, 320), (0.03, 0.05, 0.1), (4.0, 6.0, 8.0, 12.0, 16.0)),
    ("sum", 1): Grid((400, 800), (0.03, 0.05, 0.1), (2.0, 3.0, 4.0, 6.0)),
    ("sum", 2): Grid((400, 800), (0.03, 0.05, 0.1), (3.0, 6.0, 9.0, 12.0)),
    ("sum", 8): Grid((800,), (0.03, 0.05, 0.1), (12.0, 24.0, 48.0, 72.0)),
}
LFW = {
    ("each", 1): Grid((10, 20, 40), (0.1, 0.25, 0.5), (0.25, 0.5, 1.0, 2.0)),
    ("each", 2): Grid((20, 40, 80), (0.1, 0.25, 0.5), (0.5, 1.0, 2.0)),
    ("each", 8): Grid((40, 80, 160), (0.1, 0.25), (1.0, 2.0, 4.0, 8.0)),
    ("sum", 1): Grid((50, 100, 200), (0.1, 0.25, 0.5), (0.5, 1.0, 2.0)),
    ("sum", 2): Grid((100, 200, 400), (0.1, 0.25), (0.5, 1.0, 2.0, 4.0)),
    ("sum", 8): Grid((200, 400, 800), (0.1, 0.25), (1.0, 2.0, 4.0, 8.0)),
}
GRIDS = {
    ("mnist", "oriented-gradients"): MNIST,
    ("mnist", "scattering+oriented-gradients"): MNIST,
    ("cifar10", "random-process"): CIFAR10,
    ("lfw", "mirrored-gradients"): LFW,
    ("lfw", "random-process+mirrored-gradients"): LFW,
}
"""By dataset and network. Adult and breast cancer keep the settings of an earlier search."""


@dataclass(frozen=True)
class Scored:
    """Features and labels: four fifths to train on, and a fifth to score."""

    features: Tensor
    labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor
    classes: int

    @classmethod
    def of(cls, splits: Splits, seed: int, device: str) -> Scored:
        some = for_tuning(splits, seed)
        parts = (some.train.inputs, some.train.targets, some.validation.inputs, some.validation.targets)
        assert all(isinstance(part, Tensor) for part in parts)
        return cls(*(part.to(device) for part in parts), classes=some.train.classes)  # type: ignore[union-attr]


@torch.no_grad()
def train(data: Scored, settings: list[Setting], noise: float, seed: int = 0) -> list[float]:
    """The accuracy of each setting; all have the same number of rounds.

    `noise` is the standard deviation of the noise of one round's sum, for a clip bound of 1.
    """
    records, size = data.features.shape
    device = data.features.device
    clips = torch.tensor([setting[1] for setting in settings], device=device)
    rates = torch.tensor([setting[2] for setting in settings], device=device) / clips
    targets = F.one_hot(data.labels, data.classes)[:, None].float()
    norms = data.features.norm(dim=1)[:, None]
    weights = torch.zeros(size, len(settings), data.classes, device=device)
    velocity, average = torch.zeros_like(weights), torch.zeros_like(weights)
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(settings[0][0]):
        errors = (data.features @ weights.flatten(1)).unflatten(1, weights.shape[1:]).softmax(2) - targets
        factors = (clips / (errors.norm(dim=2) * norms).clamp(min=1e-9)).clamp(max=1)
        total = (data.features.T @ (errors * factors[..., None]).flatten(1)).view_as(weights)
        total += noise * clips[:, None] * torch.randn(weights.shape, device=device, generator=generator)
        velocity = KEPT * velocity + total / records
        weights = weights - rates[:, None] * velocity
        average = KEPT * average + (1 - KEPT) * weights
    guesses = (data.held_out @ average.flatten(1)).unflatten(1, weights.shape[1:]).argmax(2)
    found: list[float] = (guesses == data.held_out_labels[:, None]).float().mean(0).tolist()
    return found


def accuracies(data: list[Scored], settings: Iterable[Setting], epsilon: float, contributors: int) -> dict[Setting, float]:
    """The mean accuracy of each setting over several fifths; `contributors` clients add the noise of the guarantee each."""
    found: dict[Setting, float] = defaultdict(float)
    by_rounds = itertools.groupby(sorted(settings), key=lambda setting: setting[0])
    for rounds, some in ((rounds, list(some)) for rounds, some in by_rounds):
        noise = multiplier(epsilon, rounds, 1) * math.sqrt(contributors)
        for part in (some[start : start + AT_ONCE] for start in range(0, len(some), AT_ONCE)):
            for seed, each in enumerate(data):
                for setting, score in zip(part, train(each, part, noise, seed), strict=True):
                    found[setting] += score / len(data)
    return dict(found)


def contributors(dataset: str, trust: str) -> int:
    """How many clients add all the noise of the guarantee: all of a round, or as many as one under a secure sum."""
    return FEDERATIONS[dataset].clients * 4 // 5 if trust == "each" else 1


def search_settings(datasets: list[str], device: str, stored: dict[str, object], store: Callable[[], None]) -> None:
    """Try every setting of the grids."""
    for (dataset, network), grids in GRIDS.items():
        if dataset not in datasets:
            continue
        started = time.perf_counter()
        splits, _ = featured(dataset, 0, network, device)
        data = [Scored.of(splits, seed, device) for seed in range(FIFTHS.get(dataset, 1))]
        for (trust, epsilon), grid in grids.items():
            scores = accuracies(data, grid.settings(), epsilon, contributors(dataset, trust))
            stored[f"{dataset} {network} {trust} {epsilon}"] = {
                f"rounds={rounds} clip={clip:g} learning_rate={step / clip:g}": round(score, 5)
                for (rounds, clip, step), score in scores.items()
            }
            store()
        print(f"{dataset} {network}: {time.perf_counter() - started:.0f} s", flush=True)


VARIANTS = {
    "as packaged": {},
    "without the mirror image": {"mirrored": False},
    "standardised, not whitened": {"rotated": False},
    "last stage alone": {"stages": STAGES[1:]},
}
KINDS = ("oriented-gradients", "mirrored-gradients", "scattering", "scattering+random-process")


def search_features(device: str, stored: dict[str, object], store: Callable[[], None]) -> None:
    """The best accuracy of several fixed features for CIFAR-10 over one grid for each ε and trust model."""
    splits = splits_of("cifar10", 0)
    variants = {f"random-process, {name}": _variant(splits, device, **chosen) for name, chosen in VARIANTS.items()}
    kinds = {name: featured("cifar10", 0, name, device)[0] for name in KINDS}
    for name, seen in (variants | kinds).items():
        data = [Scored.of(seen, 0, device)]
        for (trust, epsilon), grid in CIFAR10.items():
            if epsilon == 2:
                continue
            scores = accuracies(data, grid.settings(), epsilon, contributors("cifar10", trust))
            best = max(scores, key=lambda setting: scores[setting])
            stored[f"{name} {trust} {epsilon}"] = {"accuracy": round(scores[best], 5), "size": data[0].features.shape[1]}
        store()
        print(name, [stored[f"{name} {trust} {epsilon}"] for trust, epsilon in CIFAR10 if epsilon != 2], flush=True)


@torch.no_grad()
def _variant(
    splits: Splits, device: str, *, mirrored: bool = True, rotated: bool = True, stages: tuple[int, ...] = STAGES
) -> Splits:
    """The splits as a changed encoder sees them."""
    encoder = RandomProcess().to(device)

    def seen(images: Tensor) -> Tensor:
        means = encoder.means(images)
        if mirrored:
            means = [(one + other) / 2 for one, other in zip(means, encoder.means(images.flip(3)), strict=True)]
        rows = []
        for stage, values in zip(STAGES, means, strict=True):
            if stage not in stages:
                continue
            rows.append(encoder.whitened(stage, values) if rotated else encoder.standardised(stage, values).flatten(1))
        features = torch.cat(rows, 1)
        return features / features.norm(dim=1, keepdim=True)

    def through(images: Tensor) -> Tensor:
        return torch.cat([seen(images[start : start + 1000].to(device)) for start in range(0, len(images), 1000)])

    assert isinstance(splits.train.inputs, Tensor)
    assert isinstance(splits.validation.inputs, Tensor)
    return replace(splits, train=replace(splits.train, inputs=through(splits.train.inputs)),
                   validation=replace(splits.validation, inputs=through(splits.validation.inputs)), test=None)  # fmt: skip


def show_best(stored: dict[str, dict[str, float]]) -> None:
    """The three best settings of each preset as lines for config/presets.py."""
    for key, tried in stored.items():
        epsilon = float(key.rpartition(" ")[2])
        records = FEDERATIONS[key.partition(" ")[0]].records if " each " in key else 1
        for words in sorted(tried, key=lambda each: -tried[each])[:3]:
            rounds, clip, rate = (float(word.partition("=")[2]) for word in words.split())
            sigma = math.ceil(multiplier(epsilon, int(rounds), records) * 1e4) / 1e4
            print(f"{key}: {tried[words]:.4f} Found({epsilon:g}, {rounds:g}, {clip:g}, {sigma:.4f}, {rate:g})")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("settings", "features", "best"))
    parser.add_argument("--datasets", nargs="+", default=["mnist", "cifar10", "lfw"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    known = json.loads(given.out.read_text()) if given.out.exists() else {}
    part = known.setdefault("settings" if given.what == "best" else given.what, {})

    def store() -> None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(known, indent=1) + "\n")

    if given.what == "settings":
        search_settings(given.datasets, given.device, part, store)
    elif given.what == "features":
        search_features(given.device, part, store)
    else:
        show_best(part)


if __name__ == "__main__":
    main()
