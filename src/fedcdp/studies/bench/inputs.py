"""What is trained on: a benchmark where its files are at hand, else random inputs of its size and shape.

Speed does not depend on the values, so that either will do; every result says which it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fedcdp.config.presets import BENCHMARKS
from fedcdp.data import load
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.errors import DataError

DataKind = Literal["real", "synthetic"]

# Input shape and classes of the paper's benchmarks (Table "Benchmark datasets and parameters").
_SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "lfw": ((3, 32, 32), 62),
    "adult": ((105,), 2),
    "cancer": ((30,), 2),
}


@dataclass(frozen=True)
class BenchData:
    """A dataset to train on, and whether it is the real one."""

    name: str
    splits: Splits
    data: DataKind


def subject(name: str, data_dir: Path | str | None = None) -> BenchData:
    """The benchmark `name` where its files are at hand (nothing is downloaded), else a synthetic one of its shape."""
    try:
        return BenchData(name, load(name, data_dir, download=False, quiet=True), "real")
    except (DataError, ImportError):
        return synthetic(name)


def synthetic(name: str) -> BenchData:
    """As many random inputs as the benchmark `name` has, of its shape and with its number of classes."""
    shape, classes = _SHAPES[name]
    examples = BENCHMARKS[name].train
    inputs = torch.rand(examples, *shape, generator=torch.Generator().manual_seed(0))
    train = Dataset(inputs, torch.arange(examples) % classes, classes)
    validation = train.take(torch.arange(classes))
    return BenchData(name, Splits(name, train, validation, None, "random values from 0 to 1"), "synthetic")


def shape_of(name: str) -> tuple[tuple[int, ...], int]:
    """The shape of an input and the number of classes of a benchmark."""
    return _SHAPES[name]
