"""A user's own `.npz`: one array of inputs, one of labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcdp.errors import DataError
from fedcdp.untrusted import most_unpacked

_HEADERS: dict[tuple[int, int], Callable[[Any], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
PAIRS = (("x", "y"), ("inputs", "targets"), ("images", "labels"), ("data", "target"))


def checked_member(arrays: Any, name: str, most: int) -> NDArray[Any]:
    """An array of an opened `.npz`, whose size is looked at before anything is unpacked or room is made for it."""
    file = arrays.zip
    member = next(each for each in file.namelist() if each.removesuffix(".npy") == name)
    with file.open(member) as content:
        shape, _, kind = _HEADERS[np.lib.format.read_magic(content)](content)
        promised, room = math.prod(shape) * kind.itemsize, file.getinfo(member).file_size - content.tell()
    if not kind.hasobject:  # which NumPy itself refuses
        if promised > most:
            raise DataError(f"the array {name} unpacks to {promised:,} bytes; at most {most:,} are read: store it unpacked")
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
        raise error if str(path) in str(error) else DataError(f"{path}: {error}") from None
    except Exception as error:  # np.load passes on whatever zipfile, zlib and its own header parser raise
        raise DataError(f"{path} cannot be read as a .npz file: {' '.join(str(error).split())}") from error
    return inputs, labels
