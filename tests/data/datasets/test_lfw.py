from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcdp.data import load
from fedcdp.data.datasets import lfw
from fedcdp.errors import DataError


def draw(folder: Path, person: str, count: int, colour: tuple[int, int, int]) -> None:
    """`count` pictures of `person`: `colour` within the crop, white around it."""
    (folder / person).mkdir(parents=True)
    picture = Image.new("RGB", (250, 250), "white")
    picture.paste(colour, (61, 61, 189, 189))
    for number in range(1, count + 1):
        picture.save(folder / person / f"{person}_{number:04d}.jpg", quality=95)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "lfw_funneled"
    draw(folder, "Zoe_Last", 20, (10, 20, 200))
    draw(folder, "Ann_First", 21, (200, 20, 10))
    draw(folder, "Too_Few", 19, (0, 0, 0))
    (folder / "pairs.txt").write_text("not a person")
    return folder


def save(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, images=images, labels=labels)


def test_people_with_20_pictures_are_packed_by_name_then_number(pictures: Path, tmp_path: Path) -> None:
    lfw.pack_pictures(pictures, tmp_path / "new" / "packed.npz")
    with np.load(tmp_path / "new" / "packed.npz", allow_pickle=False) as packed:
        assert packed["names"].tolist() == ["Ann First", "Zoe Last"]
        assert packed["labels"].tolist() == [0] * 21 + [1] * 20
        assert packed["files"][20] == "Ann_First/Ann_First_0021.jpg"
        assert packed["images"].shape == (41, 32, 32, 3)
        assert packed["images"].dtype == np.uint8
        # The crop is the coloured square and none of its white frame.
        inner = packed["images"][:, 2:-2, 2:-2].astype(int)
        assert np.abs(inner[0] - [200, 20, 10]).max() <= 8
        assert np.abs(inner[40] - [10, 20, 200]).max() <= 8


def test_a_damaged_picture_is_named_and_nothing_is_written(pictures: Path, tmp_path: Path) -> None:
    damaged = pictures / "Ann_First" / "Ann_First_0003.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    with pytest.raises(DataError, match=r"Ann_First_0003\.jpg cannot be read"):
        lfw.pack_pictures(pictures, tmp_path / "packed.npz")
    assert not (tmp_path / "packed.npz").exists()


def test_a_picture_of_another_size_is_refused(pictures: Path, tmp_path: Path) -> None:
    Image.new("RGB", (150, 150)).save(pictures / "Zoe_Last" / "Zoe_Last_0001.jpg")
    with pytest.raises(DataError, match=r"Zoe_Last_0001\.jpg is 150×150 pixels"):
        lfw.pack_pictures(pictures, tmp_path / "packed.npz")


def test_scikit_learns_download_is_packed_once_into_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(*, data_home: Path, **_: object) -> None:
        calls.append(data_home)
        folder = data_home / "lfw_home" / "lfw_funneled"
        draw(folder, "Ann_First", 21, (200, 20, 10))
        draw(folder, "Zoe_Last", 20, (10, 20, 200))

    monkeypatch.setattr("sklearn.datasets.fetch_lfw_people", fetch)
    monkeypatch.setattr(lfw, "PICTURES", 41)
    monkeypatch.setattr(lfw, "PEOPLE", 2)
    monkeypatch.setattr(lfw, "VALIDATION_PICTURES", 10)
    for _ in range(2):
        splits = load("lfw")
        assert splits.train.inputs.shape == (31, 3, 32, 32)
        assert torch.bincount(splits.validation.targets).tolist() == [5, 5]
        red, blue = splits.train.inputs[:, 0].mean(dim=(1, 2)), splits.train.inputs[:, 2].mean(dim=(1, 2))
        assert torch.equal(blue > red, splits.train.targets == 1)
    assert calls == [cache / "lfw"]


def test_an_incomplete_download_is_not_kept_as_lfw(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*, data_home: Path, **_: object) -> None:
        draw(data_home / "lfw_home" / "lfw_funneled", "Ann_First", 21, (200, 20, 10))

    monkeypatch.setattr("sklearn.datasets.fetch_lfw_people", fetch)
    with pytest.raises(DataError, match="does not hold all of LFW: delete"):
        load("lfw")
    assert not (cache / "lfw" / lfw.PACKED).exists()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((5, 32, 32, 3), np.uint8), np.zeros(5, np.uint8), "images of shape"),
        (np.zeros((3023, 32, 32, 3), np.float32), np.zeros(3023, np.uint8), "float32 images"),
        (np.zeros((3023, 32, 32, 3), np.uint8), np.zeros(3023, np.uint8), "3023 labels of 62 people"),
    ],
)
def test_a_packed_file_of_another_structure_is_refused_by_name(
    tmp_path: Path, images: np.ndarray, labels: np.ndarray, message: str
) -> None:
    save(tmp_path / lfw.PACKED, images, labels)
    with pytest.raises(DataError, match=f"{lfw.PACKED} .*{message}"):
        load("lfw", tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"no archive at all"])
def test_a_damaged_packed_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / lfw.PACKED).write_bytes(content)
    with pytest.raises(DataError, match=f"{lfw.PACKED} cannot be read"):
        load("lfw", tmp_path)


@pytest.mark.full
def test_full_lfw_has_all_62_people_in_both_splits(full_data: Path) -> None:
    splits = load("lfw", full_data, download=False)
    assert splits.train.inputs.shape == (2267, 3, 32, 32)
    assert splits.validation.inputs.shape == (756, 3, 32, 32)
    counts = torch.bincount(splits.train.targets) + torch.bincount(splits.validation.targets)
    assert len(counts) == 62
    assert sorted(counts.tolist())[:1] + sorted(counts.tolist())[-3:] == [20, 144, 236, 530]
    assert torch.bincount(splits.train.targets, minlength=62).min() > 0
    assert torch.bincount(splits.validation.targets, minlength=62).min() > 0
