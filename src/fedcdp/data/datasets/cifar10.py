"""CIFAR-10: 32×32 colour pictures of ten classes (Krizhevsky 2009), from the original `cifar-10-batches-py`."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.fetch import Remote, Storage
from fedcdp.data.formats import read_pickle
from fedcdp.data.prepare import PIXELS_TO_UNIT, random_split, unit_pixels
from fedcdp.errors import DataError
from fedcdp.files.untrusted import read_bounded

ARCHIVE = Remote(
    name="cifar-10-python.tar.gz",
    urls=("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    algorithm="md5",
    checksum="c58f30108f718f92721af3b95e74349a",
)
LAYOUT = "cifar-10-batches-py"
TRAINING_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
BATCH_IMAGES = 10_000
VALIDATION_IMAGES = 10_000
CLASSES = 10
MOST_BATCH = 2**25  # bytes; the originals have 31,035,704 at most, and 186 million together
MOST_ARCHIVE = 2**28


def load_cifar10(storage: Storage, split_seed: int) -> Splits:
    """40,000 training and 10,000 validation images from the five training batches; `test_batch`, if present, as test."""
    folder = _find_layout(storage)
    batches = [read_batch(folder / name) for name in TRAINING_BATCHES]
    images = np.concatenate([batch[0] for batch in batches])
    labels = np.concatenate([batch[1] for batch in batches])
    train, validation = random_split(len(labels), VALIDATION_IMAGES, split_seed)
    return Splits(
        name="cifar10",
        train=_dataset(images[train], labels[train]),
        validation=_dataset(images[validation], labels[validation]),
        test=_dataset(*read_batch(folder / TEST_BATCH)) if (folder / TEST_BATCH).is_file() else None,
        normalisation=PIXELS_TO_UNIT,
    )


def read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """One batch file: images [10000, 3, 32, 32] and labels [10000]. The pickle is read without running it."""
    try:
        content = read_bounded(path, MOST_BATCH)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    batch = read_pickle(content, str(path))
    data, labels = batch.get(b"data"), batch.get(b"labels")
    if not isinstance(data, np.ndarray) or data.shape != (BATCH_IMAGES, 3072):
        raise DataError(f"{path} lacks the {BATCH_IMAGES}×3072 bytes of a CIFAR-10 batch under b'data'")
    if not isinstance(labels, list) or len(labels) != BATCH_IMAGES:
        raise DataError(f"{path} lacks the {BATCH_IMAGES} labels of a CIFAR-10 batch under b'labels'")
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise DataError(f"{path} holds labels other than 0 to {CLASSES - 1}")
    return data.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def unpack_archive(archive: Path, folder: Path) -> Path:
    """Extract the six batches of `archive` into `folder`/cifar-10-batches-py, which appears complete or not at all.

    Only regular members with exactly the expected names are read, and they are written under our own names, so no entry of
    the archive can choose where its bytes go.
    """
    target = folder / LAYOUT
    wanted = {f"{LAYOUT}/{name}": name for name in (*TRAINING_BATCHES, TEST_BATCH)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as scratch:
            unpacked = Path(scratch) / LAYOUT
            unpacked.mkdir()
            with gzip.open(archive) as packed, tarfile.open(fileobj=cast(IO[bytes], _Bounded(packed)), mode="r|") as tar:
                for member in tar:
                    source = tar.extractfile(member) if member.isreg() and member.name in wanted else None
                    if source is not None and member.size > MOST_BATCH:
                        raise DataError(f"{archive} holds a {member.name} of {member.size:,} bytes: too large for a batch")
                    if source is not None:
                        with (unpacked / wanted[member.name]).open("wb") as sink:
                            shutil.copyfileobj(source, sink)
            missing = sorted(name for name in wanted.values() if not (unpacked / name).is_file())
            if missing:
                raise DataError(f"{archive} lacks {', '.join(missing)}")
            unpacked.replace(target)
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, OverflowError) as error:
        # Another process may have unpacked the same archive meanwhile; its result is then used.
        if not target.is_dir():
            raise DataError(f"{archive} cannot be unpacked into {folder} ({error})") from error
    return target


class _Bounded:
    """A gzip file that refuses to unpack more than CIFAR-10 can hold, however small the archive."""

    def __init__(self, packed: gzip.GzipFile) -> None:
        self._packed, self._left = packed, MOST_ARCHIVE

    def read(self, size: int) -> bytes:
        content = self._packed.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise DataError(f"it unpacks to more than {MOST_ARCHIVE:,} bytes, too large for CIFAR-10")
        return content


def _find_layout(storage: Storage) -> Path:
    first = TRAINING_BATCHES[0]
    found = storage.find("cifar10", f"{LAYOUT}/{first}", first)
    if found is not None:
        return found.parent
    archive = storage.obtain("cifar10", LAYOUT, ARCHIVE.name, remote=ARCHIVE)
    folder = unpack_archive(archive, storage.folder("cifar10"))
    if archive.parent == storage.folder("cifar10"):
        archive.unlink()  # our own download, no longer needed; a user's archive stays
    return folder


def _dataset(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Dataset:
    return Dataset(unit_pixels(images), torch.from_numpy(labels), CLASSES)
