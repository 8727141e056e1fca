from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fedcdp.config.schedules import (
    Quantile,
    Schedule,
    as_bound,
    as_schedule,
    constant,
    cosine,
    exponential,
    linear,
    proportional,
    quantile,
)
from fedcdp.errors import PlanError

MOVING = [linear, exponential, cosine]
positive = st.floats(1e-3, 1e3)


def values(schedule: Schedule, rounds: int, leader: Schedule | None = None) -> list[float]:
    return [schedule.value(round_, rounds, leader) for round_ in range(rounds)]


def test_a_constant_is_the_same_in_every_round():
    assert values(constant(4), 5) == [4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (linear(6, 2), [6, 5, 4, 3, 2]),
        (linear(1, 3), [1, 1.5, 2, 2.5, 3]),
        (exponential(16, 1), [16, 8, 4, 2, 1]),
        (cosine(6, 2), [6, 4 + math.sqrt(2), 4, 4 - math.sqrt(2), 2]),
    ],
)
def test_five_rounds_by_hand(schedule, expected):
    assert values(schedule, 5) == pytest.approx(expected)


@settings(deadline=None, derandomize=True)
@given(start=positive, end=positive, rounds=st.integers(2, 300), make=st.sampled_from(MOVING))
def test_a_schedule_starts_at_start_ends_at_end_and_never_turns_back(start, end, rounds, make):
    found = values(make(start, end), rounds)
    assert found[0] == pytest.approx(start)
    assert found[-1] == pytest.approx(end, rel=1e-6)
    steps = [(after - before) * math.copysign(1, end - start) for before, after in itertools.pairwise(found)]
    assert min(steps) >= -1e-12 * max(start, end)


@pytest.mark.parametrize("make", MOVING)
def test_a_single_round_uses_the_start(make):
    assert make(6, 2).value(0, 1) == 6


@pytest.mark.parametrize("leader", [linear(0.1, 0.02), exponential(0.1, 0.01), cosine(0.2, 0.1), constant(0.3)])
def test_proportional_keeps_the_ratio_to_its_leader_in_every_round(leader):
    bounds, rates = values(proportional(4), 7, leader), values(leader, 7)
    assert bounds[0] == pytest.approx(4)
    assert [bound / rate for bound, rate in zip(bounds, rates, strict=True)] == pytest.approx([4 / rates[0]] * 7)


@pytest.mark.parametrize("leader", [None, proportional(2)])
def test_proportional_without_a_leader_is_refused(leader):
    with pytest.raises(PlanError, match="proportional"):
        proportional(4).value(0, 3, leader)


@pytest.mark.parametrize(
    ("written", "schedule"),
    [
        (4, constant(4)),
        (0.05, constant(0.05)),
        ("4", constant(4)),
        ("1e-3", constant(0.001)),
        ("constant(4)", constant(4)),
        ("linear(6, 2)", linear(6, 2)),
        (" linear ( 6,2 ) ", linear(6, 2)),
        ("exponential(6, 2)", exponential(6, 2)),
        ("cosine(6, 0.5)", cosine(6, 0.5)),
        ("proportional(4)", proportional(4)),
    ],
)
def test_numbers_and_written_forms_are_read(written, schedule):
    assert as_schedule(written, "clip") == schedule


def test_the_written_form_is_short_for_round_numbers():
    forms = ["4", "0.05", "0.001", "linear(6, 2)", "exponential(6, 0.5)", "cosine(6, 2)", "proportional(4)"]
    assert [str(as_schedule(form, "clip")) for form in forms] == forms


@settings(deadline=None, derandomize=True)
@given(start=st.floats(1e-30, 1e30), end=st.floats(1e-30, 1e30), kind=st.integers(0, 4))
def test_the_written_form_gives_back_exactly_the_same_schedule(start, end, kind):
    schedule = [constant(start), linear(start, end), exponential(start, end), cosine(start, end), proportional(start)][kind]
    assert as_schedule(str(schedule), "clip") == schedule


@pytest.mark.parametrize(
    "bad",
    [
        0, -1, math.nan, math.inf, "0", "-2", "nan", "inf", "linear(6, 0)", "linear(-6, 2)", "cosine(6, nan)", "four",
        "", "linear(6)", "linear(6, 2, 1)", "linear()", "proportional(4, 2)", "parabola(6, 2)", "linear(six, two)",
        "linear(6, 2", "linear(6; 2)", "linear(6, 2) + 1", None, [6, 2],
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused_in_one_sentence_that_names_the_field(bad):
    with pytest.raises(PlanError) as refused:
        as_schedule(bad, "learning_rate")
    assert str(refused.value).startswith("learning_rate: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("make", MOVING)
def test_schedules_hold_positive_finite_values_only(make, value):
    with pytest.raises(PlanError, match="positive finite"):
        make(value, 1.0)
    with pytest.raises(PlanError, match="positive finite"):
        make(1.0, value)


# Quantiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["quantile(0.5, 4)", " quantile (0.5,4.0) ", quantile(0.5, start=4)])
def test_a_bound_may_be_a_quantile(written):
    assert as_bound(written, "clip") == Quantile(0.5, 4.0)
    assert str(as_bound(written, "clip")) == "quantile(0.5, 4)"


@pytest.mark.parametrize("written", [4, "linear(6, 2)", "proportional(4)", cosine(6, 2)])
def test_a_bound_may_be_any_schedule(written):
    assert as_bound(written, "clip") == as_schedule(written, "clip")


@settings(deadline=None, derandomize=True)
@given(target=st.floats(0, 1, exclude_min=True, exclude_max=True), start=st.floats(1e-30, 1e30))
def test_the_written_form_gives_back_exactly_the_same_quantile(target, start):
    assert as_bound(str(quantile(target, start)), "clip") == quantile(target, start)


@pytest.mark.parametrize(
    "bad",
    [
        "quantile(0, 4)", "quantile(1, 4)", "quantile(-0.5, 4)", "quantile(nan, 4)", "quantile(0.5, 0)", "quantile(0.5, -1)",
        "quantile(0.5, inf)", "quantile(0.5, nan)", "quantile(0.5, 1e31)", "quantile(0.5)", "quantile(0.5, 4, 1)",
        "quantile(half, 4)", "quantile", "median", "median(4)", "median(", "four", None,
    ],
)  # fmt: skip
def test_what_is_no_bound_is_refused_in_one_sentence_that_names_the_field(bad):
    with pytest.raises(PlanError) as refused:
        as_bound(bad, "clip")
    assert str(refused.value).startswith("clip: ")
    assert "\n" not in str(refused.value)
    assert "quantile" in str(refused.value)


def test_a_learning_rate_follows_no_quantile():
    with pytest.raises(PlanError, match="learning_rate: 'quantile"):
        as_schedule("quantile(0.5, 4)", "learning_rate")


@pytest.mark.parametrize(
    ("within", "expected"), [(0.5, 2.0), (1.0, 2 * math.exp(-0.1)), (0.0, 2 * math.exp(0.1)), (3.5, 2 * math.exp(-0.6))]
)
def test_a_bound_moves_against_the_share_within_it(within, expected):
    assert quantile(0.5, 4).moved(2.0, within, 0.2) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, derandomize=True)
@given(
    bound=st.floats(0.01, 100), within=st.floats(-1e300, 1e300), rate=st.floats(1e-3, 1e300), start=st.floats(1e-30, 1e30)
)
def test_whatever_the_noise_says_a_bound_stays_within_a_million_times_its_start(bound, within, rate, start):
    moved = quantile(0.3, start).moved(bound * start, within, rate)
    assert start * 1e-6 <= moved <= start * 1e6
