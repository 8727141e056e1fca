"""Measurements on a black box: the noise of each tensor, and how far one record moves it.

Noise is the deviation over calls on the same records. Movement is the distance between the mean outputs with a record and
without it (or with another in its place), for the record as it is and for larger and larger ones. A loop that clips moves
no further when a record is ten times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.checks.black_box import BlackBox
from fedcdp.checks.findings import TensorProbe

SCALES = (1.0, 10.0, 100.0, 1e3, 1e4)
"""Factors on the inputs of the probed record."""
NO_NOISE = 1e-6  # relative to the values: what rounding can do
_GROWTH = 3.0  # a tensor that moves so many times further for a tenfold record is not clipped; linear growth is 10
_SURE = 5.0  # standard errors


@dataclass(frozen=True)
class Worlds:
    """Two batches that differ in one record."""

    present: tuple[Tensor, Tensor]
    absent: tuple[Tensor, Tensor]


def worlds(inputs: Tensor, labels: Tensor, record: tuple[Tensor, Tensor], relation: str) -> Worlds:
    """A batch in which `record` takes the first place, and one without it, or with the record that was there."""
    first = (torch.cat([record[0][None], inputs[1:]]), torch.cat([record[1][None], labels[1:]]))
    rest = (inputs[1:], labels[1:]) if relation == "remove" else (inputs, labels)
    return Worlds(first, rest)


@dataclass(frozen=True)
class Movement:
    """The mean difference that a record makes, tensor by tensor, and how sure that is."""

    squared: dict[str, float]
    """The squared length of the difference, without the noise's share."""
    error: dict[str, float]
    """The standard error of the squared length."""
    along: dict[str, float]
    """The length along the record's own gradient, without the noise's share: less noise hides it. Zero if unknown."""
    strength: float
    """The difference along the gradient over all tensors, in standard errors; without a gradient, its length."""

    def length(self, name: str) -> float:
        """The distance by which a tensor moves; 0 where the noise hides it."""
        return math.sqrt(max(0.0, self.squared[name])) if self.is_seen(name) else self.along[name]

    def is_seen(self, name: str) -> bool:
        """Whether the movement of a tensor stands out from the noise."""
        return self.squared[name] > _SURE * self.error[name]


def repeat(box: BlackBox, batch: tuple[Tensor, Tensor], times: int, done: Callable[[], None]) -> Tensor:
    """Outputs [times, values] of calls on one batch."""
    seen = []
    for _ in range(times):
        seen.append(box.call(*batch))
        done()
    return torch.stack(seen)


def measure_movement(box: BlackBox, present: Tensor, absent: Tensor, gradient: Tensor | None) -> Movement | None:
    """How far the means of two sets of outputs are apart; None if a value is not finite."""
    if not bool(present.isfinite().all()) or not bool(absent.isfinite().all()):
        return None
    difference = present.mean(0) - absent.mean(0)
    variance = present.var(0, correction=1) / len(present) + absent.var(0, correction=1) / len(absent)
    rounding = (NO_NOISE * present.abs().amax(0)) ** 2
    squared, error, along = {}, {}, {}
    parts = [box.split(each) for each in (difference, variance, rounding, difference * 0 if gradient is None else gradient)]
    for name in box.shapes:
        moved, noise, rounded, expected = (each[name] for each in parts)
        squared[name] = float(moved.square().sum() - noise.sum())
        spread = 2 * float(noise.square().sum()) + 4 * float((noise * moved.square()).sum())
        error[name] = math.sqrt(spread) + float(rounded.sum())
        distance, deviation = _along(moved, noise, expected)
        along[name] = math.sqrt(max(0.0, distance**2 - deviation**2)) if distance > 3 * deviation else 0.0
    distance, deviation = _along(difference, variance, difference * 0 if gradient is None else gradient)
    total = math.sqrt(max(0.0, sum(squared.values())))
    strength = total if gradient is None else distance / (deviation or NO_NOISE * float(present.abs().max()) or 1.0)
    return Movement(squared, error, along, strength)


def _along(moved: Tensor, variance: Tensor, expected: Tensor) -> tuple[float, float]:
    """A difference along an expected direction, and its standard error."""
    length = float(expected.norm())
    if not length:
        return 0.0, 0.0
    direction = expected / length
    return abs(float(torch.dot(moved, direction))), math.sqrt(float((variance * direction.square()).sum()))


def noise_of(box: BlackBox, seen: Tensor) -> dict[str, Tensor]:
    """The deviation of every entry over calls on the same records; what rounding explains counts as none."""
    found = {}
    for name, values in box.split(seen).items():
        deviation = values.std(0, correction=1)
        found[name] = torch.where(deviation <= NO_NOISE * values.abs().amax(0), 0.0, deviation)
    return found


def describe_tensors(
    box: BlackBox,
    noise: dict[str, Tensor],
    movements: dict[float, Movement],
    differs: dict[str, Tensor],
) -> list[TensorProbe]:
    """One line for each tensor. `differs` marks the entries that are not the same in all probes."""
    probes = []
    for name, shape in box.shapes.items():
        silent = int(((noise[name] == 0) & differs[name]).sum())
        deviation = float(noise[name].square().mean().sqrt()) if noise[name].numel() else 0.0
        moved = {scale: movement.length(name) for scale, movement in movements.items()}
        probes.append(TensorProbe(name, shape, deviation, silent, moved, _is_bounded(name, movements)))
    return probes


def _is_bounded(name: str, movements: dict[float, Movement]) -> bool | None:
    """Whether the largest record moves a tensor about as far as one ten times smaller."""
    scales: Sequence[float] = sorted(movements)
    if len(scales) < 2:
        return None
    last, before = movements[scales[-1]], movements[scales[-2]]
    if not last.is_seen(name):
        return True
    reference = max(before.squared[name], 0.0) + _SURE * before.error[name]
    return last.squared[name] <= _GROWTH**2 * reference
