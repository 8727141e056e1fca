from __future__ import annotations

import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcdp.data import fetch, load
from fedcdp.data.datasets import cifar10
from fedcdp.data.fetch import Remote
from fedcdp.errors import DataError

BATCHES = [*cifar10.TRAINING_BATCHES, cifar10.TEST_BATCH]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up CIFAR-10 of 4 images a batch in the original layout under tmp_path/made-up."""
    monkeypatch.setattr(cifar10, "BATCH_IMAGES", 4)
    monkeypatch.setattr(cifar10, "VALIDATION_IMAGES", 5)
    folder = tmp_path / "made-up" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        data = np.full((4, 3072), 10 * number, dtype=np.uint8)
        data += np.arange(4, dtype=np.uint8)[:, None]
        data[:, 1024:2048] += 100
        batch = {b"data": data, b"labels": [(number + index) % 10 for index in range(4)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=4))
    return folder


def pack(archive: Path, members: dict[str, bytes | None]) -> Path:
    """A tar file of `members`; None makes a symbolic link to /etc/passwd."""
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content or b""))
    return archive


def members_of(folder: Path) -> dict[str, bytes | None]:
    return {f"cifar-10-batches-py/{name}": (folder / name).read_bytes() for name in BATCHES}


def test_batches_are_split_and_keep_channels_and_labels(small: Path) -> None:
    splits = load("cifar10", small.parent)
    assert splits.train.inputs.shape == (15, 3, 32, 32)
    assert splits.validation.inputs.shape == (5, 3, 32, 32)
    assert splits.test is not None
    assert splits.test.targets.tolist() == [5, 6, 7, 8]
    inputs = torch.cat([splits.train.inputs, splits.validation.inputs])
    red, green = ((inputs[:, channel].flatten(1) * 255).round().long() for channel in (0, 1))
    assert torch.equal(green, red + 100)
    records = red[:, 0]
    assert sorted(records.tolist()) == [10 * number + index for number in range(5) for index in range(4)]
    labels = torch.cat([splits.train.targets, splits.validation.targets])
    assert torch.equal((records // 10 + records % 10) % 10, labels)


@pytest.mark.parametrize("place", ["DIR", "DIR/cifar10", "DIR is the layout"])
def test_the_layout_is_found_in_the_data_directory(small: Path, tmp_path: Path, place: str) -> None:
    if place == "DIR/cifar10":
        small.parent.rename(tmp_path / "cifar10")
    data_dir = {"DIR": small.parent, "DIR/cifar10": tmp_path, "DIR is the layout": small}[place]
    assert len(load("cifar10", data_dir, download=False).train) == 15


def test_without_a_test_batch_there_is_no_test_split(small: Path) -> None:
    (small / "test_batch").unlink()
    assert load("cifar10", small.parent).test is None


def test_a_missing_training_batch_is_named(small: Path) -> None:
    (small / "data_batch_4").unlink()
    with pytest.raises(DataError, match="data_batch_4 cannot be read"):
        load("cifar10", small.parent)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({b"labels": [0, 1, 2, 3]}, "lacks the 4×3072 bytes"),
        ({b"data": np.zeros((4, 3071), np.uint8), b"labels": [0, 1, 2, 3]}, "lacks the 4×3072 bytes"),
        ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1]}, "lacks the 4 labels"),
        ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 10]}, "labels other than 0 to 9"),
        ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, b"3"]}, "labels other than 0 to 9"),
    ],
)
def test_a_batch_of_another_structure_is_refused_by_name(small: Path, batch: object, message: str) -> None:
    (small / "data_batch_2").write_bytes(pickle.dumps(batch, protocol=4))
    with pytest.raises(DataError, match=f"data_batch_2 .*{message}"):
        load("cifar10", small.parent)


def test_a_download_is_unpacked_into_the_cache_and_the_archive_removed(
    small: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pack(tmp_path / "served.tar.gz", members_of(small)).read_bytes()
    remote = Remote("cifar-10-python.tar.gz", ("https://example.org/",), "md5", hashlib.md5(content).hexdigest())
    monkeypatch.setattr(cifar10, "ARCHIVE", remote)
    monkeypatch.setattr(fetch, "open_https", lambda _: io.BytesIO(content))
    assert torch.equal(load("cifar10", quiet=True).train.inputs, load("cifar10", small.parent).train.inputs)
    assert [path.name for path in (cache / "cifar10").iterdir()] == ["cifar-10-batches-py"]
    assert len(load("cifar10", download=False).train) == 15


def test_an_archive_in_the_data_directory_serves_and_stays(small: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    archive = pack(data_dir / "cifar-10-python.tar.gz", members_of(small))
    assert len(load("cifar10", data_dir, download=False).train) == 15
    assert archive.exists()


def test_only_the_expected_members_of_an_archive_are_unpacked(small: Path, tmp_path: Path) -> None:
    escape = {"../escaped": b"x", "cifar-10-batches-py/../../escaped": b"x", f"{tmp_path}/escaped": b"x"}
    archive = pack(tmp_path / "archive.tar.gz", {**members_of(small), **escape, "cifar-10-batches-py/more": b"x"})
    layout = cifar10.unpack_archive(archive, tmp_path / "deep" / "folder")
    assert sorted(path.name for path in layout.iterdir()) == sorted(BATCHES)
    assert [path.name for path in (tmp_path / "deep").rglob("*escaped*")] == []
    assert not (tmp_path / "escaped").exists()


def test_a_link_in_place_of_a_batch_is_refused_and_nothing_left(small: Path, tmp_path: Path) -> None:
    archive = pack(tmp_path / "archive.tar.gz", {**members_of(small), "cifar-10-batches-py/data_batch_3": None})
    with pytest.raises(DataError, match=r"archive\.tar\.gz lacks data_batch_3"):
        cifar10.unpack_archive(archive, tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("keep", [0, 20, -100])
def test_a_truncated_archive_is_refused_and_nothing_left(small: Path, tmp_path: Path, keep: int) -> None:
    archive = pack(tmp_path / "archive.tar.gz", members_of(small))
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"archive\.tar\.gz"):
        cifar10.unpack_archive(archive, tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.slow
@pytest.mark.full
def test_full_cifar10_has_5000_training_and_1000_test_images_of_each_class(full_data: Path, tmp_path: Path) -> None:
    data_dir = full_data
    if not any((place / "cifar-10-batches-py").is_dir() for place in (full_data, full_data / "cifar10")):
        unpack = full_data / "unpack_cifar10.py"
        if not unpack.is_file():
            pytest.skip("FEDCDP_DATA holds neither cifar-10-batches-py nor the script that makes it")
        data_dir = tmp_path
        subprocess.run([sys.executable, str(unpack), str(tmp_path)], check=True, capture_output=True)
    splits = load("cifar10", data_dir, download=False)
    assert splits.train.inputs.shape == (40_000, 3, 32, 32)
    assert splits.validation.inputs.shape == (10_000, 3, 32, 32)
    assert splits.test is not None
    counts = torch.bincount(splits.train.targets) + torch.bincount(splits.validation.targets)
    assert counts.tolist() == [5000] * 10
    assert torch.bincount(splits.test.targets).tolist() == [1000] * 10
    total = splits.train.inputs.mean(dim=(0, 2, 3)) * 0.8 + splits.validation.inputs.mean(dim=(0, 2, 3)) * 0.2
    torch.testing.assert_close(total, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-3, rtol=0)
