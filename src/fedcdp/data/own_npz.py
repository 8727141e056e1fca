"""A user's own `.npz`: one array of inputs, one of labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcdp.errors import DataError
from fedcdp.untrusted import most_unpacked

PAIRS = (("x", "y"), ("inputs", "targets"), ("images", "labels"), ("data", "target"))


def checked_member(arrays: Any, name: str, most: int) -> NDArray[Any]:
    """An array of an opened `.npz`, whose size is looked at before anything is unpacked or room is made for it."""
    file = arrays.zip
    member = next(each for each in file.namelist() if each.removesuffix(".npy") == name)
    with file.open(member) as content:
        version = np.lib.format.read_magic(content)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in header:
            raise DataError(f"the array {name} is of a format that is not known")
        shape, _, kind = header[version](content)
        if kind.hasobject:
            raise DataError(f"the array {name} holds Python objects, which are never read")
        promised = math.prod(shape) * kind.itemsize
        if not 0 <= promised <= most:
            raise DataError(f"the array {name} takes {promised:,} bytes unpacked; at most {most:,} are read: store it unpacked")
        room = file.getinfo(member).file_size - content.tell()
    if promised != room:
        raise DataError(f"the array {name} promises {promised} bytes in its header and holds {room}")
    found: NDArray[Any] = arrays[name]
    return found


def read_npz(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first of `PAIRS` that the file holds (in any case), as it is. Pickled arrays are refused."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            stored = {name.lower(): name for name in arrays.files}
            pair = next((pair for pair in PAIRS if pair[0] in stored and pair[1] in stored), None)
            if pair is None:
                known = ", ".join("/".join(pair) for pair in PAIRS)
                raise DataError(f"{path} holds the arrays {', '.join(arrays.files) or '(none)'}: name them {known}")
            inputs, labels = (checked_member(arrays, stored[name], most_unpacked(path.stat().st_size)) for name in pair)
    except DataError as error:
        raise DataError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None
    except Exception as error:  # np.load passes on whatever zipfile, zlib and its own header parser raise
        raise DataError(f"{path} cannot be read as a .npz file: {' '.join(str(error).split())}") from error
    return inputs, labels
