from __future__ import annotations

from pathlib import Path

import pytest

from fedcdp.data import DATASETS, load
from fedcdp.errors import DataError


def test_the_benchmarks_are_these_six() -> None:
    assert list(DATASETS) == ["mnist", "cifar10", "lfw", "adult", "cancer", "mnist5k"]


def test_an_unknown_name_is_refused_with_those_allowed() -> None:
    with pytest.raises(DataError, match="'imagenet' is unknown: choose one of mnist, cifar10, lfw, adult, cancer, "):
        load("imagenet")


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "train-images-idx3-ubyte.gz or train-images-idx3-ubyte"),
        ("cifar10", "cifar-10-batches-py or cifar-10-python.tar.gz"),
        ("lfw", "lfw62_funneled_square_32.npz"),
        ("adult", "adult.data or adult.data.gz"),
    ],
)
def test_offline_without_files_the_error_is_one_line_with_names_and_places(
    name: str, file: str, download: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(**_: object) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr("sklearn.datasets.fetch_lfw_people", offline)
    with pytest.raises(DataError) as caught:
        load(name, tmp_path, download=download, quiet=True)
    message = str(caught.value)
    assert message.startswith(f"{name} needs {file} in one of {tmp_path / name}, {tmp_path}, {cache / name}: not found")
    assert ("the network is down" if download else "downloading is switched off") in message
    assert "\n" not in message
