"""Breast Cancer Wisconsin (diagnostic): 569 records of 30 features, which come with scikit-learn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.config.experiment import Scaling
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.fetch import Storage
from fedcdp.data.input_columns import named_columns
from fedcdp.data.prepare import logarithmic, standardise, stratified_split

VALIDATION_RECORDS = 143
CLASSES = 2

# The smallest and largest values from the dataset's own description: for the mean, its standard error, and the worst.
_PUBLISHED = """
6.981 28.11 9.71 39.28 43.79 188.5 143.5 2501 0.053 0.163 0.019 0.345 0 0.427 0 0.201 0.106 0.304 0.05 0.097
0.112 2.873 0.36 4.885 0.757 21.98 6.802 542.2 0.002 0.031 0.002 0.135 0 0.396 0 0.053 0.008 0.079 0.001 0.03
7.93 36.04 12.02 49.54 50.41 251.2 185.2 4254 0.071 0.223 0.027 1.058 0 1.252 0 0.291 0.156 0.664 0.055 0.208
"""
RANGES: NDArray[np.float64] = np.array(_PUBLISHED.split(), dtype=np.float64).reshape(30, 2)
_MEASURED = (
    *("radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "concave points", "symmetry"),
    "fractal dimension",
)
NAMES = tuple(each.format(name) for each in ("mean {}", "{} error", "worst {}") for name in _MEASURED)


def read_table() -> NDArray[np.float64]:
    """Features and label of each record, from scikit-learn's own file: a node reads it in each round, and importing
    scikit-learn takes longer than the round."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "breast_cancer.csv"
    return np.loadtxt(file, delimiter=",", skiprows=1)


def load_cancer(_storage: Storage, split_seed: int, scaling: Scaling = "training") -> Splits:
    """426 training and 143 validation records, each class in proportion; 0 is malignant, 1 benign; no test set."""
    table = read_table()
    features, labels = table[:, :-1], table[:, -1].astype(np.int64)
    columns = named_columns(NAMES, {})
    train, validation = stratified_split(labels, VALIDATION_RECORDS, split_seed)
    if scaling == "public":
        train_inputs, validation_inputs = (logarithmic(features[part], RANGES) for part in (train, validation))
        normalisation = "all 30 features on a logarithmic scale by the ranges in the dataset's published description"
    else:
        train_inputs, validation_inputs = standardise(features[train], features[validation])
        normalisation = (
            "all 30 features standardised by the mean and deviation of the pooled training split, "
            "statistics that are not covered by any ε"
        )
    return Splits(
        name="cancer",
        train=Dataset(torch.from_numpy(train_inputs), torch.from_numpy(labels[train]), CLASSES, columns=columns),
        validation=Dataset(
            torch.from_numpy(validation_inputs), torch.from_numpy(labels[validation]), CLASSES, columns=columns
        ),
        test=None,
        normalisation=normalisation,
    )
