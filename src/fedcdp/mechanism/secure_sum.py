"""Fixed point for secure sums: values as whole numbers modulo 2^64, and how much noise a client adds to them.

Masks need a finite ring, and exact noise needs whole numbers. A client rounds its values to a grid of γ = C·2^-24, C the
round's clip bound, adds a discrete Gaussian share of the noise, and sends the result modulo 2^64. The server adds up and
reads the sum as a signed number. All functions are pure and shared by simulation and deployment.

**Deviation of a share.** The accountant states z = σ/√M for the sum of a step. `share_deviation` makes that true. Let
n − t = h members be honest, so their shares, D(τ²) each, are on the sum. By the lemma in `docs/guarantees.md`, the sum is
then, up to a factor of e^±λ with λ < 2^-400, the post-processing of a continuous Gaussian with variance h·τ² − s², s = 4
grid steps. Zeroing out a record moves the sum of a client by at most

    Δ = C·√M·(1 + 2^-19 + 2^-19) + γ·√D

| term | why |
| --- | --- |
| C·√M | clipping, if it were exact |
| 2^-19 | a clipped gradient may exceed C: norms and factors of float32 gradients are rounded |
| 2^-19 | sums in float64: N records add N·(N + 2)·2^-52 at most, in any order; N ≤ 2^16 is required |
| γ·√D | rounding to the grid moves each of D coordinates of two neighbouring sums apart by at most one more step |

z = √(h·τ² − s²)·γ/Δ ≥ σ/√M follows from h·τ² ≥ (σ·2^24·slack)² + s² with slack = 1 + 2^-18 + 2^-24·√(D/M). Under Fed-SDP
the entry is a client's clipped update: there is nothing to sum, and the same bound holds.

**Assumption.** Zeroing a record out leaves the gradients of the other records unchanged, to the bit. A record that is zeroed
out keeps its slot, so all shapes stay the same. With the same shapes, matrix products, convolutions and reductions add in an
order that does not depend on values, and an example's gradient reads no other example (`mixing_layers` are refused). The
order in which the last sum adds up records does not matter: the bound above holds for every order.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError
from fedcdp.files.installation import install_command
from fedcdp.files.tree import Tree

if TYPE_CHECKING:
    from opendp.mod import Measurement

MOST_RECORDS = 2**16
"""The most records of a client in a step: float64 sums of more could err by more than the slack allows."""
_STEPS = 2.0**24  # grid steps in a clip bound
_SMOOTHING = 4.0  # s of the lemma, in grid steps
_LEAST_DEVIATION = 64  # grid steps; the lemma needs s·√2
_ROUNDED = 2.0**-18  # of norms and of sums, 2^-19 each
_TAIL = 12.0  # standard deviations of noise that must fit
_CAPACITY = 2.0**39  # clip bounds; 2^63 grid steps
_SHIFT = 1.5 * 2.0**52
(_SHIFT_WORD,) = struct.unpack("<q", struct.pack("<d", _SHIFT))


def grid(bound: float) -> float:
    """γ = C·2^-24, the value of one grid step."""
    return bound / _STEPS


def share_deviation(plan: Plan, round_: int, *, groups: int, size: int, roster: int | None = None) -> int:
    """τ, the standard deviation of one client's noise share in grid steps; the module says why it is large enough.

    Args:
        plan: A plan with noise on the sum.
        round_: The round, counted from 0.
        groups: M, the number of groups that are clipped separately.
        size: D, the number of coordinates.
        roster: n, the clients whose shares are added up. Default: the planned K_t.

    Returns:
        τ = ⌈√((σ·2^24·slack)² + s²) / √(n − t)⌉, or 0 where the plan has no noise.

    Raises:
        PlanError: The roster has no honest member, or τ is below 64.
    """
    honest = (plan.per_round if roster is None else roster) - plan.colluders
    if honest < 1:
        raise PlanError(f"colluders: {plan.colluders} is not allowed; no client of {roster} would be honest")
    multiplier = plan.noise_scale_at(round_) / plan.clip_at(round_)
    if multiplier == 0:
        return 0
    slack = 1 + _ROUNDED + math.sqrt(size / groups) / _STEPS
    deviation = math.ceil(math.hypot(multiplier * _STEPS * slack, _SMOOTHING) / math.sqrt(honest) * (1 + 2.0**-50))
    if deviation < _LEAST_DEVIATION:
        raise PlanError(
            f"noise_multiplier: {plan.noise_multiplier:g} is not allowed with noise sum; a share of {deviation} grid steps "
            f"is below {_LEAST_DEVIATION}"
        )
    return deviation


def check_capacity(plan: Plan, *, groups: int, size: int, most_records: int) -> None:
    """Refuse a plan whose sums might not fit, or whose noise or rounding the bounds above do not cover.

    Args:
        plan: Any plan; only noise on the sum is checked.
        groups: M, the number of groups that are clipped separately.
        size: D, the number of coordinates.
        most_records: The most records that a client holds.

    Raises:
        PlanError: A client uses more than 2^16 records in a step, a sum could exceed 2^63 grid steps, or τ is below 64.
    """
    if not plan.sums:
        return
    records = min(plan.slots, most_records) if plan.per_example else 1
    if records > MOST_RECORDS:
        raise PlanError(
            f"batch_size: a client with {records} records in a step is not allowed with noise sum; at most {MOST_RECORDS}"
        )
    for round_ in {0, plan.rounds - 1}:  # schedules are monotonic
        share_deviation(plan, round_, groups=groups, size=size)
        multiplier = plan.noise_scale_at(round_) / plan.clip_at(round_)
        noise = _TAIL * multiplier * math.sqrt(plan.per_round / plan.honest)
        if plan.per_round * records + noise >= _CAPACITY:
            raise PlanError("noise: sum is not allowed here; sums of so many records, or so much noise, exceed 64 bits")


def to_integers(values: Tree, bound: float) -> Tree:
    """The values of a client in grid steps, rounded to the nearest whole number (int64).

    `check_capacity` has made sure that none is above 2^16 clip bounds, up to rounding errors.
    """
    return {name: nearest(value.double() / grid(bound), 2 * MOST_RECORDS * _STEPS) for name, value in values.items()}


def nearest(values: Tensor, most: float) -> Tensor:
    """The nearest whole numbers (int64; the even one if two are) of float64 values up to ±`most`, which are overwritten.

    Adding 1.5·2^52 to a value below 2^51 rounds it in the same way and leaves the number in the last bits. That takes half
    the time of rounding and converting.
    """
    if most >= 2**51:
        return values.round_().long()
    return values.add_(_SHIFT).view(torch.int64).sub_(_SHIFT_WORD)


def from_integers(values: Tree, bound: float) -> Tree:
    """The values (float64) of whole numbers of grid steps, read as signed 64-bit numbers."""
    return {name: value.double() * grid(bound) for name, value in values.items()}


def add(left: Tree, right: Tree) -> Tree:
    """left + right modulo 2^64: int64 tensors wrap around. The result takes the place of `left`."""
    return {name: left[name].add_(right[name]) for name in left}


def discrete_gaussians(shape: tuple[int, ...], deviation: int) -> Tensor:
    """Exact draws of the discrete Gaussian, P(x) ∝ exp(−x²/2τ²), with the operating system's randomness, by OpenDP.

    Args:
        shape: The shape of the tensor.
        deviation: τ, a positive whole number.

    Returns:
        Whole numbers (int64), on the CPU.

    Raises:
        PlanError: The package opendp is not installed.
    """
    drawn = _measurement(deviation)([0] * math.prod(shape))
    return torch.tensor(drawn, dtype=torch.int64).view(shape)


@cache
def _measurement(deviation: int) -> Measurement:
    try:
        import opendp.prelude as dp
    except ImportError:
        wanted = f"install it with {install_command('secure')}"
        raise PlanError(f"noise: exact noise on the sum needs the package opendp; {wanted}") from None
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    return dp.m.make_gaussian(*space, scale=float(deviation))
