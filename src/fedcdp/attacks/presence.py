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

from fedcdp.attacks.capture import Captured, Leak, Look, capture
from fedcdp.attacks.forward import predicted
from fedcdp.attacks.membership import Estimate, area_under_curve
from fedcdp.data.dataset import Dataset
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
    victims: int,
    *,
    step: int = 0,
    releases: int = 1,
    public: Dataset,
    candidates: int = 1000,
) -> Presence:
    """Test so many victims for their own first example, which is there or zeroed out; both by the method's own code."""
    started = time.perf_counter()
    layout = simulator.engine.layout

    def flat(captured: Captured) -> Tensor:
        return layout.flatten(captured.seen, lead=1).double()

    def look(without: bool, silent: bool = False) -> Captured:
        runs, first = (1, 0) if silent else (releases, releases if without else 0)
        return capture(simulator, state, Look(leak, step, runs, first, without, silent), victims)

    expected_with, expected_without = (flat(look(without, silent=True)) for without in (False, True))
    there = look(without=False)
    difference, middle = expected_with - expected_without, (expected_with + expected_without) / 2
    scores = [((flat(each) - middle) * difference).sum(1) for each in (there, look(without=True))]
    distance = difference.norm(dim=1)
    predicted_auc = None
    if there.deviation:
        predicted_auc = float(torch.special.ndtr(distance / (math.sqrt(2) * there.deviation)).mean())
    identified, among = None, None
    if leak == "type2" and there.weights_shared:
        identified, among = _identify(there, flat(there), public, candidates)
    return Presence(
        simulator.plan.method,
        leak,
        "matched-filter",
        victims,
        identified,
        among,
        area_under_curve(*(score.cpu().numpy() for score in scores)),
        predicted_auc,
        float(distance.mean()),
        there.deviation,
        releases,
        simulator.plan.local_steps,
        state.round,
        round(time.perf_counter() - started, 2),
    )


def _identify(there: Captured, seen: Tensor, public: Dataset, candidates: int) -> tuple[float, int]:
    """How often the victim's own example is the most likely one, and among how many: itself and public ones."""
    order = numpy_generator(there.plan.seed, "candidates").permutation(len(public))[: candidates - 1]
    pool = public.take(torch.from_numpy(order))
    scores = [_likelihood(there, seen, pool.inputs[who], pool.targets[who]) for who in _chunks(len(pool))]
    others = torch.cat(scores, dim=1).amax(1)
    own = torch.cat([
        _likelihood(there, seen, there.inputs[who, 0], there.targets[who, 0])[who].diagonal() for who in _chunks(len(seen))
    ])  # fmt: skip
    return float((own > others).double().mean()), 1 + len(pool)


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
