"""The ε that the paper prints, for comparison: **not a guarantee**.

The printed ε come from the moments accountant of TensorFlow Privacy before 2021, for a mechanism other than the one
described: a sampling rate of 0.01 whatever the federation, one layer's sensitivity, and one step too many.
"""

from __future__ import annotations

import math

import dp_accounting
import numpy as np

from fedcdp.accounting import pld
from fedcdp.accounting.mechanisms import PoissonGaussian, repeated
from fedcdp.accounting.rdp import Curve, curve_of_event
from fedcdp.config.plan import Plan

BANNER = "paper mode: the paper's figures, not a guarantee; an attack on single gradients exceeds them (docs/guarantees.md)"
ORDERS: Curve = np.array(
    [1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512], dtype=np.float64
)
_RECORD_RATE, _CLIENT_RATE = 0.01, 0.1  # constants in the authors' scripts


def moments_epsilon(rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """The moments accountant of that time: the minimum over orders of rdp + ln(1/δ)/(α − 1)."""
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    curve = steps * curve_of_event(event, ORDERS, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return float(np.min(curve + math.log(1 / delta) / (ORDERS - 1)))


def printed_epsilon(plan: Plan) -> float:
    """The figure that the paper prints for a plan; it depends only on the method, T, L, σ and δ."""
    steps = plan.rounds if plan.method == "fed-sdp" else plan.rounds * plan.local_steps
    return moments_epsilon(printed_rate(plan), plan.noise_multiplier, steps + 1, plan.delta)


def printed_rate(plan: Plan) -> float:
    """The sampling rate q of the authors' scripts: a constant of the method."""
    return _CLIENT_RATE if plan.method == "fed-sdp" else _RECORD_RATE


def broken_condition(plan: Plan) -> str | None:
    """What is wrong if the plan does not meet the paper's own condition q < 1/(16σ); None if it does."""
    rate, sigma = printed_rate(plan), plan.noise_multiplier
    if 16 * sigma * rate < 1:
        return None
    return (
        f"the paper's condition for this figure, q < 1/(16σ), does not hold: q = {rate:g}, and 1/(16σ) = "
        f"{1 / (16 * sigma):.3g} (σ = {sigma:g})"
    )


def tight_epsilon(plan: Plan) -> float:
    """The ε of a tight accountant for the same steps at the same rate. Not a guarantee either."""
    steps = repeated(PoissonGaussian(_RECORD_RATE, plan.noise_multiplier), plan.rounds * plan.local_steps)
    return pld.epsilon(steps, plan.delta)


def classical_epsilons(plan: Plan) -> dict[str, float]:
    """The five composition methods of the authors' scripts, at a rate of 0.01 over T·L steps.

    The first three give ε at a total δ of at least steps·q·δ, a hundred or more times the δ printed next to them.
    """
    steps, sigma, delta, rate = plan.rounds * plan.local_steps, plan.noise_multiplier, plan.delta, _RECORD_RATE
    one = math.sqrt(2 * math.log(1.25 / delta)) / sigma  # the Gaussian mechanism's textbook ε
    step = math.log1p(rate * math.expm1(one))  # amplified by sampling
    drift = steps * step * math.expm1(step) / (math.exp(step) + 1)
    rho = steps * rate**2 / sigma**2
    return {
        "base composition": steps * step,
        "advanced composition": drift + step * math.sqrt(2 * steps * math.log(1 / delta)),
        "optimal composition": drift + step * math.sqrt(2 * steps * math.log(math.e + math.sqrt(steps) * step / delta)),
        "zCDP": rho + 2 * math.sqrt(rho * math.log(1 / delta)),
        "moments accountant": moments_epsilon(rate, sigma, steps, delta),
    }
