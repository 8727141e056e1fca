"""MNIST in small: 5,000 digits that come with the package, 500 of each class, no other file or network needed.

They are the first 500 of each class of MNIST's training set, ordered by class (`tools/pack_digits.py`).
"""

from __future__ import annotations

import hashlib
import io
from importlib import resources

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.scaling import PIXELS_TO_UNIT, unit_pixels
from fedcdp.data.splitting import Indices, stratified_split
from fedcdp.data.storage import Storage
from fedcdp.errors import DataError

VALIDATION_IMAGES = 1_000
CLASSES = 10
DIGITS_SHA256 = (
    "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d"  # of the pixels, then the labels, one byte each
)


def load_mnist5k(_storage: Storage, split_seed: int) -> Splits:
    """4,000 training and 1,000 validation images, each class in proportion; no test set."""
    images, labels = _read_digits()
    train, validation = stratified_split(labels, VALIDATION_IMAGES, split_seed)

    def part(indices: Indices) -> Dataset:
        return Dataset(unit_pixels(images[indices]), torch.from_numpy(labels[indices]), CLASSES)

    return Splits("mnist5k", part(train), part(validation), None, PIXELS_TO_UNIT)


def _read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images [5000, 1, 28, 28] and labels [5000] of the packed file; `DataError` if they are any others."""
    packed = resources.files("fedcdp.data") / "digits.npz"
    try:
        with np.load(io.BytesIO(packed.read_bytes()), allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
        if hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() != DIGITS_SHA256:
            raise ValueError("other digits than those that were packed")
        return images.reshape(-1, 1, 28, 28), labels.astype(np.int64)
    except Exception as error:  # np.load passes on whatever zipfile, zlib and its own header parser raise
        reason = " ".join(str(error).split())
        raise DataError(f"{packed} is missing or damaged ({reason}): install fedcdp again") from error
