"""The two datasets that need no file of their own: cancer (from scikit-learn) and mnist5k (packed with fedcdp)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import torch
from numpy.typing import NDArray

from fedcdp.data import load
from fedcdp.data.datasets import cancer
from fedcdp.data.prepare import stratified_split
from fedcdp.errors import DataError

PACKED = Path(str(files("fedcdp.data"))) / "digits.npz"
PACKER = Path(__file__).parents[3] / "tools" / "pack_digits.py"


def packed_digits(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The images and labels of a packed file."""
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"]


def test_cancer_is_split_426_to_143_with_each_class_in_proportion() -> None:
    splits = load("cancer")
    assert splits.train.inputs.shape == (426, 30)
    assert splits.validation.inputs.shape == (143, 30)
    assert splits.test is None
    counts = torch.bincount(splits.train.targets) + torch.bincount(splits.validation.targets)
    assert counts.tolist() == [212, 357]
    assert torch.bincount(splits.validation.targets).tolist() == [53, 90]
    torch.testing.assert_close(splits.train.inputs.mean(dim=0), torch.zeros(30), atol=1e-5, rtol=0)
    assert "training split" in splits.normalisation
    assert "not covered by any ε" in splits.normalisation


def test_cancer_is_the_dataset_of_scikit_learn() -> None:
    features, labels = sklearn.datasets.load_breast_cancer(return_X_y=True)
    assert np.array_equal(cancer.read_table(), np.column_stack([features, labels]))


def test_cancer_training_inputs_do_not_depend_on_validation_records(monkeypatch: pytest.MonkeyPatch) -> None:
    table = cancer.read_table()
    _, validation = stratified_split(table[:, -1].astype(np.int64), 143, seed=3)
    before = load("cancer", split_seed=3)
    table[validation, :-1] = 1e6
    monkeypatch.setattr(cancer, "read_table", lambda: table)
    after = load("cancer", split_seed=3)
    assert torch.equal(before.train.inputs, after.train.inputs)
    assert not torch.equal(before.validation.inputs, after.validation.inputs)


def test_the_split_depends_on_the_seed_alone() -> None:
    first, again, other = load("cancer", split_seed=1), load("cancer", split_seed=1), load("cancer", split_seed=2)
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.targets, other.train.targets)


def test_mnist5k_is_split_4000_to_1000_with_400_and_100_of_each_digit() -> None:
    splits = load("mnist5k")
    assert splits.train.inputs.shape == (4000, 1, 28, 28)
    assert splits.validation.inputs.shape == (1000, 1, 28, 28)
    assert torch.bincount(splits.train.targets).tolist() == [400] * 10
    assert torch.bincount(splits.validation.targets).tolist() == [100] * 10
    assert (splits.train.inputs.min(), splits.train.inputs.max()) == (0, 1)
    assert np.isin((splits.train.inputs * 255).round(), np.arange(256)).all()


def test_the_packed_digits_are_those_of_mnist() -> None:
    images, labels = packed_digits(PACKED)
    assert (images.dtype, images.shape) == (np.uint8, (5000, 28, 28))
    assert labels.tolist() == sorted([*range(10)] * 500)
    digest = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    assert digest == "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d"


def test_mnist5k_holds_every_packed_digit_once() -> None:
    images, labels = packed_digits(PACKED)
    splits = load("mnist5k", split_seed=5)
    train, validation = stratified_split(labels.astype(np.int64), 1000, seed=5)
    assert sorted([*train, *validation]) == list(range(5000))
    for part, indices in ((splits.train, train), (splits.validation, validation)):
        assert torch.equal(part.inputs, torch.from_numpy(images[indices, None]).float() / 255)
        assert part.targets.tolist() == labels[indices].tolist()


@pytest.mark.full
def test_the_packed_digits_come_from_the_original_files(full_data: Path, tmp_path: Path) -> None:
    target = tmp_path / "again.npz"
    subprocess.run([sys.executable, str(PACKER), str(full_data / "mnist"), str(target)], check=True)
    for packed, again in zip(packed_digits(PACKED), packed_digits(target), strict=True):
        assert packed.dtype == again.dtype
        assert np.array_equal(packed, again)


def _cut_short(path: Path) -> None:
    path.write_bytes(PACKED.read_bytes()[:5000])


def _with_a_changed_byte(path: Path) -> None:
    content = bytearray(PACKED.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _with_another_pixel(path: Path) -> None:
    images, labels = packed_digits(PACKED)
    images[17, 3, 4] ^= 1
    np.savez_compressed(path, images=images, labels=labels)


def _without_labels(path: Path) -> None:
    np.savez_compressed(path, images=packed_digits(PACKED)[0])


def _pickled(path: Path) -> None:
    np.savez_compressed(path, images=np.array([None]), labels=np.array([None]))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (None, "No such file"),
        (_cut_short, "not a zip file"),
        (_with_a_changed_byte, ""),
        (_with_another_pixel, "its digits differ from those that were packed"),
        (_without_labels, "labels"),
        (_pickled, "allow_pickle=False"),
    ],
)
def test_packed_digits_that_are_missing_or_damaged_are_one_line(
    damage: Callable[[Path], None] | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    if damage:
        damage(tmp_path / "digits.npz")
    with pytest.raises(DataError) as caught:
        load("mnist5k")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'digits.npz'} is missing or damaged (")
    assert message.endswith("): reinstall fedcdp")
    assert reason in message
    assert "\n" not in message
