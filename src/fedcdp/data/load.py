"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from fedcdp.config.experiment import Scaling
from fedcdp.data.dataset import Splits
from fedcdp.data.datasets.adult import load_adult
from fedcdp.data.datasets.cancer import load_cancer
from fedcdp.data.datasets.cifar10 import load_cifar10
from fedcdp.data.datasets.lfw import load_lfw
from fedcdp.data.datasets.mnist import load_mnist, load_mnist5k
from fedcdp.data.fetch import Storage
from fedcdp.errors import DataError

Loader = Callable[[Storage, int], Splits]

_TABLES = {"adult": load_adult, "cancer": load_cancer}  # `scaling` applies to these only; images use no statistics

DATASETS: Mapping[str, Loader] = MappingProxyType(
    {
        "mnist": load_mnist,
        "cifar10": load_cifar10,
        "lfw": load_lfw,
        "adult": load_adult,
        "cancer": load_cancer,
        "mnist5k": load_mnist5k,
    }
)


def load(
    name: str,
    data_dir: Path | str | None = None,
    *,
    split_seed: int = 0,
    scaling: Scaling = "training",
    download: bool = True,
    quiet: bool = False,
) -> Splits:
    """The benchmark `name`, cut into splits that depend on `split_seed` alone.

    Files are looked for in `data_dir` (else in the directory that FEDCDP_DATA names), then in the cache; what is
    missing is downloaded there, checked against its published checksum, unless `download` is false. `quiet` hides the
    progress bar. With `scaling="public"` tables are scaled by fixed constants and not by statistics of the training split.
    Raises `DataError` when the dataset cannot be had or is not what its format promises.
    """
    if name not in DATASETS:
        raise DataError(f"dataset {name!r} is unknown: choose one of {', '.join(DATASETS)}")
    if scaling not in get_args(Scaling):
        raise DataError(f"scaling is {scaling!r}: choose one of {', '.join(get_args(Scaling))}")
    storage = Storage.choose(data_dir, download=download, quiet=quiet)
    if name in _TABLES:
        return _TABLES[name](storage, split_seed, scaling)
    return DATASETS[name](storage, split_seed)
