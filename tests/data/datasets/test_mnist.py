from __future__ import annotations

import gzip
import hashlib
import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcdp.data import fetch, load
from fedcdp.data.datasets import mnist
from fedcdp.errors import DataError

TRAIN_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
TEST_COUNTS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up MNIST of 30 training and 10 test images, as tmp_path/mnist; record i's pixels are all i."""
    monkeypatch.setattr(mnist, "TRAINING_IMAGES", 30)
    monkeypatch.setattr(mnist, "TEST_IMAGES", 10)
    monkeypatch.setattr(mnist, "VALIDATION_IMAGES", 5)
    folder = tmp_path / "mnist"
    folder.mkdir()
    for prefix, count in (("train", 30), ("t10k", 10)):
        pixels = np.repeat(np.arange(count, dtype=np.uint8), 784).tobytes()
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels)
        labels = bytes(index % 10 for index in range(count))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)
    return folder


def test_training_images_are_split_and_keep_their_labels(small: Path) -> None:
    splits = load("mnist", small.parent)
    assert splits.train.inputs.shape == (25, 1, 28, 28)
    assert splits.validation.inputs.shape == (5, 1, 28, 28)
    assert splits.test is not None
    assert splits.test.targets.tolist() == list(range(10))
    inputs = torch.cat([splits.train.inputs, splits.validation.inputs])
    records = (inputs[:, 0, 0, 0] * 255).round().long()
    assert sorted(records.tolist()) == list(range(30))
    assert torch.equal(records % 10, torch.cat([splits.train.targets, splits.validation.targets]))


def test_gzip_files_and_files_directly_in_the_data_directory_serve_as_well(small: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in small.iterdir():
        (flat / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert torch.equal(load("mnist", flat).train.inputs, load("mnist", small.parent).train.inputs)


def test_a_missing_file_is_downloaded_once_into_the_cache(small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    originals = {f"{path.name}.gz": gzip.compress(path.read_bytes()) for path in small.iterdir()}
    for name, content in originals.items():
        monkeypatch.setitem(mnist.SHA256, name.removesuffix(".gz"), hashlib.sha256(content).hexdigest())
    opened = []

    def serve(url: str) -> io.BytesIO:
        opened.append(url)
        return io.BytesIO(originals[url.rpartition("/")[2]])

    monkeypatch.setattr(fetch, "open_https", serve)
    expected = load("mnist", small.parent).train.inputs
    for _ in range(2):
        assert torch.equal(load("mnist", quiet=True).train.inputs, expected)
    assert len(opened) == 4
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(originals)


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_file_is_refused_by_name(small: Path, keep: int) -> None:
    path = small / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load("mnist", small.parent)


def test_an_idx_file_of_another_size_is_refused(small: Path) -> None:
    (small / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 2) + b"\1\2")
    with pytest.raises(DataError, match=r"shape \(2,\): MNIST has \(30,\)"):
        load("mnist", small.parent)


def test_a_label_beyond_9_is_refused(small: Path) -> None:
    (small / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 10) + bytes(range(1, 11)))
    with pytest.raises(DataError, match="holds the label 10"):
        load("mnist", small.parent)


@pytest.mark.full
def test_full_mnist_has_the_published_label_counts(full_data: Path) -> None:
    splits = load("mnist", full_data, download=False)
    assert splits.train.inputs.shape == (50_000, 1, 28, 28)
    assert splits.validation.inputs.shape == (10_000, 1, 28, 28)
    assert splits.test is not None
    counts = torch.bincount(splits.train.targets) + torch.bincount(splits.validation.targets)
    assert counts.tolist() == TRAIN_COUNTS
    assert torch.bincount(splits.test.targets).tolist() == TEST_COUNTS
    assert (splits.train.inputs.min(), splits.train.inputs.max()) == (0, 1)
