"""The scattering transform of an image (Bruna and Mallat, 2013), with the constants of Scattering2D(J=2, L=8) in kymatio.

With wavelets ψ of 2 scales and 8 orientations, and a Gaussian window φ, an image x has 81 maps on a grid 4 times coarser:

| order | maps | number |
| --- | --- | --- |
| 0 | x ∗ φ | 1 |
| 1 | abs(x ∗ ψ₁) ∗ φ | 16 |
| 2 | abs(abs(x ∗ ψ₁) ∗ ψ₂) ∗ φ, where ψ₁ is of the fine scale and ψ₂ of the coarse one | 64 |

Tramèr and Boneh ("Differentially private learning needs better features", ICLR 2021) train a linear layer on these maps.
They normalise the maps of each image by themselves, in groups. This needs no statistic of the data, so it costs no privacy.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.errors import ModelError
from fedcdp.models.features import unit

_COARSER = 4  # pixels of the image per cell of the grid, in each direction
_ORIENTATIONS = 8
_SMALLEST = 8
_PRECISION = 2**16
_ROUGHLY_PI = 3.1415  # kymatio's, in the factor that normalises a filter


class Scattering(nn.Module):
    """Scattering coefficients of images of `height` × `width` pixels, each image normalised by itself.

    1. Mirror each channel at its borders, and compute its 81 maps (see above), one value for every 4×4 pixels. The values
       are those of kymatio, up to the rounding of its filters to 16 binary digits.
    2. Divide the maps of all channels, in order, into `groups`. Subtract the mean of each group and divide by its standard
       deviation, over its maps and places.
    3. Divide everything by its norm.

    Guarantees: inputs [examples, channels, height, width]; outputs [examples, features] of norm at most 1, each a function
    of its own example alone. Heights and widths that 4 does not divide lose their remainder: 30 pixels give 7 values.

    Raises:
        ModelError: The images are smaller than 8×8 pixels.
    """

    fine: Tensor
    coarse: Tensor
    rows: Tensor
    columns: Tensor
    coarse_rows: Tensor
    coarse_columns: Tensor

    def __init__(self, height: int, width: int, groups: int = 27) -> None:
        super().__init__()
        if min(height, width) < _SMALLEST:
            raise ModelError(
                f"model: scattering needs images of at least {_SMALLEST}×{_SMALLEST} pixels, not {height}×{width}"
            )
        self.height, self.width, self.groups = height, width, groups
        sides = padded(height), padded(width)
        self.register_buffer("fine", wavelets(*sides, spread=0.8, frequency=0.75 * math.pi))
        # Divided by 4: the spectrum of every second pixel is a mean of four (`_halved`).
        self.register_buffer("coarse", wavelets(*sides, spread=1.6, frequency=0.375 * math.pi) / 4)
        for name, side in zip(("rows", "columns"), sides, strict=True):
            self.register_buffer(name, window(side))
            self.register_buffer(f"coarse_{name}", window(side, halved=True))

    def extra_repr(self) -> str:
        """The arguments from which the constants are computed."""
        return f"height={self.height}, width={self.width}, groups={self.groups}"

    def forward(self, images: Tensor) -> Tensor:
        """The features of each image."""
        grouped = self.maps(images).flatten(1).unflatten(1, (self.groups, -1))
        return unit(F.layer_norm(grouped, grouped.shape[2:]).flatten(1))

    def maps(self, images: Tensor) -> Tensor:
        """The coefficients [examples, channels, 81, height // 4, width // 4], not normalised; the order is kymatio's."""
        (above, below), (left, right) = _borders(self.height), _borders(self.width)
        bordered = F.pad(images, (left, right, above, below), mode="reflect")[:, :, None]
        spectrum = torch.fft.fft2(bordered)
        fine = torch.fft.ifft2(spectrum * self.fine).abs()
        found = [self.rows @ torch.cat([bordered, fine], dim=2) @ self.columns.mT, self._coarse(spectrum)]
        # One orientation after the other: all at once would need eight times the memory, and no less time.
        found += [self._coarse(torch.fft.fft2(each)) for each in fine.split(1, dim=2)]
        return torch.cat(found, dim=2)

    def _coarse(self, spectrum: Tensor) -> Tensor:
        """The eight maps of the coarse scale, from the spectrum [examples, channels, 1, ...] of an image or a map."""
        waves = torch.fft.ifft2(_halved(spectrum, self.coarse))
        averaged: Tensor = self.coarse_rows @ waves.abs() @ self.coarse_columns.mT
        return averaged


def padded(side: int) -> int:
    """The length of a side with its borders: a multiple of 4, with at least 2 more pixels at each end."""
    return (side // _COARSER + 2) * _COARSER


def wavelets(height: int, width: int, *, spread: float, frequency: float) -> Tensor:
    """The Fourier transforms [8, height, width] of Morlet wavelets, one for each orientation; they are real.

    A wavelet is a Gaussian times (a wave − a constant), where the constant makes its mean 0. The Gaussian has the
    standard deviation `spread` along the wave, and twice that along its crests.
    """
    slant = 4 / _ORIENTATIONS
    down, across = (torch.arange(-2 * side, 3 * side, dtype=torch.float64) for side in (height, width))
    found = []
    for place in range(_ORIENTATIONS):
        angle = (_ORIENTATIONS // 2 - 1 - place) * math.pi / _ORIENTATIONS
        along = down[:, None] * math.cos(angle) + across * math.sin(angle)
        aside = down[:, None] * -math.sin(angle) + across * math.cos(angle)
        bell = torch.exp(-(along.square() + (slant * aside).square()) / (2 * spread**2))
        bell_spectrum, wave_spectrum = (
            torch.fft.fft2(each.view(5, height, 5, width).sum((0, 2))).real
            for each in (bell, bell * torch.exp(1j * frequency * along))
        )
        spectrum = wave_spectrum - wave_spectrum[0, 0] / bell_spectrum[0, 0] * bell_spectrum
        found.append(spectrum * slant / (2 * _ROUGHLY_PI * spread**2))
    return _rounded(torch.stack(found))


def window(side: int, *, halved: bool = False) -> Tensor:
    """The matrix [side // 4 − 2, side] that averages a bordered line around every fourth pixel, without the borders.

    `halved`: the same for a line of which every second pixel is given, without the frequencies that it cannot hold.
    """
    spread = 1.6
    places = torch.arange(-2 * side, 3 * side, dtype=torch.float64)
    bell = torch.exp(-(places / spread).square() / 2).view(5, side).sum(0) / (math.sqrt(2 * _ROUGHLY_PI) * spread)
    if halved:
        spectrum = torch.fft.fft(bell).real
        bell = torch.fft.ifft(torch.cat([spectrum[: side // 4], spectrum[-(side // 4) :]])).real
    step = _COARSER // 2 if halved else _COARSER
    centres = step * torch.arange(1, side // _COARSER - 1)
    return _rounded(bell[(centres[:, None] - torch.arange(len(bell))) % len(bell)])


def _borders(side: int) -> tuple[int, int]:
    missing = padded(side) - side
    return missing // 2, missing - missing // 2


def _halved(spectrum: Tensor, wavelets: Tensor) -> Tensor:
    """4 times the spectrum of every second pixel, in both directions, of images that are convolved with the wavelets."""
    height, width = (side // 2 for side in wavelets.shape[-2:])
    upper, lower = (spectrum[..., some, :] * wavelets[..., some, :] for some in (slice(height), slice(height, None)))
    rows = upper + lower
    return rows[..., :width] + rows[..., width:]


def _rounded(values: Tensor) -> Tensor:
    """Round to numbers that float32 holds exactly, so the result does not depend on the machine's functions.

    A zero has no sign: adding 0 turns −0 into 0.
    """
    return (torch.round(values * _PRECISION) / _PRECISION + 0.0).float()
