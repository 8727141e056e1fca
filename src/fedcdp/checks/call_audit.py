"""Calls with and without a record: how well an adversary tells them apart, and the ε that this proves.

The trials have three parts that share no call, as in `fedcdp.audit`: one to fit statistics, one to choose among them, and
the held-out rest, from which the bounds are computed. The statistics are projections on the record's own gradient and on the
fitted difference of the means, over all tensors and for each alone, which finds a tensor with too little noise; Fisher's
linear discriminant, which finds noise that can be subtracted; and the energy of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcdp.attacks.membership import Estimate, area_under_curve
from fedcdp.audit.intervals import (
    Numbers,
    choose_attack,
    epsilon_of_errors,
    gaussian_epsilon,
    mean_shift,
)
from fedcdp.checks.black_box import BlackBox
from fedcdp.checks.findings import CallAudit
from fedcdp.checks.probes import NO_NOISE, Worlds

FEWEST_TRIALS = 100
_LEARNING = 0.1  # share of the trials to fit statistics; an equal share chooses among them
_FEWEST_FITTED, _MOST_FITTED = 20, 200
_MOST_KEPT = 2e7  # numbers of the outputs that are kept to fit statistics
_KURTOSIS = 0.5  # excess of the fourth moment up to which noise counts as Gaussian; Laplace noise has 3, uniform −1.2


@dataclass(frozen=True)
class Trials:
    """Held-out scores of two statistics in both worlds: the one with the best test, and the one with the widest shift."""

    test: tuple[Numbers, Numbers]
    threshold: float
    shift: tuple[Numbers, Numbers]
    names: tuple[str, str]
    gaussian: bool
    """Whether the noise looks Gaussian."""

    def audit(self, relation: str, delta: float, trials: int) -> CallAudit:
        """The lower bounds that the scores prove."""
        absent, present = self.test
        errors = (absent > self.threshold).sum(), (present <= self.threshold).sum()
        lower = float(epsilon_of_errors(*errors, len(absent), delta))
        gaussian = gaussian_epsilon(mean_shift(*self.shift), delta) if self.gaussian else None
        name = self.names[0] if gaussian is None or lower > gaussian else self.names[1]
        return CallAudit(relation, trials, delta, lower, gaussian, name)

    def auc(self) -> Estimate:
        """The area under the ROC curve of the widest statistic."""
        absent, present = self.shift
        return area_under_curve(present, absent)


def run_trials(
    box: BlackBox,
    sides: Worlds,
    gradient: Tensor | None,
    public: set[str],
    trials: int,
    delta: float,
    done: Callable[[], None],
) -> Trials:
    """Call the function `trials` times in each world. `gradient` is the record's own, `public` names tensors to ignore."""
    fitted = int(min(max(_FEWEST_FITTED, _LEARNING * trials), _MOST_FITTED))
    fitted = max(_FEWEST_FITTED, min(fitted, int(_MOST_KEPT / sum(math.prod(shape) for shape in box.shapes.values()))))
    chosen = max(_FEWEST_FITTED, int(_LEARNING * trials))
    held_out = trials - fitted - chosen

    def collect(count: int, score: Callable[[Tensor], Tensor]) -> tuple[Numbers, Numbers]:
        both = []
        for batch in (sides.absent, sides.present):
            rows = []
            for _ in range(count):
                rows.append(score(box.finite(*batch)))
                done()
            both.append(torch.stack(rows).numpy())
        return both[0], both[1]

    raw = [torch.from_numpy(each) for each in collect(fitted, lambda seen: seen)]
    statistics = _Statistics(box, raw[0], raw[1], gradient, public)
    tried = collect(chosen, statistics.of)
    best, threshold = choose_attack(*tried, held_out, delta)
    linear = range(len(statistics.names) - 1)  # without the energy, which is not Gaussian
    widest = max(linear, key=lambda at: mean_shift(tried[0][:, at], tried[1][:, at]))
    absent, present = collect(held_out, statistics.of)
    shift = absent[:, widest], present[:, widest]
    names = statistics.names[best], statistics.names[widest]
    gaussian = statistics.noise_is_gaussian and _look_gaussian(*shift)
    return Trials((absent[:, best], present[:, best]), threshold, shift, names, gaussian)


class _Statistics:
    """The statistics, fitted on outputs [calls, values] of both worlds."""

    def __init__(self, box: BlackBox, absent: Tensor, present: Tensor, gradient: Tensor | None, public: set[str]) -> None:
        self.box, self.middle = box, absent.mean(0)
        residuals = torch.cat([absent - absent.mean(0), present - present.mean(0)])
        size = absent.abs().amax(0)
        deviation = residuals.std(0)
        self.deviation = torch.where(deviation <= NO_NOISE * size, 0.0, deviation)
        self.keep = torch.cat([
            torch.full((math.prod(shape),), float(name not in public), dtype=torch.float64)
            for name, shape in box.shapes.items()
        ])  # fmt: skip
        parts = box.split(self.deviation)
        self.weights = {
            name: 0.0 if name in public or not bool(part.any()) else 1 / float(part.square().mean())
            for name, part in parts.items()
        }
        difference = (present.mean(0) - absent.mean(0)) * self.keep
        bases = {"difference of the means": difference}
        if gradient is not None and bool(gradient.isfinite().all()):
            bases["the record's gradient"] = gradient * self.keep
        self.bases = bases
        self.discriminant = _discriminant(residuals * self.keep, difference)
        alone = [f"{name}, {base}" for base in bases for name in box.shapes]
        self.names = [*(f"all tensors, {base}" for base in bases), *alone, "linear discriminant", "energy of the noise"]
        self.signs = torch.ones(len(self.names), dtype=torch.float64)
        scores = [torch.stack([self.of(row) for row in world]) for world in (absent, present)]
        self.signs = torch.where(scores[1].mean(0) < scores[0].mean(0), -1.0, 1.0).double()
        self.noise_is_gaussian = self._noise_is_gaussian(residuals)

    def of(self, seen: Tensor) -> Tensor:
        """The scores of one output."""
        moved = seen - self.middle
        parts = self.box.split(moved)
        together, alone = [], []
        for base in self.bases.values():
            dots = {name: torch.dot(each, parts[name]) for name, each in self.box.split(base).items()}
            together.append(
                sum((self.weights[name] * dot for name, dot in dots.items()), torch.zeros((), dtype=torch.float64))
            )
            alone += list(dots.values())
        noised = self.deviation > 0
        energy = (moved[noised] / self.deviation[noised]).square().sum() if bool(noised.any()) else moved.square().sum() * 0
        return torch.stack([*together, *alone, torch.dot(self.discriminant, moved), energy]) * self.signs

    def _noise_is_gaussian(self, residuals: Tensor) -> bool:
        """Whether the fourth moments of the noised entries, tensor by tensor, are those of Gaussian noise."""
        for rows, deviation in zip(self.box.split(residuals).values(), self.box.split(self.deviation).values(), strict=True):
            noised = rows[:, deviation > 0]
            if not noised.numel():
                continue
            scaled = noised / noised.std(0)
            excess = float(scaled.pow(4).mean()) - 3
            if abs(excess) > _KURTOSIS + 5 * math.sqrt(24 / noised.numel()):
                return False
        return True


def _discriminant(residuals: Tensor, difference: Tensor) -> Tensor:
    """(Σ + λ)⁻¹ d for the sample covariance Σ, by Woodbury's identity: there are fewer calls than entries."""
    count = len(residuals)
    trace = float(residuals.square().sum()) / count
    ridge = 1e-9 * trace / max(1, residuals.shape[1]) or 1.0
    gram = residuals @ residuals.T / count
    inner = torch.linalg.solve(gram + ridge * torch.eye(count, dtype=torch.float64), residuals @ difference / count)
    solved = (difference - residuals.T @ inner) / ridge
    length = float(solved.norm())
    return solved / length if length and math.isfinite(length) else difference


def _look_gaussian(absent: Numbers, present: Numbers) -> bool:
    """Whether scores in the two worlds have the fourth moment of a Gaussian, and the same deviation."""
    spreads = [float(each.std()) for each in (absent, present)]
    distance = abs(float(present.mean() - absent.mean()))
    if max(spreads) <= NO_NOISE * distance:
        return True  # no noise at all: the limit of less and less of it
    if min(spreads) == 0 or abs(math.log(spreads[0] / spreads[1])) > 5 / math.sqrt(len(absent)):
        return False
    moments = [
        float(((each - each.mean()) / each.std()) ** 4 @ np.ones(len(each)) / len(each)) - 3 for each in (absent, present)
    ]
    return all(abs(each) <= _KURTOSIS + 5 * math.sqrt(24 / len(absent)) for each in moments)
