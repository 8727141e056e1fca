"""A user's own `.npz`: one array of inputs, one of labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcdp.errors import DataError

PAIRS = (("x", "y"), ("inputs", "targets"), ("images", "labels"), ("data", "target"))


def read_npz(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first of `PAIRS` that the file holds (in any case), as it is. Pickled arrays are refused."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            stored = {name.lower(): name for name in arrays.files}
            pair = next((pair for pair in PAIRS if pair[0] in stored and pair[1] in stored), None)
            if pair is None:
                known = ", ".join("/".join(pair) for pair in PAIRS)
                raise DataError(f"{path} holds the arrays {', '.join(arrays.files) or '(none)'}: name them {known}")
            inputs, labels = (arrays[stored[name]] for name in pair)
    except DataError:
        raise
    except Exception as error:  # np.load passes on whatever zipfile, zlib and its own header parser raise
        raise DataError(f"{path} cannot be read as a .npz file: {' '.join(str(error).split())}") from error
    return inputs, labels
