"""Features of an encoder that was trained on pictures of random processes, and on no real image.

`tools/random_process` draws the pictures (leaves with random outlines and textures, random networks, functions and noise),
trains the encoder on them with a contrastive loss, and packs its weights into random_process.safetensors beside this
module. A deployment admits a client by the digest of these constants.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.errors import ModelError
from fedcdp.models.features import unit

SIDE = 32
CELLS = 2
DIGEST = "ac6032ef8a696c30015937977e6ad28aad1c7d63a22515296052625f464a2f48"
"""SHA-256 of the file of weights."""
STAGES = (1, 2)
"""The features come from the last two of the three stages, numbered from 0."""
_WEIGHTS = "random_process.safetensors"


class RandomProcess(nn.Module):
    """What a small residual network sees in an image and in its mirror image.

    1. Resize the image to 32 × 32 pixels. A grey image gets three equal channels.
    2. Run the network: a convolution, and three stages of one residual block each, with 96, 192 and 384 channels at 32, 16
       and 8 pixels a side.
    3. Take the mean of the last two stages in each quarter of the image, and the mean of the image and its mirror image.
    4. Standardise the channels by their mean and deviation on pictures of random processes, and rotate them to the
       principal components of such pictures. Divide each component by the root of its deviation, which is half-way to
       whitening: directions that vary little count for more, and few rounds suffice.
    5. Divide everything by its norm.

    Guarantees: inputs [examples, *shape], of 1 or 3 channels, with values in [0, 1]; outputs [examples, 2304] of norm at
    most 1, each a function of its own example alone.

    Raises:
        ModelError: The images have neither one nor three channels.
    """

    def __init__(self, shape: tuple[int, int, int] = (3, SIDE, SIDE)) -> None:
        super().__init__()
        if shape[0] not in (1, 3):
            raise ModelError(f"model: random-process needs images of 1 or 3 channels, not {shape[0]}")
        self.shape = shape
        for name, value in packed_weights().items():
            self.register_buffer(name.replace(".", "_"), value.float())

    def extra_repr(self) -> str:
        """The shape of an image, and the weights."""
        return f"shape={self.shape}, weights={DIGEST[:8]}"

    def forward(self, images: Tensor) -> Tensor:
        """The features of each image."""
        both = zip(self.means(images), self.means(images.flip(3)), strict=True)
        return unit(
            torch.cat([self.whitened(stage, (one + other) / 2) for stage, (one, other) in zip(STAGES, both, strict=True)], 1)
        )

    def means(self, images: Tensor) -> list[Tensor]:
        """The mean of each stage's outputs in each quarter of an image [examples, channels, 2, 2]."""
        images = images.expand(-1, 3, -1, -1)
        if self.shape[1:] != (SIDE, SIDE):
            images = F.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True)
        values, found = self._convolved("stem", 4 * images - 2).relu(), []
        for stage in range(STAGES[-1] + 1):
            inner = self._convolved(f"stage{stage}_first", values, stride=min(2, stage + 1)).relu()
            if stage:
                values = self._convolved(f"stage{stage}_shortcut", values, stride=2)
            values = (self._convolved(f"stage{stage}_second", inner) + values).relu()
            found.append(F.avg_pool2d(values, values.shape[-1] // CELLS))
        return [found[stage] for stage in STAGES]

    def whitened(self, stage: int, means: Tensor) -> Tensor:
        """The means of a stage, standardised, rotated and scaled, as one row for each example."""
        rotation = self.get_buffer(f"stage{stage}_rotation")
        return torch.einsum("nchw,ck->nkhw", self.standardised(stage, means), rotation).flatten(1)

    def standardised(self, stage: int, means: Tensor) -> Tensor:
        """The means of a stage with mean 0 and deviation 1 on pictures of random processes."""
        centre, scale = (self.get_buffer(f"stage{stage}_{part}")[:, None, None] for part in ("centre", "scale"))
        return (means - centre) * scale

    def _convolved(self, name: str, values: Tensor, stride: int = 1) -> Tensor:
        weight, bias = self.get_buffer(f"{name}_weight"), self.get_buffer(f"{name}_bias")
        return F.conv2d(values, weight, bias, stride, padding=weight.shape[-1] // 2)


@cache
def packed_weights() -> dict[str, Tensor]:
    """The packaged tensors, in float16, if they are the ones that this release was made with."""
    from safetensors.torch import load

    content = (files("fedcdp.models") / _WEIGHTS).read_bytes()
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise ModelError(f"model: {_WEIGHTS} of this installation is damaged; install fedcdp again")
    return load(content)
