"""Seeds: what a reconstruction starts from. The choice decides how often an attack succeeds (Wei et al., ESORICS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedcdp.errors import PlanError
from fedcdp.randomness import normals, stream_key, words

SeedKind = Literal["pattern", "uniform", "normal", "zeros"]


@dataclass(frozen=True)
class Seed:
    """`pattern` tiles a uniform [0, 1) patch `tiles` times a side (the paper's "patterned random" is 2); `uniform` is
    [0, 1) and `normal` N(0, 1) in every coordinate."""

    kind: SeedKind = "pattern"
    tiles: int = 2

    def __post_init__(self) -> None:
        if self.kind not in get_args(SeedKind):
            raise PlanError(f"seed: {self.kind!r} is not one of {', '.join(get_args(SeedKind))}")
        if self.tiles < 1:
            raise PlanError(f"tiles: {self.tiles} is not allowed; it must be at least 1")

    def draw(self, victims: Tensor, examples: int, shape: tuple[int, ...], seed: int, restart: int = 0) -> Tensor:
        """[victims, examples, *shape]; a victim's seed depends on its number, not on who is attacked with it."""
        lead, size = (len(victims), examples), torch.Size(shape).numel()
        key = stream_key(seed, "attack-seed")
        if self.kind == "zeros":
            return torch.zeros(*lead, *shape, device=victims.device)
        if self.kind == "normal":
            return normals(key, victims, restart, 0, examples * size).view(*lead, *shape)
        tiles = self.tiles if self.kind == "pattern" else 1
        sides = min(2, len(shape))  # of an image both its height and its width are tiled, of a vector its length
        patch = [*shape[:-sides], *(-(-side // tiles) for side in shape[-sides:])]
        # 24 bits are what a float32 below 1 holds: with more, the largest would be rounded to 1.
        drawn = (words(key, victims, restart, 0, examples * torch.Size(patch).numel()) >> 8).float() / 2**24
        tiled = drawn.view(*lead, *patch).tile((tiles,) * sides)
        for axis, side in enumerate(shape[-sides:]):
            tiled = tiled.narrow(axis - sides, 0, side)
        return tiled.contiguous()
