"""The trained encoder as the constants of `fedcdp.models.random_process`, in float16."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedcdp.models import random_process
from tools.random_process.pictures import Draws, pictures
from tools.random_process.views import view

PACKAGE = Path(random_process.__file__)
FLOOR = 1e-4
"""The least variance of a direction, relative to a standardised channel."""


def pack(trained: Path, *, seed: int, count: int, device: str) -> None:
    """Write the weights file of the package, and its digest into the module."""
    constants = folded(load_file(trained / "encoder.safetensors"))
    constants |= rotations(constants, seed, count, device)
    target = PACKAGE.with_suffix(".safetensors")
    save_file({name: value.half().contiguous() for name, value in sorted(constants.items())}, target)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    PACKAGE.write_text(re.sub(r'^DIGEST = ".*"', f'DIGEST = "{digest}"', PACKAGE.read_text(), flags=re.MULTILINE))
    print(f"{target.name}: {target.stat().st_size:,} bytes, {digest}")


def folded(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each convolution together with its BatchNorm, for the stages that are used."""
    found = _fold(trained, "stem", "stem")
    for stage in range(random_process.STAGES[-1] + 1):
        for part in ("first", "second", *(("shortcut",) if stage else ())):
            found |= _fold(trained, f"stages.{stage}.0.{part}", f"stage{stage}_{part}")
    return found


def _fold(trained: dict[str, Tensor], layer: str, name: str) -> dict[str, Tensor]:
    mean, variance, scale, shift = (
        trained[f"{layer}_norm.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
    )
    factor = scale / (variance + 1e-5).sqrt()
    return {
        f"{name}_weight": trained[f"{layer}.weight"] * factor[:, None, None, None],
        f"{name}_bias": shift - mean * factor,
    }


@torch.no_grad()
def rotations(constants: dict[str, Tensor], seed: int, count: int, device: str) -> dict[str, Tensor]:
    """For each stage the mean and the scale of its channels on pictures of random processes, and a matrix.

    With the covariance U·Λ·Uᵀ of the standardised channels, the matrix is U·Λ^(−1/4): it whitens half-way.
    """
    encoder = _unpacked(constants).to(device)
    draws, seen = Draws(seed, device), []
    for _ in range(0, count, 256):
        images = view(pictures(256, draws), draws)
        both = zip(encoder.means(images), encoder.means(images.flip(3)), strict=True)
        seen.append([((one + other) / 2).movedim(1, -1).flatten(0, -2).double() for one, other in both])
        print(f"{256 * len(seen):,} of {count:,} pictures", end="\r", flush=True)
    found: dict[str, Tensor] = {}
    for stage, values in zip(random_process.STAGES, (torch.cat(each) for each in zip(*seen, strict=True)), strict=True):
        mean, deviation = values.mean(0), values.std(0) + 1e-3
        standard = (values - mean) / deviation
        variances, directions = torch.linalg.eigh(standard.T @ standard / len(standard))
        matrix = directions * variances.clamp(min=FLOOR) ** -0.25
        found |= {f"stage{stage}_centre": mean, f"stage{stage}_scale": 1 / deviation, f"stage{stage}_rotation": matrix}
    return {name: value.float().cpu() for name, value in found.items()}


def _unpacked(constants: dict[str, Tensor]) -> random_process.RandomProcess:
    """The module with these constants, rounded as they are stored."""
    module = random_process.RandomProcess.__new__(random_process.RandomProcess)
    torch.nn.Module.__init__(module)
    module.shape = (3, random_process.SIDE, random_process.SIDE)
    for name, value in constants.items():
        module.register_buffer(name, value.half().float())
    return module
