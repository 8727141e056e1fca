"""What is printed for random plans over all options, against an accountant that shares no code and no numerics with it.

A few dozen plans here; hundreds in `make audits` (`tools/audits/random_plans.py`).
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcdp.errors import PlanError
from tests.support.independent.mistakes import COPIES, MISTAKES, CopiesAtOneSize
from tests.support.independent.plans import Case, compare, random_case, rows_of, rows_of_recipes
from tests.support.independent.recipes import Recipes
from tests.support.pairs import sample_first


def too_small(case: Case) -> list[str]:
    """Every figure that is printed more than half a per cent below the recomputed one; a refused plan has none."""
    privacy = case.printed()
    found = [] if privacy is None else compare(rows_of(privacy), case.recomputed())
    return [f"{each}" for each in found if each.too_small]


@pytest.mark.parametrize("plans", sample_first([10, 36]))
def test_no_random_plan_has_an_epsilon_that_is_too_small(plans: int) -> None:
    @settings(max_examples=plans, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(0, 10**6))
    def holds(seed: int) -> None:
        case = random_case(Random(seed), rounds=(1, 2, 3))
        assert not too_small(case), case

    holds()


@pytest.mark.parametrize("recipes", MISTAKES, ids=[each.__name__ for each in MISTAKES])
def test_the_plan_of_an_old_mistake_is_printed_right_now(recipes: type[Recipes]) -> None:
    assert not too_small(MISTAKES[recipes])


@pytest.mark.parametrize("recipes", MISTAKES, ids=[each.__name__ for each in MISTAKES])
def test_the_comparison_finds_every_old_mistake(recipes: type[Recipes]) -> None:
    case = MISTAKES[recipes]
    wrong = compare(rows_of_recipes(case.recomputed(recipes)), case.recomputed())
    assert any(each.too_small for each in wrong)


def test_the_comparison_finds_copies_that_are_taken_to_be_at_one_size() -> None:
    assert not too_small(COPIES)
    wrong = compare(rows_of_recipes(COPIES.recomputed(CopiesAtOneSize)), COPIES.recomputed())
    assert [(each.key[1], each.figure) for each in wrong if each.too_small] == [("unique", "epsilon"), ("unique", "worst")]


def test_a_figure_half_a_per_cent_too_small_is_found_and_a_quarter_is_not() -> None:
    figures = MISTAKES[next(iter(MISTAKES))].recomputed()
    for factor, expected in ((0.99, True), (0.9975, False)):
        printed = {key: tuple(factor * value for value in row) for key, row in rows_of_recipes(figures).items()}
        assert any(each.too_small for each in compare(printed, figures)) is expected


def test_a_missing_row_is_found() -> None:
    figures = MISTAKES[next(iter(MISTAKES))].recomputed()
    printed = rows_of_recipes(figures)
    printed.popitem()
    with pytest.raises(AssertionError, match="rows differ"):
        compare(printed, figures)


def test_random_plans_reach_every_option() -> None:
    cases = [random_case(Random(seed)) for seed in range(400)]
    plans = [case.plan for case in cases]
    for name, values in {
        "method": 5, "noise": 4, "noise_at": 2, "clip_mode": 2, "client_sampling": 2, "record_sampling": 3,
        "secure_aggregation": 2, "aggregation": 2, "noise_follows_clip": 2, "secure_noise": 2, "compression": 3,
        "momentum": 2, "ema": 2, "clip": 7, "attempts": 2,
    }.items():  # fmt: skip
        assert len({getattr(plan, name) for plan in plans}) == values, name
    assert {case.mode for case in cases} == {"tight", "rdp"}
    corners = [
        [case for case in cases if case.plan.local_steps == 1 and case.plan.secure_aggregation],
        [case for case in cases if case.plan.per_round == case.federation.clients and case.plan.secure_aggregation],
        [case for case in cases if case.plan.sums and case.plan.colluders],
        [case for case in cases if case.plan.batch_size == 1 and case.federation.sizes[-1] >= 1000],
        [case for case in cases if case.federation.sizes[0] < case.plan.batch_size],
        [case for case in cases if len(case.federation.sizes) > 1],
        [case for case in cases if case.federation.copies > 1],
        [case for case in cases if len(set(case.ledger.rounds)) < len(case.ledger.rounds)],
    ]
    assert all(len(corner) >= 20 for corner in corners)


def test_secure_aggregation_with_poisson_clients_is_refused_whatever_the_method() -> None:
    case = MISTAKES[next(iter(MISTAKES))]
    with pytest.raises(PlanError, match="Poisson client sampling"):
        Case(case.plan.but(client_sampling="poisson"), case.federation, case.ledger, "tight").printed()
