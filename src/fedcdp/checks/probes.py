"""Measurements on a black box: the noise of each tensor, and how far one record moves it.

Noise is the deviation over calls on the same records. Movement is the distance between the mean outputs with a record and
without it (or with another in its place), for the record as it is and for larger and larger ones. A loop that clips moves
no further when a record is ten times as large.

Every returned number is measured. Means and variances are updated call by call, so the memory does not grow with the calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.checks.black_box import BlackBox
from fedcdp.checks.findings import TensorProbe
from fedcdp.checks.worlds import Batch
from fedcdp.files.tree import Tree

SCALES = (1.0, 10.0, 100.0, 1e3, 1e4)
"""Factors on the inputs of the probed record, or on the network's weights."""
NO_NOISE = 1e-6  # relative to the values: what rounding can do
_GROWTH = 3.0  # a tensor that moves so many times further for a tenfold record is not clipped; linear growth is 10
_SURE = 5.0  # standard errors


class Moments:
    """Means and variances of every returned number over calls, by Welford's update."""

    def __init__(self) -> None:
        self.calls = 0
        self.mean: Tree = {}
        self._squares: Tree = {}

    def add(self, seen: Tree) -> None:
        """Count one more call."""
        self.calls += 1
        if self.calls == 1:
            self.mean = {name: value.clone() for name, value in seen.items()}
            self._squares = {name: torch.zeros_like(value) for name, value in seen.items()}
            return
        for name, value in seen.items():
            before = value - self.mean[name]
            self.mean[name].add_(before, alpha=1 / self.calls)
            self._squares[name].addcmul_(before, before, value=1 - 1 / self.calls)

    def variance(self, name: str) -> Tensor:
        """The variance of every number of a tensor."""
        return self._squares[name] / (self.calls - 1)

    def deviation(self, name: str) -> Tensor:
        """The standard deviation of every number of a tensor; what rounding explains counts as none."""
        found = self.variance(name).sqrt_()
        return torch.where(found <= NO_NOISE * self.mean[name].abs(), 0.0, found)

    def is_finite(self) -> bool:
        """Whether every number of every call was finite."""
        return all(bool(tree[name].isfinite().all()) for tree in (self.mean, self._squares) for name in tree)


def repeat(box: BlackBox, batch: Batch, times: int, done: Callable[[], None]) -> Moments:
    """The moments of calls on one batch."""
    found = Moments()
    for _ in range(times):
        found.add(box.call(*batch))
        done()
    return found


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
    gradient: float | None = None
    """The length of the record's own gradient: how far a loop that does not clip would move. None: unknown."""

    def length(self, name: str) -> float:
        """The distance by which a tensor moves; 0 where the noise hides it."""
        return math.sqrt(max(0.0, self.squared[name])) if self.is_seen(name) else self.along[name]

    def is_seen(self, name: str) -> bool:
        """Whether the movement of a tensor stands out from the noise."""
        return self.squared[name] > _SURE * self.error[name]


def measure_movement(present: Moments, absent: Moments, gradient: Tree | None) -> Movement | None:
    """How far the means of two sets of calls are apart; None if a value is not finite."""
    if not present.is_finite() or not absent.is_finite():
        return None
    expected = {} if gradient is None else gradient
    norm = math.sqrt(sum(_sum(value.square()) for value in expected.values()))
    squared, error, along = {}, {}, {}
    dot = spread = largest = 0.0
    for name, mean in present.mean.items():
        moved = mean - absent.mean[name]
        noise = present.variance(name).div_(present.calls).add_(absent.variance(name).div_(absent.calls))
        rounded = NO_NOISE**2 * (_sum(mean.square()) + _sum(present.variance(name)))
        squared[name] = _sum(moved.square()) - _sum(noise)
        error[name] = math.sqrt(2 * _sum(noise.square()) + 4 * _sum(moved.square().mul_(noise))) + rounded
        largest = max(largest, float(mean.abs().max())) if mean.numel() else largest
        direction = expected.get(name)
        if direction is None:
            along[name] = 0.0
            continue
        own, own_spread = _sum(moved.mul_(direction)), _sum(noise.mul_(direction).mul_(direction))
        distance, deviation = _over(abs(own), _norm(direction)), _over(math.sqrt(own_spread), _norm(direction))
        along[name] = math.sqrt(max(0.0, distance**2 - deviation**2)) if distance > 3 * deviation else 0.0
        dot, spread = dot + own, spread + own_spread
    total = math.sqrt(max(0.0, sum(squared.values())))
    if gradient is None:
        return Movement(squared, error, along, total)
    strength = abs(dot) / norm / (math.sqrt(spread) / norm or NO_NOISE * largest or 1.0)
    return Movement(squared, error, along, strength, norm)


@dataclass(frozen=True)
class MeasuredNoise:
    """The noise of one tensor over calls on the same records."""

    squares: float
    """The sum of the variances."""
    noised: int
    """Numbers with noise."""
    still: Tensor
    """Which numbers have none."""

    @property
    def deviation(self) -> float:
        """The root mean square of the deviations."""
        return math.sqrt(self.squares / len(self.still)) if len(self.still) else 0.0


def noise_of(seen: Moments) -> dict[str, MeasuredNoise]:
    """The noise of each tensor."""
    found = {}
    for name in seen.mean:
        deviation = seen.deviation(name)
        found[name] = MeasuredNoise(_sum(deviation.square()), int((deviation > 0).sum()), deviation == 0)
    return found


def differing(present: Moments, absent: Moments) -> Tree:
    """Which numbers have other means in two sets of calls, by more than rounding explains."""
    found = {}
    for name, mean in present.mean.items():
        other = absent.mean[name]
        found[name] = (mean - other).abs() > NO_NOISE * torch.maximum(mean.abs(), other.abs())
    return found


def describe_tensors(
    box: BlackBox, noise: dict[str, MeasuredNoise], movements: dict[float, Movement], silent: dict[str, int]
) -> list[TensorProbe]:
    """One line for each tensor. `silent` are the numbers without noise that are not the same in all probes."""
    tested = _can_be_larger(movements)
    return [
        TensorProbe(
            name=name,
            shape=shape,
            noise=noise[name].deviation,
            silent=silent[name],
            moved={scale: movement.length(name) for scale, movement in movements.items()},
            bounded=_is_bounded(name, movements) if tested else None,
        )
        for name, shape in box.shapes.items()
    ]


def _can_be_larger(movements: dict[float, Movement]) -> bool:
    """Whether a loop that does not clip would move further for the largest record than for one ten times smaller."""
    if len(movements) < 2:
        return False
    before, last = (movements[scale].gradient for scale in sorted(movements)[-2:])
    return before is None or last is None or last >= _GROWTH * before


def _is_bounded(name: str, movements: dict[float, Movement]) -> bool:
    """Whether the largest record moves a tensor about as far as one ten times smaller."""
    before, last = (movements[scale] for scale in sorted(movements)[-2:])
    if not last.is_seen(name):
        return True
    reference = max(before.squared[name], 0.0) + _SURE * before.error[name]
    return last.squared[name] <= _GROWTH**2 * reference


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def _norm(values: Tensor) -> float:
    return math.sqrt(_sum(values.square()))


def _over(value: float, by: float) -> float:
    return value / by if by else 0.0
