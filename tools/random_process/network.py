"""The encoder while it is trained: a small residual network with BatchNorm, and the head that is dropped afterwards."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = (1, 1, 1, 1)


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.shortcut = self.shortcut_norm = None
        if stride != 1 or before != after:
            self.shortcut, self.shortcut_norm = nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)

    def forward(self, values: Tensor) -> Tensor:
        """See the class."""
        inner = F.relu(self.first_norm(self.first(values)))
        inner = self.second_norm(self.second(inner))
        if self.shortcut is not None and self.shortcut_norm is not None:
            values = self.shortcut_norm(self.shortcut(values))
        return F.relu(inner + values)


class Encoder(nn.Module):
    """A stem and four stages; each stage has twice the channels of the one before, at half the resolution."""

    def __init__(self, width: int, depth: tuple[int, ...] = BLOCKS) -> None:
        super().__init__()
        self.width = width
        self.stem, self.stem_norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        stages, before = [], width
        for number, blocks in enumerate(depth):
            after = width * 2**number
            layers = [
                Block(before if place == 0 else after, after, 2 if number and place == 0 else 1) for place in range(blocks)
            ]
            stages.append(nn.Sequential(*layers))
            before = after
        self.stages = nn.ModuleList(stages)

    def forward(self, images: Tensor) -> list[Tensor]:
        """The outputs of the last two stages for images with values in [0, 1]."""
        values, found = F.relu(self.stem_norm(self.stem(4 * images - 2))), []
        for stage in self.stages:
            values = stage(values)
            found.append(values)
        return found[-2:]


class Projected(nn.Module):
    """The encoder with the head on which the contrastive loss works."""

    def __init__(self, encoder: Encoder, size: int = 128) -> None:
        super().__init__()
        self.encoder = encoder
        wide = 8 * encoder.width
        self.head = nn.Sequential(
            nn.Linear(wide, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, size, bias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        """One vector for each image."""
        projected: Tensor = self.head(self.encoder(images)[-1].mean((2, 3)))
        return projected
