"""Pictures of random processes, drawn from a random generator alone.

A picture is a background with leaves painted over it ("dead leaves"): a leaf is a region with a random outline and a random
texture, and hides what is behind it, as objects do. Backgrounds and textures come from three processes: random convolutional
networks, random functions of the coordinates, and noise with a random spectrum.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 64
MOST_LEAVES = 40


class Draws:
    """Random numbers for many pictures at once, on one device."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform numbers."""
        return low + (high - low) * torch.rand(shape, generator=self._generator, device=self.device)

    def happens(self, probability: float, *shape: int) -> Tensor:
        """True with this probability."""
        return self.uniform(0, 1, *shape) < probability

    def below(self, limit: int, count: int) -> Tensor:
        """Whole numbers below a limit."""
        return torch.randint(limit, (count,), generator=self._generator, device=self.device)

    def order(self, count: int) -> Tensor:
        """A random order of the numbers below `count`."""
        return torch.randperm(count, generator=self._generator, device=self.device)


def pictures(count: int, draws: Draws) -> Tensor:
    """Pictures [count, 3, 64, 64] with values in [0, 1]."""
    grounds, textures = backgrounds(count, draws), backgrounds(count, draws)
    mirrored = draws.happens(0.2, count, 1, 1, 1)
    grounds = torch.where(mirrored, (grounds + grounds.flip(3)) / 2, grounds)
    return with_leaves(_contrasted(grounds, draws), _contrasted(textures, draws), draws)


def backgrounds(count: int, draws: Draws) -> Tensor:
    """Pictures of the three processes and flat ones, in random order, each standardised."""
    parts = [_network(count * 3 // 8, draws), _function(count // 4, draws), _noise(count // 4, draws)]
    missing = count - sum(len(part) for part in parts)
    parts.append(draws.normal(missing, 3, 1, 1) + 0.1 * _noise(missing, draws))
    return torch.cat(parts)[draws.order(count)]


def _network(count: int, draws: Draws) -> Tensor:
    """What a random convolutional network makes of random vectors: all pictures of a call share its weights."""
    channels = (48, 48, 32, 24, 16)
    values = draws.normal(count, channels[0], 4, 4)
    for before, after in itertools.pairwise(channels):
        values = F.interpolate(values, scale_factor=2, mode="bilinear")
        values = F.conv2d(F.pad(values, (1, 1, 1, 1), mode="reflect"), _oriented(after, before, draws))
        values = values + draws.uniform(0, 1, count, 1, 1, 1).square() * draws.normal(*values.shape)
        values = _standardised(values, (2, 3)) * (0.6 * draws.normal(count, after, 1, 1)).exp()
        values = F.leaky_relu(values + 0.7 * draws.normal(count, after, 1, 1), 0.2)
    mixing = draws.normal(count, 3, channels[-1]) + 2 * draws.normal(count, 1, channels[-1])  # colours vary together
    return _standardised(torch.einsum("nkc,nchw->nkhw", mixing, values))


def _oriented(after: int, before: int, draws: Draws) -> Tensor:
    """Convolution kernels [after, before, 3, 3]: each a random mixture of a few directed waves and of free noise."""
    place = torch.arange(-1.0, 2.0, device=draws.device)
    angle, phase = draws.uniform(0, math.pi, after, before), draws.uniform(0, 2 * math.pi, after, before)
    frequency = draws.uniform(0, math.pi, after, before)
    along = angle.cos()[..., None, None] * place[:, None] + angle.sin()[..., None, None] * place
    waves = (frequency[..., None, None] * along + phase[..., None, None]).cos()
    kernels = (waves + 0.5 * draws.normal(after, before, 3, 3)) * draws.normal(after, before, 1, 1)
    return kernels / math.sqrt(9 * before)


def _function(count: int, draws: Draws) -> Tensor:
    """Random smooth functions of the coordinates: small networks of waves, one for each picture."""
    width = 20
    values = _coordinates(draws).flatten(1).T.expand(count, -1, -1)  # [count, pixels, 2]
    turn = draws.normal(count, 2, 2) * (draws.uniform(-1, 1.2, count, 1, 1)).exp()
    values = values @ turn + draws.normal(count, 1, 2)
    values = torch.cat([values, values.square().sum(2, keepdim=True).sqrt()], dim=2)
    for layer in range(4):
        weights = draws.normal(count, values.shape[2], width) / math.sqrt(values.shape[2])
        values = values @ weights * draws.uniform(0.8, 2.2, count, 1, width) + draws.normal(count, 1, width)
        values = torch.cat([values[..., ::2].sin(), values[..., 1::2].tanh()], dim=2)
        if layer == 2:
            values = values * draws.uniform(1, 3, count, 1, 1)
    found = values @ draws.normal(count, width, 3)
    return _standardised(found.transpose(1, 2).reshape(count, 3, SIDE, SIDE))


def _noise(count: int, draws: Draws) -> Tensor:
    """Noise whose power falls with the frequency at a random rate, stretched in a random direction."""
    rows = torch.fft.fftfreq(SIDE, device=draws.device)[:, None]
    columns = torch.fft.rfftfreq(SIDE, device=draws.device)[None]
    angle, stretch = draws.uniform(0, math.pi, count, 1, 1), draws.uniform(-1.2, 1.2, count, 1, 1).exp()
    along, across = angle.cos() * rows + angle.sin() * columns, angle.cos() * columns - angle.sin() * rows
    radius = ((along * stretch).square() + (across / stretch).square()).sqrt() + 1 / SIDE
    spectrum = radius ** -draws.uniform(0.6, 3.0, count, 1, 1)
    found = torch.fft.irfft2(torch.fft.rfft2(draws.normal(count, 3, SIDE, SIDE)) * spectrum[:, None], s=(SIDE, SIDE))
    mixing = draws.normal(count, 3, 3) + 2 * draws.normal(count, 3, 1)
    return _standardised(torch.einsum("nkc,nchw->nkhw", mixing, found))


def with_leaves(grounds: Tensor, textures: Tensor, draws: Draws) -> Tensor:
    """Paint leaves over the grounds, from the back to the front.

    Half of the pictures have at most a few leaves, large ones; the others have many, whose sizes follow the power law of
    natural scenes.
    """
    count, each = len(grounds), (len(grounds), MOST_LEAVES, 1)
    few = draws.happens(0.5, count, 1, 1)
    number = torch.where(few, draws.uniform(0, 6, count, 1, 1), draws.uniform(6, MOST_LEAVES, count, 1, 1))
    smallest = torch.where(few, draws.uniform(0.15, 0.5, count, 1, 1), draws.uniform(0.04, 0.12, count, 1, 1))
    painted = (torch.arange(MOST_LEAVES, device=draws.device)[:, None] < number).float()
    radius = 1 / torch.lerp(1 / smallest, torch.full_like(smallest, 1 / 0.9), draws.uniform(0, 1, *each))
    palette = draws.uniform(0.1, 0.9, count, 1, 1) + 0.12 * draws.normal(count, 1, 3)
    spread = draws.uniform(0.1, 0.45, count, 1, 1)
    shapes = torch.cat([
        draws.uniform(-1.1, 1.1, count, MOST_LEAVES, 2), radius, draws.uniform(-0.8, 0.8, *each),
        draws.uniform(0, 2 * math.pi, count, MOST_LEAVES, 2), draws.uniform(-0.4, 2.2, *each),
        draws.uniform(0, 0.45, *each) * draws.happens(0.5, *each), draws.uniform(2, 8, *each).floor(), painted,
    ], dim=2)  # fmt: skip
    colours = torch.cat([
        palette + spread * _tinted(count, draws), 0.25 * _tinted(count, draws) * draws.happens(0.6, *each),
        0.15 * _tinted(count, draws), 0.15 * _tinted(count, draws),
    ], dim=2)  # fmt: skip
    waves = torch.cat([
        draws.uniform(0, math.pi, *each), draws.uniform(0.5, 3.4, *each).exp(), draws.uniform(0, 2 * math.pi, *each),
        draws.uniform(0, 3, *each) * draws.happens(0.5, *each), draws.uniform(0.3, 1, *each) * draws.happens(0.4, *each),
    ], dim=2)  # fmt: skip
    for leaf in zip(shapes.unbind(1), colours.unbind(1), waves.unbind(1), strict=True):
        grounds = paint(grounds, textures, _coordinates(draws), *leaf)
    return grounds.clamp(0, 1)


def paint(grounds: Tensor, textures: Tensor, places: Tensor, shape: Tensor, colours: Tensor, wave: Tensor) -> Tensor:
    """One more leaf on each ground; all numbers that describe it are in `shape`, `colours` and `wave`."""
    x0, y0, radius, stretch, turn, phase, power, lobes, number, painted = (each[:, None, None] for each in shape.unbind(1))
    across, down = places[0] - x0, places[1] - y0
    u = (turn.cos() * across + turn.sin() * down) / (radius * stretch.exp())
    v = (turn.cos() * down - turn.sin() * across) / (radius / stretch.exp())
    reach = 1 + lobes * (number * torch.atan2(v, u) + phase).cos()
    exponent = power.exp()
    inside = (u.abs() + 1e-6) ** exponent + (v.abs() + 1e-6) ** exponent < reach.abs() ** exponent
    inside = (inside & (painted > 0))[:, None]
    angle, frequency, shift, bend, textured = (each[:, None, None] for each in wave.unbind(1))
    along = angle.cos() * across + angle.sin() * down
    ripple = (frequency * along + bend * (3 * down).sin() + shift).sin()[:, None]
    base, direction, right, below = (each[:, :, None, None] for each in colours.split(3, 1))
    colour = base + direction * ripple + right * u[:, None] + below * v[:, None]
    return torch.where(inside, torch.lerp(colour, textures, textured[:, None]), grounds)


def _tinted(count: int, draws: Draws) -> Tensor:
    """Colours for all leaves that vary more in brightness than in hue, as those of natural scenes do."""
    return draws.normal(count, MOST_LEAVES, 1) + 0.5 * draws.normal(count, MOST_LEAVES, 3)


def _coordinates(draws: Draws) -> Tensor:
    place = torch.linspace(-1, 1, SIDE, device=draws.device)
    return torch.stack([place.expand(SIDE, SIDE), place[:, None].expand(SIDE, SIDE)])


def _standardised(values: Tensor, over: tuple[int, ...] = (1, 2, 3)) -> Tensor:
    centred = values - values.mean(over, keepdim=True)
    return centred / (centred.square().mean(over, keepdim=True) + 1e-6).sqrt()


def _contrasted(values: Tensor, draws: Draws) -> Tensor:
    """Standardised values as a picture of random brightness, tint and contrast."""
    count = len(values)
    tint = draws.uniform(0.25, 0.75, count, 1, 1, 1) + 0.08 * draws.normal(count, 3, 1, 1)
    return (tint + draws.uniform(0.05, 0.3, count, 1, 1, 1) * values).clamp(0, 1)
