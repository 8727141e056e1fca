"""The matched filter: is this example in there? The strongest test that there is against Gaussian noise.

Whoever knows the weights and a candidate x knows what would be seen with and without it. If R releases carry independent
Gaussian noise of deviation τ, the likelihood ratio of the two worlds is ⟨mean of the releases − midpoint, difference⟩·R/τ²
(Neyman and Pearson): no other test, hence no reconstruction, tells more. With a distance d between the worlds, its AUC is
Φ(d·√R / (√2·τ)); for one example's gradient g under Fed-CDP, d = |g| ≤ C·√M and τ = σC.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedcdp.attacks.capture import Look, capture
from fedcdp.attacks.captured import Captured, Leak
from fedcdp.attacks.forward import predicted
from fedcdp.attacks.membership import Estimate, area_under_curve
from fedcdp.attacks.reconstruct import Progress
from fedcdp.data.dataset import Dataset
from fedcdp.errors import PlanError
from fedcdp.randomness import numpy_generator
from fedcdp.rundir import State
from fedcdp.simulation import Simulator

_CANDIDATES_AT_ONCE = 100


@dataclass(frozen=True)
class Presence:
    """How well a reader tells that a victim's example is there, and which of many it is."""

    method: str
    leak: str
    attack: str
    victims: int
    success_rate: float | None
    """The share of victims whose example was picked out of `candidates`; None for updates."""
    candidates: int | None
    auc: Estimate
    """The chance that a victim's score exceeds that of a victim whose example was zeroed out."""
    auc_predicted: float | None
    """The same by the formula, from the distances between the worlds; None where there is no noise."""
    distance_between_worlds: float
    """Mean norm of what one example changes, in units of a gradient."""
    noise_deviation: float
    releases: int
    steps: int
    round: int
    seconds: float

    def summary(self) -> dict[str, Any]:
        """All figures."""
        row = asdict(self) | {"distance_mean": None, "distance_median": None, "psnr_mean": None, "iterations_mean": None}
        return row | {"auc": self.auc.value, "auc_interval_99": [self.auc.low, self.auc.high]}


def matched_filter(
    simulator: Simulator,
    state: State,
    leak: Leak,
    victims: int | None,
    *,
    step: int = 0,
    releases: int = 1,
    public: Dataset,
    candidates: int = 1000,
    progress: Progress | None = None,
) -> Presence:
    """Test so many victims for their own first example, which is there or zeroed out; both by the method's own code."""
    if victims is not None and victims < 2:
        raise PlanError(f"victims: {victims} is not allowed; the matched filter compares at least 2")
    if releases < 1:
        raise PlanError(f"releases: {releases} is not allowed; it must be at least 1")
    started = time.perf_counter()
    layout = simulator.engine.layout

    def look(without: bool, release: int = 0, silent: bool = False) -> tuple[Captured, Tensor]:
        seen = capture(simulator, state, Look(leak, step, 1, release, without, silent), victims)
        return seen, layout.flatten(seen.seen, lead=1).double()

    (there, expected_with), (_, expected_without) = (look(without, silent=True) for without in (False, True))
    difference, middle = expected_with - expected_without, (expected_with + expected_without) / 2
    means, captured = [], there
    for without in (False, True):
        total = torch.zeros_like(middle)
        for number in range(without * releases, (without + 1) * releases):  # no noise is used twice
            captured, seen = look(without, number)
            total += seen
            if progress is not None:
                progress(number + 1, 2 * releases)
        means.append(total / releases)
    deviation = captured.deviation / math.sqrt(releases)
    scores = [((mean - middle) * difference).sum(1) for mean in means]
    distance = difference.norm(dim=1)
    identified, among = None, None
    if leak == "type2" and there.weights_shared:
        identified, among = _identify(there, means[0], public, candidates)
    return Presence(
        simulator.plan.method,
        leak,
        "matched-filter",
        len(there),
        identified,
        among,
        area_under_curve(*(score.cpu().numpy() for score in scores)),
        _predicted(distance, deviation) if deviation else None,
        float(distance.mean()),
        deviation,
        releases,
        simulator.plan.local_steps,
        state.round,
        round(time.perf_counter() - started, 2),
    )


def _predicted(distance: Tensor, deviation: float) -> float:
    """The AUC that is to be expected: the scores of a victim that is there and of another that is not differ by
    (d² + d'²)/2 on average, with a variance of (d² + d'²)·τ²."""
    squares = distance.square()
    return float(torch.special.ndtr((squares[:, None] + squares).sqrt() / (2 * deviation)).mean())


def _identify(there: Captured, seen: Tensor, public: Dataset, candidates: int) -> tuple[float, int]:
    """How often the victim's own example is the most likely one, and among how many: itself and public ones that differ."""
    order = numpy_generator(there.plan.seed, "candidates").permutation(len(public))[: candidates - 1]
    pool = public.take(torch.from_numpy(order))
    scores = [_likelihood(there, seen, pool.inputs[who], pool.targets[who]) for who in _chunks(len(pool))]
    truth, others = there.inputs[:, 0].cpu().flatten(1), pool.inputs.flatten(1)
    same = torch.stack([(others == each).all(1) for each in truth]).to(seen.device)
    best = torch.cat(scores, dim=1).masked_fill(same, -torch.inf).amax(1)
    own = torch.cat([
        _likelihood(there, seen, there.inputs[who, 0], there.targets[who, 0])[who].diagonal() for who in _chunks(len(seen))
    ])  # fmt: skip
    return float((own > best).double().mean()), 1 + len(pool)


def _likelihood(there: Captured, seen: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """[victims, candidates]: ⟨what was seen, what the candidate would show⟩ − |the latter|² / 2."""
    first = there.take(torch.zeros(len(inputs), dtype=torch.int64, device=there.device))
    inputs, targets = inputs.to(there.device)[:, None], targets.to(there.device)[:, None]
    with torch.no_grad():
        shown = predicted(first, "method", inputs, targets, first.present)
    flat = there.engine.layout.flatten(shown, lead=1).double()
    return seen @ flat.T - flat.square().sum(1) / 2


def _chunks(length: int) -> list[Tensor]:
    return list(torch.arange(length).split(_CANDIDATES_AT_ONCE))
