"""MNIST: 28×28 grey digits (LeCun, Cortes, Burges), from the original IDX files.

`mnist5k` is a subset of 5,000 digits that ships with the package, so no other file or network access is needed: the first
500 of each class of the training set, ordered by class (`tools/pack_digits.py`).
"""

from __future__ import annotations

import hashlib
import io
import math
from importlib import resources

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.fetch import Remote, Storage, read_unpacked
from fedcdp.data.formats import parse_idx
from fedcdp.data.prepare import PIXELS_TO_UNIT, Indices, random_split, stratified_split, unit_pixels
from fedcdp.errors import DataError

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
TRAINING_IMAGES = 60_000
TEST_IMAGES = 10_000
VALIDATION_IMAGES = 10_000
CLASSES = 10


def load_mnist(storage: Storage, split_seed: int) -> Splits:
    """50,000 training and 10,000 validation images from the official training set; the official test set as test."""
    images, labels = _read_pair(storage, "train", TRAINING_IMAGES)
    train, validation = random_split(len(labels), VALIDATION_IMAGES, split_seed)
    test_images, test_labels = _read_pair(storage, "t10k", TEST_IMAGES)
    return Splits(
        name="mnist",
        train=_dataset(images[train], labels[train]),
        validation=_dataset(images[validation], labels[validation]),
        test=_dataset(test_images, test_labels),
        normalisation=PIXELS_TO_UNIT,
    )


def _read_pair(storage: Storage, prefix: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    images = _read(storage, f"{prefix}-images-idx3-ubyte", (count, 28, 28))
    labels = _read(storage, f"{prefix}-labels-idx1-ubyte", (count,))
    if labels.max() >= CLASSES:
        raise DataError(f"{prefix}-labels-idx1-ubyte holds the label {labels.max()}: digits run from 0 to 9")
    return images, labels


def _read(storage: Storage, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    packed = f"{name}.gz"
    remote = Remote(packed, tuple(mirror + packed for mirror in MIRRORS), "sha256", SHA256[name])
    path = storage.obtain("mnist", packed, name, remote=remote)
    array = parse_idx(read_unpacked(path, math.prod(shape) + 2**10), len(shape), str(path))
    if array.shape != shape:
        raise DataError(f"{path} holds an array of shape {array.shape}: MNIST has {shape}")
    return array


def _dataset(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Dataset:
    return Dataset(unit_pixels(images[:, None]), torch.from_numpy(labels.astype(np.int64)), CLASSES)


# mnist5k -------------------------------------------------------------------------------------------------------------

SMALL_VALIDATION_IMAGES = 1_000
DIGITS_SHA256 = (
    "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d"  # of the pixels, then the labels, one byte each
)


def load_mnist5k(_storage: Storage, split_seed: int) -> Splits:
    """4,000 training and 1,000 validation images, each class in proportion; no test set."""
    images, labels = _read_digits()
    train, validation = stratified_split(labels, SMALL_VALIDATION_IMAGES, split_seed)

    def part(indices: Indices) -> Dataset:
        return Dataset(unit_pixels(images[indices]), torch.from_numpy(labels[indices]), CLASSES)

    return Splits("mnist5k", part(train), part(validation), None, PIXELS_TO_UNIT)


def _read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images [5000, 1, 28, 28] and labels [5000] of the packed file; any other content raises `DataError`."""
    packed = resources.files("fedcdp.data") / "digits.npz"
    try:
        with np.load(io.BytesIO(packed.read_bytes()), allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
        if hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() != DIGITS_SHA256:
            raise ValueError("its digits differ from those that were packed")
        return images.reshape(-1, 1, 28, 28), labels.astype(np.int64)
    except Exception as error:  # np.load passes on all errors of zipfile, zlib and its own header parser
        reason = " ".join(str(error).split())
        raise DataError(f"{packed} is missing or damaged ({reason}): reinstall fedcdp") from error
