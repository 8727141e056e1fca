"""Coefficients of random images by kymatio, which tests/models/test_scattering.py compares with.

pip install kymatio==0.3.0
python -m tools.scattering_vectors tests/models/scattering.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES = {"small": (1, 2, 9, 14), "wide": (1, 1, 16, 20)}
"""The shapes of the stored images: one with sides that 4 does not divide, and one whose sides it does."""


def kymatio_transform(height: int, width: int) -> Any:
    """Kymatio's transform with two scales, which it imports with a current SciPy only under a function's old name."""
    from scipy import special

    if not hasattr(special, "sph_harm"):
        special.sph_harm = special.sph_harm_y  # of its transforms in three dimensions, which are not used here
    from kymatio.torch import Scattering2D

    return Scattering2D(J=2, shape=(height, width), L=8, max_order=2)


def vectors() -> dict[str, np.ndarray]:
    """For each shape: images, and their coefficients."""
    generator, found = torch.Generator().manual_seed(1), {}
    for name, shape in SHAPES.items():
        images = torch.rand(*shape, generator=generator)
        found[f"{name}_images"] = images.numpy()
        found[f"{name}_maps"] = kymatio_transform(*shape[2:])(images).numpy()
    return found


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("to", type=Path)
    np.savez_compressed(parser.parse_args().to, **vectors())


if __name__ == "__main__":
    main()
