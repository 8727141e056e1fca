"""What is tried for the peers in `useful_peers`: networks of their own, grids of settings, and the noise for each ε."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from benchmarks.private_clients import LocalTraining
from benchmarks.recommended import DELTA, multiplier
from fedcdp.models.networks import build

EPSILONS = (1, 2, 8)
QUICK = "mnist5k"

# (batches per round, rounds): σ for ε = 1, 2 and 8 at δ = 1e-5 (`useful_peers noise`). One batch per round needs no table.
NOISE = {
    (8, 20): {1: 6.0538, 2: 3.3371, 8: 1.2183},
    (8, 40): {1: 8.4524, 2: 4.5908, 8: 1.5529},
    (8, 60): {1: 10.3072, 2: 5.5691, 8: 1.8227},
    (8, 80): {1: 11.8758, 2: 6.3995, 8: 2.0563},
    (8, 160): {1: 16.7397, 2: 8.9838, 8: 2.8},
}


def opacus_mnist_network(seed: int) -> nn.Module:
    """The network of Opacus' MNIST example: 26,010 weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip


def tanh_cnn(seed: int) -> nn.Module:
    """A small CNN for CIFAR-10 with tanh (Papernot et al., 2021, advise it under DP-SGD): 42,336 weights.

    In trials the larger network of Opacus' CIFAR-10 example, with ReLU, learned more slowly.
    """
    return build("cnn", (3, 32, 32), 10, "tanh", seed)


@dataclass(frozen=True)
class Network:
    """A peer's own network, behind a fixed scaling of the pixels, (x − centre) / width."""

    name: str
    build: Callable[[int], nn.Module]
    centre: float = 0.0
    width: float = 1.0


NETWORKS = {
    "mnist": Network("opacus-mnist", opacus_mnist_network),
    "cifar10": Network("tanh-cnn", tanh_cnn, centre=0.5, width=0.25),
    QUICK: Network("opacus-mnist", opacus_mnist_network),
}


@dataclass(frozen=True)
class Grid:
    """Settings to try: every number of rounds with every learning rate."""

    rounds: tuple[int, ...]
    rates: dict[int, tuple[float, ...]]
    """By the number of batches per round."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for rounds, (batches, rates) in product(self.rounds, self.rates.items()):
            for rate in rates:
                yield {"rounds": rounds, "batches": batches, "clip": 1.0, "learning_rate": rate}


PERSONAL_SHARE, PERSONAL_SHARES = 0.01, (1.0, 0.1, 0.001)
"""PrivateFL: the learning rate of the transformation over the network's, in the grid, and then for the best of the grid."""


GRIDS = {
    ("mnist", "own network", 1): Grid((40, 80), {1: (1.0, 2.0, 4.0), 8: (0.25, 0.5, 1.0)}),
    ("mnist", "own network", 2): Grid((40, 80), {1: (1.0, 2.0, 4.0), 8: (0.25, 0.5, 1.0)}),
    ("mnist", "own network", 8): Grid((80, 160), {1: (2.0, 4.0, 8.0), 8: (0.5, 1.0, 2.0)}),
    ("cifar10", "own network", 1): Grid((20, 40), {1: (2.0, 4.0), 8: (0.25, 0.5)}),
    ("cifar10", "own network", 2): Grid((20, 40), {1: (2.0, 4.0), 8: (0.5, 1.0)}),
    ("cifar10", "own network", 8): Grid((60,), {1: (2.0, 4.0), 8: (0.5, 1.0)}),
    ("mnist", "features", 1): Grid((20, 40), {1: (4.0, 8.0, 16.0), 8: (0.25, 0.5, 1.0)}),
    ("mnist", "features", 2): Grid((20, 40), {1: (4.0, 8.0, 16.0), 8: (0.5, 1.0, 2.0)}),
    ("mnist", "features", 8): Grid((40, 80), {1: (4.0, 8.0, 16.0), 8: (0.5, 1.0, 2.0)}),
    ("cifar10", "features", 1): Grid((20, 40), {1: (1.0, 2.0, 4.0), 8: (0.125, 0.25, 0.5)}),
    ("cifar10", "features", 2): Grid((20, 40), {1: (1.0, 2.0, 4.0), 8: (0.125, 0.25, 0.5)}),
    ("cifar10", "features", 8): Grid((40, 80), {1: (4.0, 8.0, 16.0), 8: (0.5, 1.0, 2.0)}),
    (QUICK, "features", 8): Grid((20,), {1: (4.0,)}),
}


def sigma(epsilon: int, batches: int, rounds: int) -> float:
    """σ for which `rounds` of `batches` Poisson batches each give ε; with one batch, all records are in every step."""
    if batches == 1:
        return math.ceil(multiplier(epsilon, rounds, 1) * 1e4) / 1e4
    return NOISE[batches, rounds][epsilon]


def epsilon_of(setting: LocalTraining) -> float:
    """ε of a client's whole training: composed Poisson-subsampled Gaussian releases."""
    from fedcdp.accounting import pld
    from fedcdp.accounting.mechanisms import Gaussian, PoissonGaussian, repeated

    z = setting.noise_multiplier
    step = Gaussian(z) if setting.batches == 1 else PoissonGaussian(1 / setting.batches, z)
    return pld.epsilon(repeated(step, setting.rounds * setting.batches), DELTA)


def print_noise() -> None:
    """The table `NOISE` for the settings of all grids: σ is rounded up, so ε is at most what it is named after."""
    used = sorted({(each["batches"], each["rounds"]) for grid in GRIDS.values() for each in grid if each["batches"] > 1})
    for batches, rounds in used:
        found = {}
        for epsilon in EPSILONS:
            low, high = 0.1, 1_000.0
            while high - low > 5e-5:
                middle = (low + high) / 2
                within = epsilon_of(LocalTraining(rounds, batches, 1.0, 1.0, middle)) <= epsilon
                low, high = (low, middle) if within else (middle, high)
            found[epsilon] = math.ceil(high * 1e4) / 1e4
        print(f"    ({batches}, {rounds}): {found},")
