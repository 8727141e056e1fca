"""Whole numbers for secure sums: the grid, the size of the noise, what fits, exact draws, and the lemma in one dimension."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray
from scipy import stats

from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError
from fedcdp.files.tree import Layout
from fedcdp.mechanism import secure_sum
from fedcdp.mechanism.noise import SecureNoise, SeededNoise, Silence
from fedcdp.mechanism.secure_sum import (
    add,
    check_capacity,
    discrete_gaussians,
    from_integers,
    grid,
    nearest,
    share_deviation,
    to_integers,
)

LAYOUT = Layout.of(torch.nn.Linear(30, 20))
WORDS = st.integers(-(2**63), 2**63 - 1)
HALVES = st.integers(-(2**40), 2**40).map(lambda number: number / 2)
quick = settings(max_examples=100, deadline=None)


def plan_of(**changes: object) -> Plan:
    usual: dict[str, object] = {"noise": "sum", "secure_aggregation": True, "local_steps": 1, "per_round": 10, "clip": 0.5}
    return Plan(**usual | {"batch_size": 20, "record_sampling": "partition"} | changes)  # type: ignore[arg-type]


# Whole numbers --------------------------------------------------------------------------------------------------------


@quick
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=9))
def test_sums_wrap_around_at_64_bits(pairs: list[tuple[int, int]]) -> None:
    left, right = ({"w": torch.tensor(each)} for each in zip(*pairs, strict=True))
    wrapped = [(a + b + 2**63) % 2**64 - 2**63 for a, b in pairs]
    rows = torch.stack([left["w"], right["w"]])
    assert add(left, right)["w"].tolist() == wrapped
    assert rows.sum(0).tolist() == wrapped


@quick
@given(st.floats(1e-6, 1e6), st.lists(st.floats(-500, 500), min_size=1, max_size=9))
def test_a_value_is_rounded_to_the_nearest_grid_step(bound: float, shares: list[float]) -> None:
    values = {"w": torch.tensor([share * bound for share in shares], dtype=torch.float64)}
    steps = to_integers(values, bound)
    assert steps["w"].dtype == torch.int64
    for value, step in zip(values["w"].tolist(), steps["w"].tolist(), strict=True):
        error = abs(Fraction(value) / (Fraction(bound) / 2**24) - step)
        assert error <= Fraction(1, 2) + Fraction(1, 2**18)  # and the rounding of a division
    again = from_integers(steps, bound)["w"]
    assert float((again - values["w"]).abs().max()) <= 0.5001 * grid(bound)


@quick
@given(st.lists(st.floats(-(2.0**51), 2.0**51, exclude_min=True, exclude_max=True) | HALVES, min_size=1, max_size=20))
def test_the_quick_rounding_is_the_usual_one(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)
    assert torch.equal(nearest(values.clone(), 0.0), values.round().long())
    assert torch.equal(nearest(values.clone(), math.inf), values.round().long())


@quick
@given(st.lists(WORDS, min_size=1, max_size=6), st.integers(-(10**9), 10**9))
def test_masks_that_cancel_leave_the_sum(masks: list[int], value: int) -> None:
    total = torch.tensor([value])
    for mask in masks:
        total = total + torch.tensor([mask])
    for mask in masks:
        total = total - torch.tensor([mask])
    assert total.tolist() == [value]


# The size of the noise ------------------------------------------------------------------------------------------------


@quick
@given(
    st.floats(0.05, 100), st.integers(2, 2**20), st.data(), st.integers(1, 64), st.integers(1, 10**7), st.floats(1e-3, 1e3)
)
def test_the_honest_shares_carry_the_noise_that_is_accounted(
    sigma: float, roster: int, data: st.DataObject, groups: int, size: int, clip: float
) -> None:
    """√(h·τ² − s²)·γ over the sensitivity is at least σ/√M, and at most a little more."""
    colluders = data.draw(st.integers(0, roster - 1))
    plan = plan_of(noise_multiplier=sigma, per_round=roster, colluders=colluders, clip=clip)
    try:
        tau = share_deviation(plan, 0, groups=groups, size=size)
    except PlanError:
        assert sigma * 2**24 / math.sqrt(roster - colluders) < 64
        return
    root = math.sqrt(groups)
    step, limit = clip / 2**24, clip * root * (1 + 2**-19 + 2**-19) + clip / 2**24 * math.sqrt(size)
    noise = math.sqrt((roster - colluders) * tau**2 - 16) * step
    assert noise / limit >= sigma / root * (1 - 1e-14)
    rounded_up = math.sqrt(roster - colluders) * (tau - 1)
    assert rounded_up <= math.hypot(sigma * 2**24 * limit / (clip * root), 4) * (1 + 1e-14)


def test_a_smaller_roster_makes_larger_shares() -> None:
    plan = plan_of(noise_multiplier=2.0, colluders=2)
    whole, half = (share_deviation(plan, 0, groups=1, size=10, roster=n) for n in (None, 6))
    assert half == pytest.approx(whole * math.sqrt(8 / 4), rel=1e-6)
    with pytest.raises(PlanError, match="no client of 2 would be honest"):
        share_deviation(plan, 0, groups=1, size=10, roster=2)


def test_noise_that_keeps_its_scale_grows_in_grid_steps_as_the_bound_decays() -> None:
    plan = plan_of(clip="linear(4, 1)", rounds=4, noise_follows_clip=False, noise_multiplier=2.0)
    first, last = (share_deviation(plan, round_, groups=1, size=10) for round_ in (0, 3))
    assert last == pytest.approx(4 * first, rel=1e-6)


def test_without_noise_the_shares_are_zero() -> None:
    assert share_deviation(plan_of(noise_multiplier=0.0), 0, groups=1, size=10) == 0
    clients = torch.tensor([0, 1])
    for noise in (SeededNoise(0, LAYOUT), SecureNoise(LAYOUT), Silence(LAYOUT)):
        assert not any(bool(value.any()) for value in noise.for_sum(0, clients, 0, 0).values())


def test_what_the_bounds_do_not_cover_is_refused() -> None:
    sizes = {"groups": 1, "size": 100}
    check_capacity(plan_of(), most_records=2**16, **sizes)
    check_capacity(plan_of(noise="example", batch_size=2**17), most_records=2**17, **sizes)
    with pytest.raises(PlanError, match="at most 65536"):
        check_capacity(plan_of(batch_size=2**17), most_records=2**16 + 1, **sizes)
    with pytest.raises(PlanError, match="below 64"):
        check_capacity(plan_of(noise_multiplier=1e-6), most_records=5, **sizes)
    with pytest.raises(PlanError, match="exceed 64 bits"):
        check_capacity(plan_of(per_round=2**23, batch_size=2**16), most_records=2**16, **sizes)
    decaying = {"clip": "linear(1000, 1)", "noise_follows_clip": False, "noise_multiplier": 1e6, "rounds": 3}
    with pytest.raises(
        PlanError, match="exceed 64 bits"
    ):  # each share alone carries σ: in the last round, 1000 times as much
        check_capacity(plan_of(per_round=10**7, colluders=10**7 - 1, **decaying), most_records=5, **sizes)


# Draws ----------------------------------------------------------------------------------------------------------------


def test_seeded_shares_are_rounded_gaussians_of_the_stated_deviation() -> None:
    noise, clients = SeededNoise(3, LAYOUT), torch.arange(200)
    drawn = LAYOUT.flatten(noise.for_sum(5, clients, 0, 1000), lead=1)
    assert drawn.dtype == torch.int64
    assert stats.kstest(drawn.double().flatten() / 1000, "norm").pvalue > 1e-4
    some = LAYOUT.flatten(noise.for_sum(5, clients[7:9], 0, 1000), lead=1)
    assert torch.equal(some, drawn[7:9])


@pytest.mark.parametrize("other", [{"round_": 6}, {"attempt": 1}, {"clients": torch.arange(1, 201)}])
def test_no_two_rounds_attempts_or_clients_share_noise(other: dict[str, object]) -> None:
    noise = SeededNoise(3, LAYOUT)
    usual: dict[str, object] = {"round_": 5, "attempt": 0, "clients": torch.arange(200), "deviation": 1000}
    first, second = (LAYOUT.flatten(noise.for_sum(**each), lead=1) for each in (usual, usual | other))  # type: ignore[arg-type]
    together = np.corrcoef(first.flatten().numpy(), second.flatten().numpy())[0, 1]
    assert abs(together) < 6 / math.sqrt(first.numel())


def test_shares_come_from_a_stream_of_their_own() -> None:
    noise, clients = SeededNoise(3, LAYOUT), torch.arange(200)
    share = LAYOUT.flatten(noise.for_sum(0, clients, 0, 1000), lead=1).double()
    for other in (noise.for_step(0, clients, 0, 1.0), noise.for_update(0, clients, 1.0)):
        together = np.corrcoef(share.flatten(), LAYOUT.flatten(other, lead=1).flatten())[0, 1]
        assert abs(together) < 6 / math.sqrt(share.numel())


def test_secure_shares_are_exact_discrete_gaussians_and_never_the_same() -> None:
    pytest.importorskip("opendp")
    drawn = discrete_gaussians((200, 100), 3)
    assert drawn.dtype == torch.int64
    support = np.arange(-20, 21)
    law = np.exp(-(support**2) / 18.0)
    wanted = 20_000 * law / law.sum()
    inside = wanted > 5
    found = np.array([(drawn == int(each)).sum() for each in support])
    assert stats.chisquare(found[inside], wanted[inside] * found[inside].sum() / wanted[inside].sum()).pvalue > 1e-9
    first, second = (SecureNoise(LAYOUT).for_sum(0, torch.tensor([0]), 0, 10**6) for _ in range(2))
    assert float((first["weight"] == second["weight"]).double().mean()) < 0.01


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    secure_sum._measurement.cache_clear()
    with pytest.raises(PlanError, match=r"needs the package opendp; install it with pip install .*secure"):
        discrete_gaussians((1,), 100)
    secure_sum._measurement.cache_clear()


# The lemma, in one dimension ------------------------------------------------------------------------------------------

Law = NDArray[np.float64]


def law_of_sum(tau: float, draws: int, reach: int) -> Law:
    """The law of the sum of independent draws of the discrete Gaussian, on −reach … reach."""
    support = np.arange(-reach, reach + 1)
    one = np.exp(-(support**2) / (2 * tau**2))
    one, total = one / one.sum(), np.zeros(2 * reach + 1)
    total[reach] = 1.0
    for _ in range(draws):
        total = np.convolve(total, one)[reach : 3 * reach + 1]
    return total


def delta_of(law: Law, shift: int, epsilon: float) -> float:
    return float(np.maximum(law[shift:] - math.exp(epsilon) * law[:-shift], 0).sum())


def gaussian_delta(deviation: float, shift: float, epsilon: float) -> float:
    mu = shift / deviation
    return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu))


def test_the_figures_of_the_lemma() -> None:
    """Ten draws of τ = 6, shift 5, ε = 1: a Gaussian of equal variance is not an upper bound, a smaller variance is."""
    exact = delta_of(law_of_sum(6, 10, 400), 5, 1.0)
    assert exact == pytest.approx(7.520e-6, rel=1e-3)
    assert gaussian_delta(math.sqrt(360), 5, 1.0) == pytest.approx(7.505e-6, rel=1e-3)
    bound = gaussian_delta(math.sqrt(360 - 4), 5, 1.0)
    assert bound == pytest.approx(8.25e-6, rel=1e-3)
    assert gaussian_delta(math.sqrt(360), 5, 1.0) < exact < bound


@pytest.mark.parametrize(("tau", "draws", "s"), [(1.5, 1, 1.0), (2.0, 3, 1.2), (1.5, 5, 1.0)])
def test_the_sum_is_a_rounded_gaussian_up_to_the_stated_factor(tau: float, draws: int, s: float) -> None:
    """Drawing G from N(0, hτ² − s²) and rounding it with weights exp(−(z − G)²/2s²) gives the law of the sum."""
    reach, fine = 60, 40
    points = np.arange(-reach * fine, reach * fine + 1) / fine
    density = stats.norm.pdf(points, scale=math.sqrt(draws * tau**2 - s**2)) / fine  # periodic sums converge at once
    support = np.arange(-reach, reach + 1)
    weights = np.exp(-((support[:, None] - points) ** 2) / (2 * s**2))
    rounded = (weights / weights.sum(0)) @ density
    sums, inside = law_of_sum(tau, draws, reach), np.abs(support) <= 4 * tau * math.sqrt(draws)
    eta = 2 * sum(math.exp(-2 * math.pi**2 * s**2 * k**2) for k in range(1, 9))
    assert float(np.abs(np.log(rounded[inside] / sums[inside])).max()) <= 3 * (draws + 1) * eta + 1e-11
