"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from fedcdp.config.arguments import checked
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


@checked
def load(
    name: str,
    data_dir: Path | str | None = None,
    *,
    split_seed: int = 0,
    scaling: Scaling = "training",
    download: bool = True,
    quiet: bool = False,
) -> Splits:
    """Load a benchmark dataset by name.

    Files are looked for in `data_dir`, then in the cache. Missing files are downloaded into the cache and checked against
    their published checksums. `cancer` and `mnist5k` need no download.

    Args:
        name: `mnist`, `cifar10`, `lfw`, `adult`, `cancer`, or `mnist5k`, which comes with the package.
        data_dir: The directory with the dataset's files. Default: the directory that `FEDCDP_DATA` names.
        split_seed: Fixes which examples go into which split. The splits depend on nothing else.
        scaling: How the tables `adult` and `cancer` are scaled: by statistics of the training split (`training`), which no ε
            covers, or by fixed constants (`public`). Images are not scaled by statistics.
        download: Whether missing files may be downloaded.
        quiet: Hide the progress bar.

    Returns:
        The training, validation and, where the benchmark has one, test split.

    Raises:
        DataError: The dataset is unknown, cannot be obtained, or is not what its format promises.

    Examples:
        >>> import fedcdp
        >>> splits = fedcdp.load("cancer", scaling="public")
        >>> splits.train.shape, splits.train.classes
        ((30,), 2)
        >>> splits.normalisation
        "all 30 features on a logarithmic scale by the ranges in the dataset's published description"
    """
    if name not in DATASETS:
        raise DataError(f"dataset {name!r} is unknown: choose one of {', '.join(DATASETS)}")
    if scaling not in get_args(Scaling):
        raise DataError(f"scaling is {scaling!r}: choose one of {', '.join(get_args(Scaling))}")
    if scaling == "private":
        raise DataError(
            "scaling: private happens in training; load with scaling='public', and pass scale_inputs=True to simulate"
        )
    storage = Storage.choose(data_dir, download=download, quiet=quiet)
    if name in _TABLES:
        return _TABLES[name](storage, split_seed, scaling)
    return DATASETS[name](storage, split_seed).of_benchmark()
