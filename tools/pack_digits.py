"""Pack the digits that come with fedcdp: the first 500 of each class of MNIST's training set, by class, in file order.

    python tools/pack_digits.py DATA/mnist src/fedcdp/data/digits.npz

The folder holds MNIST's original files `train-images-idx3-ubyte.gz` and `train-labels-idx1-ubyte.gz`.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIGITS_PER_CLASS = 500
CLASSES = 10


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read a compressed IDX file of bytes: a big-endian header (magic number, then the shape), then the values."""
    content = gzip.decompress(path.read_bytes())
    magic, *shape = (int(word) for word in np.frombuffer(content, dtype=">u4", count=1 + dimensions))
    if magic != 0x0800 + dimensions:
        raise ValueError(f"{path} is not an IDX file of bytes with {dimensions} dimensions")
    return np.frombuffer(content, dtype=np.uint8, offset=4 * (1 + dimensions)).reshape(shape)


def first_digits(labels: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return the positions of the first digits of each class."""
    return np.concatenate([np.flatnonzero(labels == digit)[:DIGITS_PER_CLASS] for digit in range(CLASSES)])


def main() -> None:
    """Read the original files and write the packed one."""
    parser = argparse.ArgumentParser(description="Pack the digits that come with fedcdp.")
    parser.add_argument("folder", type=Path, help="The folder with MNIST's original training files.")
    parser.add_argument("target", type=Path, help="The file to write.")
    given = parser.parse_args()
    images = read_idx(given.folder / "train-images-idx3-ubyte.gz", dimensions=3)
    labels = read_idx(given.folder / "train-labels-idx1-ubyte.gz", dimensions=1)
    chosen = first_digits(labels)
    np.savez_compressed(given.target, images=images[chosen], labels=labels[chosen])


if __name__ == "__main__":
    main()
