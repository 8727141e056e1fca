"""The IDX format of MNIST: a big-endian header, then unsigned bytes."""

from __future__ import annotations

import math
import struct

import numpy as np
from numpy.typing import NDArray

from fedcdp.errors import DataError

UNSIGNED_BYTE = 0x08


def parse_idx(content: bytes, dimensions: int, source: str) -> NDArray[np.uint8]:
    """The array in `content`, which must be IDX of unsigned bytes with `dimensions` axes, exactly as long as promised.

    Raises `DataError` naming `source` for anything else, whatever the bytes.
    """
    header_bytes = 4 + 4 * dimensions
    magic = struct.pack(">HBB", 0, UNSIGNED_BYTE, dimensions)
    if len(content) < header_bytes or not content.startswith(magic):
        raise DataError(
            f"{source} is not an IDX file of bytes with {dimensions} axes: "
            f"it starts with {content[:4].hex() or 'nothing'} instead of {magic.hex()}, or ends within its header"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header_bytes])
    promised, found = math.prod(shape), len(content) - header_bytes
    if promised == 0 or promised != found:
        raise DataError(f"{source} promises {promised} bytes of data in its header and holds {found}")
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)
