"""From a target to a plan: the noise multiplier that reaches an ε, and the number of rounds that an ε allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedcdp.accounting.adversaries import View
from fedcdp.accounting.mechanisms import Gaussian
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Mode, epsilon_after, format_epsilon
from fedcdp.accounting.views import views
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError

_PRECISION = 1e-3  # relative, of the noise multiplier; errs on the safe side
_WEAKEST, _STRONGEST = 1e-2, 1e5
_SLOTS_TRIED = (1.5, 2.0, 3.0, 4.0, 6.0)  # in batches


@dataclass(frozen=True)
class Target:
    """An ε that must not be exceeded, with its adversary, unit and relation."""

    epsilon: float
    adversary: str = "server"
    unit: str = "record"
    relation: str = "zero-out"

    def __post_init__(self) -> None:
        number = isinstance(self.epsilon, int | float) and not isinstance(self.epsilon, bool)
        if not (number and math.isfinite(self.epsilon) and self.epsilon > 0):
            raise PlanError(f"epsilon: {str(self.epsilon)[:100]} is not allowed; it must be a positive number")

    def view(self, plan: Plan, population: Population) -> View:
        """The row of the plan's privacy table that the target refers to."""
        known = views(plan, population)
        for view in known:
            if (view.adversary, view.unit, view.relation) == (self.adversary, self.unit, self.relation):
                return view
        rows = ", ".join(f"{view.adversary}/{view.unit}/{view.relation}" for view in known)
        raise PlanError(f"adversary: {plan.method} has no row {self.adversary}/{self.unit}/{self.relation}; it has {rows}")

    def reached(
        self, plan: Plan, population: Population, rounds: int | Sequence[int] | None = None, mode: Mode = "tight"
    ) -> float:
        """The ε of a plan after the first `rounds` rounds, or after the listed ones (default: all)."""
        return epsilon_after(self.view(plan, population), plan, plan.rounds if rounds is None else rounds, mode)


def calibrate_noise(
    plan: Plan, population: Population, target: Target, mode: Mode = "tight", precision: float = _PRECISION
) -> Plan:
    """The plan with the smallest noise multiplier that stays within the target, to a relative `precision`."""

    def within(sigma: float) -> bool:
        return target.reached(plan.but(noise_multiplier=sigma), population, mode=mode) <= target.epsilon

    if target.reached(plan.but(noise_multiplier=_STRONGEST), population, mode=mode) > target.epsilon:
        view = target.view(plan.but(noise_multiplier=_STRONGEST), population)
        wanted = format_epsilon(target.epsilon, digits=6)
        raise PlanError(f"no noise multiplier gives ε = {wanted} against {target.adversary}: {view.assumption}")
    high = 1.0
    while not within(high):
        high *= 2
    low = high / 2
    while low > _WEAKEST and within(low):
        high, low = low, low / 2
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if within(middle) else (middle, high)
    return plan.but(noise_multiplier=high)


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The noise over the sensitivity of one Gaussian release with this ε, to a relative precision of 0.1 %."""
    from fedcdp.accounting import pld

    low, high = _WEAKEST, _STRONGEST
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pld.epsilon(Gaussian(middle), delta) <= epsilon else (middle, high)
    return high


def calibrate_slots(plan: Plan, population: Population, target: Target, mode: Mode = "tight") -> Plan:
    """Also choose the number of noise slots: the plan whose steps carry the least noise at the same ε."""
    if plan.record_sampling != "poisson" or plan.noise != "example":
        raise PlanError("slots: auto needs Poisson record sampling with example noise; otherwise slots cost nothing")
    tried = sorted({math.ceil(share * plan.batch_size) for share in _SLOTS_TRIED})
    plans = [calibrate_noise(plan.but(slots=slots), population, target, mode, precision=0.02) for slots in tried]
    best = min(plans, key=lambda each: each.noise_multiplier * math.sqrt(each.slots))
    return calibrate_noise(best, population, target, mode)


def rounds_within(plan: Plan, population: Population, target: Target, mode: Mode = "tight") -> int:
    """How many rounds of a plan stay within the target; all of them if the whole plan does."""
    if target.reached(plan, population, mode=mode) <= target.epsilon:
        return plan.rounds
    low, high = 0, plan.rounds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if target.reached(plan, population, middle, mode) <= target.epsilon else (low, middle)
    return low
