"""Two random views of a picture: what the encoder learns to recognise as the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.random_process.pictures import Draws

OUT = 32
_GREY = (0.299, 0.587, 0.114)


def view(pictures: Tensor, draws: Draws) -> Tensor:
    """A random crop of 15 to 100 % of each picture, as 32 × 32 pixels, flipped and recoloured at random."""
    return recoloured(cropped(pictures, draws), draws).clamp(0, 1)


def cropped(pictures: Tensor, draws: Draws) -> Tensor:
    """Random crops with a random aspect ratio, half of them mirrored."""
    count = len(pictures)
    share, ratio = draws.uniform(0.15, 1, count).sqrt(), draws.uniform(-0.29, 0.29, count).exp().sqrt()
    width, height = (share * ratio).clamp(max=1), (share / ratio).clamp(max=1)
    left, top = (1 - width) * draws.uniform(-1, 1, count), (1 - height) * draws.uniform(-1, 1, count)
    mirror = 1 - 2 * draws.happens(0.5, count).float()
    zero = torch.zeros_like(width)
    affine = torch.stack([torch.stack([width * mirror, zero, left], 1), torch.stack([zero, height, top], 1)], 1)
    grid = F.affine_grid(affine, [count, 3, OUT, OUT], align_corners=False).to(pictures.dtype)
    return F.grid_sample(pictures, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def recoloured(images: Tensor, draws: Draws) -> Tensor:
    """Random brightness, contrast, saturation and colour matrix; a fifth of the images become grey."""
    count = len(images)
    grey = (images * images.new_tensor(_GREY)[:, None, None]).sum(1, keepdim=True)
    saturation = torch.where(draws.happens(0.2, count), 0.0, draws.uniform(0.4, 1.6, count))[:, None, None, None]
    images = torch.lerp(grey.expand_as(images), images, saturation.to(images.dtype))
    mixing = torch.eye(3, device=images.device) + 0.15 * draws.normal(count, 3, 3) * draws.happens(0.8, count, 1, 1)
    images = torch.einsum("nkc,nchw->nkhw", mixing.to(images.dtype), images)
    mean = images.mean((1, 2, 3), keepdim=True)
    contrast = draws.uniform(0.5, 1.5, count, 1, 1, 1).to(images.dtype)
    brightness = draws.uniform(-0.25, 0.25, count, 1, 1, 1).to(images.dtype)
    return mean + contrast * (images - mean) + brightness
