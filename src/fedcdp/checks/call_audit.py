"""Calls with and without a record: how well an adversary tells them apart, and the ε that this proves.

The trials have three parts that share no call, as in `fedcdp.audit`: one to fit statistics, one to choose among them, and
the held-out rest, from which the bounds are computed. The statistics are projections on the record's own gradient and on the
fitted difference of the means, over all tensors and for each alone, which finds a tensor with too little noise; the gradient
with every number divided by its own variance, which finds a part of a tensor with too little noise; Fisher's linear
discriminant, which finds noise that can be subtracted; and the energy of the noise.

Projections on the gradient use every returned number. The other statistics keep all numbers of some calls. Where a function
returns more than `MOST_IN_DOUBLE` numbers, they use a random subset of each tensor.
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
from fedcdp.checks.black_box import MOST_IN_DOUBLE, BlackBox
from fedcdp.checks.findings import CallAudit
from fedcdp.checks.probes import NO_NOISE
from fedcdp.checks.worlds import Worlds
from fedcdp.files.tree import Tree

FEWEST_TRIALS = 100
_LEARNING = 0.1  # share of the trials to fit statistics; an equal share chooses among them
_FEWEST_FITTED, _MOST_FITTED = 20, 200
_MOST_KEPT = 2e7  # numbers of the outputs that are kept to fit statistics
_SAMPLED, _FEWEST_SAMPLED = 100_000, 64  # numbers of a large function that are kept of each call, and of each tensor
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


class CallReader:
    """What the audit keeps of a call: numbers of each tensor, and exact projections on the record's gradient."""

    def __init__(self, box: BlackBox, gradient: Tree | None, variance: Tree, public: set[str]) -> None:
        self.places = {name: self._chosen(math.prod(shape), box.values) for name, shape in box.shapes.items()}
        self.sizes = [len(each) if each is not None else math.prod(box.shapes[name]) for name, each in self.places.items()]
        self.kept = sum(self.sizes)
        self.sampled = self.kept < box.values
        self.names = [name for name in box.shapes if gradient is not None and name in gradient and name not in public]
        self.plain = {} if gradient is None else {name: gradient[name] for name in self.names}
        self.whitened = {
            name: torch.where(variance[name] > 0, value / variance[name], 0.0) for name, value in self.plain.items()
        }

    @staticmethod
    def _chosen(entries: int, total: int) -> Tensor | None:
        """Places of the numbers that are kept, drawn at random; None: all."""
        count = max(_FEWEST_SAMPLED, round(_SAMPLED * entries / total))
        return None if total <= MOST_IN_DOUBLE or count >= entries else torch.randint(entries, (count,)).unique()

    def of(self, seen: Tree) -> Tensor:
        """The kept numbers of all tensors, then both projections of each tensor."""
        kept = [seen[name] if places is None else seen[name][places] for name, places in self.places.items()]
        dots = [torch.dot(seen[name], base[name]) for base in (self.plain, self.whitened) for name in self.names]
        return torch.cat([*kept, *(each[None] for each in dots)]).double()

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The kept numbers by tensor."""
        return dict(zip(self.places, vector[..., : self.kept].split(self.sizes, dim=-1), strict=True))

    def projections(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The projections of each tensor: on the gradient, and on the gradient divided by the variances."""
        plain, whitened = vector[..., self.kept :].split([len(self.names)] * 2, dim=-1)
        return plain, whitened


def run_trials(
    box: BlackBox,
    sides: Worlds,
    reader: CallReader,
    public: set[str],
    trials: int,
    delta: float,
    done: Callable[[], None],
) -> Trials:
    """Call the function `trials` times in each world. `public` names tensors to ignore."""
    fitted = int(min(max(_FEWEST_FITTED, _LEARNING * trials), _MOST_FITTED))
    fitted = max(_FEWEST_FITTED, min(fitted, int(_MOST_KEPT / reader.kept)))
    chosen = max(_FEWEST_FITTED, int(_LEARNING * trials))
    held_out = trials - fitted - chosen

    def collect(count: int, score: Callable[[Tensor], Tensor]) -> tuple[Numbers, Numbers]:
        both = []
        for batch in (sides.absent, sides.present):
            rows = []
            for _ in range(count):
                rows.append(score(reader.of(box.finite(*batch))))
                done()
            both.append(torch.stack(rows).numpy())
        return both[0], both[1]

    raw = [torch.from_numpy(each) for each in collect(fitted, lambda seen: seen)]
    statistics = _Statistics(reader, raw[0], raw[1], public)
    raw.clear()
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
    """The statistics, fitted on what a reader kept of calls [calls, values] in both worlds."""

    def __init__(self, reader: CallReader, absent: Tensor, present: Tensor, public: set[str]) -> None:
        self.reader, self.middle = reader, absent.mean(0)
        kept = slice(0, reader.kept)
        residuals = torch.cat([(each - each.mean(0))[:, kept] for each in (absent, present)])
        deviation = residuals.std(0)
        self.deviation = torch.where(deviation <= NO_NOISE * absent[:, kept].abs().amax(0), 0.0, deviation)
        keep = torch.cat([
            torch.full((size,), float(name not in public), dtype=torch.float64)
            for name, size in zip(reader.places, reader.sizes, strict=True)
        ])  # fmt: skip
        parts = reader.split(self.deviation)
        self.weights = {
            name: 0.0 if name in public or not bool(part.any()) else 1 / float(part.square().mean())
            for name, part in parts.items()
        }
        self.difference = (present.mean(0) - absent.mean(0))[kept] * keep
        self.differences = reader.split(self.difference)
        self.own_weights = torch.tensor([self.weights[name] for name in reader.names], dtype=torch.float64)
        self.discriminant = _discriminant(residuals * keep, self.difference)
        own = ("the record's gradient", "the record's gradient by the noise of each number") if reader.names else ()
        bases = ("difference of the means", *own)
        alone = [f"{name}, {bases[0]}" for name in reader.places] + [
            f"{name}, {base}" for base in own for name in reader.names
        ]
        self.names = [*(f"all tensors, {base}" for base in bases), *alone, "linear discriminant", "energy of the noise"]
        self.signs = torch.ones(len(self.names), dtype=torch.float64)
        scores = [torch.stack([self.of(row) for row in world]) for world in (absent, present)]
        self.signs = torch.where(scores[1].mean(0) < scores[0].mean(0), -1.0, 1.0).double()
        self.noise_is_gaussian = self._noise_is_gaussian(residuals)

    def of(self, seen: Tensor) -> Tensor:
        """The scores of what was kept of one call."""
        moved = seen - self.middle
        parts = self.reader.split(moved)
        fitted = torch.stack([torch.dot(each, parts[name]) for name, each in self.differences.items()])
        together = [torch.dot(fitted, torch.tensor([self.weights[name] for name in parts], dtype=torch.float64))]
        alone = [fitted]
        if self.reader.names:
            plain, whitened = self.reader.projections(moved)
            together += [torch.dot(plain, self.own_weights), whitened.sum()]
            alone += [plain, whitened]
        kept, noised = moved[: self.reader.kept], self.deviation > 0
        energy = (kept[noised] / self.deviation[noised]).square().sum() if bool(noised.any()) else kept.sum() * 0
        ends = torch.stack([torch.dot(self.discriminant, kept), energy])
        return torch.cat([torch.stack(together), *alone, ends]) * self.signs

    def _noise_is_gaussian(self, residuals: Tensor) -> bool:
        """Whether the fourth moments of the noised entries, tensor by tensor, are those of Gaussian noise."""
        for rows, deviation in zip(
            self.reader.split(residuals).values(), self.reader.split(self.deviation).values(), strict=True
        ):
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
