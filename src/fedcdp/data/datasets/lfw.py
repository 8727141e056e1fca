"""Labeled Faces in the Wild: the 62 people with 20 or more pictures, funneled, a 128×128 crop resized to 32×32.

The crop is taken from an earlier public release by authors of the paper (github.com/git-disl/CPL_attack).
"""

from __future__ import annotations

import warnings
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.data.array_files import checked_member
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.fetch import Storage
from fedcdp.data.prepare import PIXELS_TO_UNIT, stratified_split, unit_pixels
from fedcdp.errors import DataError
from fedcdp.files.disk import atomic_write

PACKED = "lfw62_funneled_square_32.npz"
PICTURES = 3_023
PEOPLE = 62
VALIDATION_PICTURES = 756
PICTURES_A_PERSON = 20
FRAME = (250, 250)
CROP = (61, 61, 189, 189)
SIDE = 32
MOST_BYTES = 8 * PICTURES * SIDE * SIDE * 3  # room for any type, so an error can name a wrong one


def load_lfw(storage: Storage, split_seed: int) -> Splits:
    """2,267 training and 756 validation pictures, each person in proportion and hence in both; no test set."""
    images, labels = read_packed(storage.find("lfw", PACKED) or _fetch_and_pack(storage))
    train, validation = stratified_split(labels, VALIDATION_PICTURES, split_seed)
    inputs = images.transpose(0, 3, 1, 2)
    return Splits(
        name="lfw",
        train=Dataset(unit_pixels(inputs[train]), torch.from_numpy(labels[train]), PEOPLE),
        validation=Dataset(unit_pixels(inputs[validation]), torch.from_numpy(labels[validation]), PEOPLE),
        test=None,
        normalisation=PIXELS_TO_UNIT,
    )


def read_packed(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The pictures [3023, 32, 32, 3] and labels [3023] of a packed file; any other content raises `DataError`."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels = (checked_member(arrays, name, MOST_BYTES) for name in ("images", "labels"))
    except Exception as error:  # np.load passes on all errors of zipfile, zlib and its own header parser
        raise DataError(f"{path} cannot be read as {PACKED}: {' '.join(str(error).split())}") from error
    if images.dtype != np.uint8 or images.shape != (PICTURES, SIDE, SIDE, 3):
        raise DataError(f"{path} holds {images.dtype} images of shape {images.shape}, not {PICTURES} of 32×32×3 bytes")
    if labels.shape != (PICTURES,) or not np.array_equal(np.unique(labels), np.arange(PEOPLE)):
        raise DataError(f"{path} does not hold {PICTURES} labels of {PEOPLE} people")
    return images, labels.astype(np.int64)


def pack_pictures(folder: Path, target: Path) -> None:
    """Write the pictures of all people with 20 or more pictures in `folder`/<Person_Name>/ to one file, `target`.

    Arrays: `images` uint8 [N, 32, 32, 3], `labels` uint8 [N], `names` by label, `files` relative to `folder`; people
    in alphabetical order, each person's pictures by number. The file appears complete or not at all.
    """
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    names: list[str] = []
    files: list[str] = []
    for person in sorted(path for path in folder.iterdir() if path.is_dir()):
        pictures = sorted(person.glob("*.jpg"), key=_number)
        if len(pictures) < PICTURES_A_PERSON:
            continue
        images += [_face(picture) for picture in pictures]
        labels += [len(names)] * len(pictures)
        names.append(person.name.replace("_", " "))
        files += [f"{person.name}/{picture.name}" for picture in pictures]
    if not images:
        raise DataError(f"{folder} has no folder with {PICTURES_A_PERSON} or more pictures of a person")
    with atomic_write(target) as file:
        np.savez_compressed(
            file,
            images=np.stack(images),
            labels=np.array(labels, dtype=np.uint8),
            names=np.array(names),
            files=np.array(files),
        )


def _number(picture: Path) -> int:
    digits = picture.stem.rpartition("_")[2]
    if not digits.isdecimal():
        raise DataError(f"{picture} is not named like an LFW picture, such as Person_Name_0001.jpg")
    return int(digits)


def _face(picture: Path) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(picture) as image:
            if image.size != FRAME:
                raise DataError(f"{picture} is {image.size[0]}×{image.size[1]} pixels: LFW pictures are 250×250")
            face = image.convert("RGB").crop(CROP).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    except (OSError, SyntaxError) as error:
        raise DataError(f"{picture} cannot be read as a picture ({error})") from error
    return np.asarray(face, dtype=np.uint8)


def _fetch_and_pack(storage: Storage) -> Path:
    if not storage.download:
        raise storage.missing("lfw", PACKED, reason="downloading is switched off")
    from sklearn.datasets import fetch_lfw_people

    home = storage.folder("lfw")
    try:
        home.mkdir(parents=True, exist_ok=True)
        # scikit-learn downloads, checks and unpacks. It also returns another crop, which is kept as small as possible.
        corner = (slice(0, 8), slice(0, 8))
        with warnings.catch_warnings(action="ignore"):  # it warns of each retry; the error below reports the failure once
            fetch_lfw_people(data_home=home, min_faces_per_person=500, color=True, slice_=corner, resize=None)
    except (OSError, EOFError, HTTPException, ValueError, RuntimeError) as error:
        raise storage.missing("lfw", PACKED, reason=f"scikit-learn could not download it ({error})") from error
    pictures, target = home / "lfw_home" / "lfw_funneled", home / PACKED
    pack_pictures(pictures, target)
    try:
        read_packed(target)
    except DataError as error:
        target.unlink()  # an interrupted download must not be taken for LFW from now on
        raise DataError(f"{pictures} does not hold all of LFW: delete {home} and try again") from error
    return target
