"""How alike two images are, and which of their pixels a network can see at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_RESOLUTION = torch.finfo(torch.float32).eps
_C1, _C2 = 0.01**2, 0.03**2  # of SSIM, for images in [0, 1]
_PROBES, _QUIET_ROUNDS = 128, 4
_NOTICED = 1e-5  # of the largest gradient of a probe


def psnr(mse: Tensor, span: float = 1.0) -> Tensor:
    """The peak signal-to-noise ratio in dB, of data that spans `span`; at most 138.5, whatever the MSE."""
    return -10 * (mse / span**2).clamp(min=_RESOLUTION**2).log10()


def ssim(first: Tensor, second: Tensor, visible: Tensor | None = None, window: int = 11) -> Tensor:
    """Structural similarity of images [..., C, H, W] in [0, 1] (Wang et al., 2004): a Gaussian window, σ = 1.5.

    The mean over channels and over the windows that lie in the image and, where `visible` [C, H, W] is given, hold nothing
    invisible; NaN where there is none. In smaller images the window is the largest odd one that fits.
    """
    height, width = first.shape[-2:]
    window = min(window, height - 1 + height % 2, width - 1 + width % 2)
    offsets = torch.arange(window, device=first.device).double() - window // 2
    bell = torch.softmax(-offsets.square() / (2 * 1.5**2), 0)
    # In float64, also because a GPU may round the float32 inputs of a convolution to ten bits.
    x, y = (images.double().reshape(-1, 1, height, width) for images in (first, second))
    down = functional.conv2d(torch.cat([x, y, x * x, y * y, x * y]), bell.view(1, 1, -1, 1))
    mean_x, mean_y, xx, yy, xy = functional.conv2d(down, bell.view(1, 1, 1, -1)).chunk(5)
    means, variances = mean_x.square() + mean_y.square(), xx + yy - mean_x.square() - mean_y.square()
    similar = (2 * mean_x * mean_y + _C1) * (2 * (xy - mean_x * mean_y) + _C2) / ((means + _C1) * (variances + _C2))
    seen = torch.ones(first.shape[-3:]) if visible is None else visible.float()
    whole = functional.max_pool2d(-seen, window, stride=1).bool().to(first.device)
    return similar.view(*first.shape[:-2], *similar.shape[-2:])[..., whole].mean(-1)


def visible_inputs(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """Which coordinates of an input of `shape` can change what `function` makes of a batch of inputs: a mask [*shape].

    Gradients of random combinations of the outputs are taken at random inputs, uniform and normal in turn, until several
    hundred more show nothing new. What is marked is visible; what a network reacts to only rarely might be missed.
    """
    generator = torch.Generator().manual_seed(seed)
    seen, quiet, draws = torch.zeros(shape, dtype=torch.bool, device=device), 0, (torch.rand, torch.randn)
    while quiet < _QUIET_ROUNDS and not seen.all():
        draws = draws[::-1]
        inputs = draws[0](_PROBES, *shape, generator=generator).to(device).requires_grad_()
        with torch.enable_grad():
            outputs = function(inputs)
        weights = torch.randn(outputs.shape, generator=generator).to(device)
        (gradient,) = torch.autograd.grad(outputs, inputs, weights, materialize_grads=True)
        # Not "other than zero": the fast convolutions of a GPU leave rounding errors where nothing is seen.
        found = seen | (gradient.abs() > _NOTICED * gradient.abs().amax()).any(0)
        quiet, seen = (quiet + 1 if torch.equal(found, seen) else 0), found
    return seen
