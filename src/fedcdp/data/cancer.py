"""Breast Cancer Wisconsin (diagnostic): 569 records of 30 features, which come with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.scaling import standardise
from fedcdp.data.splitting import stratified_split
from fedcdp.data.storage import Storage

VALIDATION_RECORDS = 143
CLASSES = 2


def load_cancer(_storage: Storage, split_seed: int) -> Splits:
    """426 training and 143 validation records, each class in proportion; 0 is malignant, 1 benign; no test set."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    labels = labels.astype(np.int64)
    train, validation = stratified_split(labels, VALIDATION_RECORDS, split_seed)
    train_inputs, validation_inputs = standardise(features[train], features[validation])
    return Splits(
        name="cancer",
        train=Dataset(torch.from_numpy(train_inputs), torch.from_numpy(labels[train]), CLASSES),
        validation=Dataset(torch.from_numpy(validation_inputs), torch.from_numpy(labels[validation]), CLASSES),
        test=None,
        normalisation="all 30 features standardised by the mean and deviation of the pooled training split, "
        "statistics that are not covered by any ε",
    )
