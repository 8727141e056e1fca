"""Attacks on secure sums in whole numbers prove no more than the ε of a Gaussian of z = σ/√M, and sabotage shows.

The adversary reads the sum of the honest clients of each of two rounds; a linear discriminant, fitted on half of the trials,
finds noise that is too small, uneven, or used twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedcdp.accounting.mechanisms import Gaussian, repeated
from fedcdp.accounting.pld import epsilon
from fedcdp.audit.canary import Laboratory
from fedcdp.audit.intervals import gaussian_epsilon, mean_shift
from fedcdp.audit.lower_bound import audit
from fedcdp.config.plan import Plan
from fedcdp.files.tree import Tree
from fedcdp.methods import METHODS, Moment, base
from tests.support.sabotage import Fault, Tampered, sabotaged, with_noise

LAYERS, TRIALS = 3, 6000


def plan_of(**changes: Any) -> Plan:
    usual = {"noise": "sum", "secure_aggregation": True, "local_steps": 1, "batch_size": 3, "per_round": 4, "rounds": 2}
    return Plan(**usual | {"record_sampling": "partition", "noise_multiplier": 4.0, "clip": 0.5} | changes)


def printed(plan: Plan, rounds: int, halved: bool = False) -> float:
    """ε of the server that reads sums; a record under Fed-SDP may turn a client's update around (`halved`)."""
    groups = LAYERS if plan.clip_mode == "layer" else 1
    return epsilon(repeated(Gaussian(plan.noise_multiplier / math.sqrt(groups) / (2 if halved else 1)), rounds), plan.delta)


def proved(plan: Plan, rounds: int = 1, fault: Fault | None = None, **known: Any) -> float:
    """ε of a Gaussian release, by the best linear statistic of all rounds (99.9 % lower limit)."""
    method = METHODS[plan.method] if fault is None else sabotaged(METHODS[plan.method], fault)
    unit = known.pop("unit", "record")
    asked = {"records": 6, "adversary": "server", "layers": LAYERS, "participations": rounds} | known
    laboratory = Laboratory(plan=plan, method=method, unit=unit, **asked)

    def observed(world: bool) -> NDArray[np.float64]:
        chosen = plan.but(seed=100 + world)
        seen = [laboratory._release(chosen, torch.arange(TRIALS), t, world)[0].double() for t in range(rounds)]
        return torch.cat(seen, dim=1).numpy()

    absent, present = observed(False), observed(True)
    fit, test = slice(TRIALS // 2), slice(TRIALS // 2, None)
    covariance = (np.cov(absent[fit].T) + np.cov(present[fit].T)) / 2
    ridge = 1e-9 * covariance.trace() / len(covariance) * np.eye(len(covariance))
    direction = np.linalg.solve(covariance + ridge, present[fit].mean(0) - absent[fit].mean(0))
    return gaussian_epsilon(mean_shift(absent[test] @ direction, present[test] @ direction), plan.delta)


SOUND: dict[str, tuple[Plan, int, dict[str, Any]]] = {
    "fed-cdp": (plan_of(), 1, {}),
    "fed-cdp, two rounds": (plan_of(), 2, {}),
    "fed-cdp, two of four collude": (plan_of(colluders=2), 1, {}),
    "fed-cdp, flat": (plan_of(clip_mode="flat", noise_multiplier=2.5), 1, {}),
    "fed-cdp, a small client": (plan_of(), 1, {"records": 1, "others": 6}),
    "fed-cdp-decay": (plan_of(method="fed-cdp-decay", clip="linear(6, 2)"), 2, {}),
    "fed-sdp, a client": (plan_of(method="fed-sdp", noise_at="client", local_steps=2), 1, {"unit": "client"}),
    "fed-sdp, a record": (plan_of(method="fed-sdp", noise_at="client", noise_multiplier=8.0), 1, {"unit": "record"}),
}


@pytest.mark.parametrize("name", SOUND)
def test_attacks_on_the_sum_stay_below_the_gaussian_row(name: str) -> None:
    plan, rounds, known = SOUND[name]
    stated = printed(plan, rounds, halved=name == "fed-sdp, a record")
    assert 0.6 * stated < proved(plan, rounds, **known) <= stated


def test_a_share_alone_is_that_much_weaker() -> None:
    """`update` reads one share before its mask: z = σ/√((n − t)·M)."""
    plan = plan_of()
    alone = proved(plan, adversary="update")
    z = plan.noise_multiplier / math.sqrt(LAYERS * plan.honest)
    assert 0.6 * epsilon(Gaussian(z), plan.delta) < alone <= epsilon(Gaussian(z), plan.delta)
    assert alone > printed(plan, 1)


@pytest.mark.slow
def test_the_audit_reads_the_sum_under_secure_aggregation() -> None:
    for plan in (plan_of(), plan_of(noise="example", noise_multiplier=1.5)):
        apart = plan.but(noise="example", secure_aggregation=False)
        found = audit(plan, "server", layers=LAYERS, records=6, trials=4000)
        single = audit(apart, "server", layers=LAYERS, records=6, trials=4000)
        assert found.epsilon_gaussian is not None
        if plan.noise == "sum":
            assert found.epsilon_lower <= printed(plan, 1)
            assert found.epsilon_gaussian <= printed(plan, 1)
        else:  # four clients' noise for one record
            assert single.epsilon_gaussian is not None
            assert found.epsilon_gaussian < 0.7 * single.epsilon_gaussian


# Sabotage -------------------------------------------------------------------------------------------------------------


def halved(noise: Tree) -> Tree:
    """Divided by √K once more, K = 4."""
    return {name: value // 2 for name, value in noise.items()}


def left_out_by_the_second(noise: Tree) -> Tree:
    """One client of two adds nothing."""
    return {name: torch.where((torch.arange(len(value)) % 2 == 0).view(-1, *(1,) * (value.dim() - 1)), value, 0)
            for name, value in noise.items()}  # fmt: skip


def of_the_first_round(at: Moment) -> Moment:
    """The noise of round 0 in every round."""

    class Reused(Tampered):
        def __init__(self, noise: Any) -> None:
            super().__init__(noise, lambda tree: tree)

        def for_sum(self, round_: int, *others: Any) -> Tree:  # noqa: ARG002
            drawn: Tree = self._noise.for_sum(0, *others)
            return drawn

    return replace(at, noise=Reused(at.noise))  # type: ignore[arg-type]


KEPT = plan_of(method="fed-cdp-decay", clip="linear(6, 2)", noise_follows_clip=False)
BROKEN: dict[str, tuple[Plan, int, Fault]] = {
    "noise divided by √K twice": (plan_of(), 1, with_noise(halved)),
    "noise left out by one client of two": (plan_of(per_round=2), 1, with_noise(left_out_by_the_second)),
    "noise reused between rounds": (KEPT, 2, of_the_first_round),
    "noise divided by √K twice, fed-sdp": (plan_of(method="fed-sdp", noise_at="client"), 1, with_noise(halved)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_sabotage_of_the_noise_shows(name: str) -> None:
    plan, rounds, fault = BROKEN[name]
    unit = "client" if plan.method == "fed-sdp" else "record"
    stated = epsilon(repeated(Gaussian(plan.noise_multiplier / math.sqrt(LAYERS)), rounds), plan.delta)
    assert proved(plan, rounds, fault, unit=unit) > stated


def test_fresh_noise_of_constant_scale_is_sound() -> None:
    """The plan of the reused noise, without the fault: its second round has three times the σ."""
    first, second = (KEPT.noise_scale_at(t) / KEPT.clip_at(t) / math.sqrt(LAYERS) for t in range(2))
    together = 1 / math.sqrt(1 / first**2 + 1 / second**2)
    assert proved(KEPT, 2) <= epsilon(Gaussian(together), KEPT.delta)


def coarse(real: Callable[[Tree, float], Tree]) -> Callable[[Tree, float], Tree]:
    """Values rounded to whole clip bounds, 2^24 grid steps."""

    def rounded(values: Tree, bound: float) -> Tree:
        return {name: (value / 2**24).round().long() * 2**24 for name, value in real(values, bound).items()}

    return rounded


def test_a_coarse_grid_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary's larger coordinates are rounded up to the bound: the sum moves by √2 times the sensitivity."""
    plan = plan_of()
    monkeypatch.setattr(base, "to_integers", coarse(base.to_integers))
    assert proved(plan) > printed(plan, 1)
