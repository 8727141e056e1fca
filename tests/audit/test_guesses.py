"""What guesses prove: the theorem's p-value against published figures, exact probabilities and simulated mechanisms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import binom

from fedcdp.audit.guesses import epsilon_of_guesses, p_value, prove
from fedcdp.errors import PlanError


@pytest.mark.parametrize(
    ("numbers", "published"),
    [((1000, 100, 75, 1e-4, 0.05), 0.673), ((100_000, 1510, 1439, 1e-5, 0.05), 2.675)],  # Appendix D; section 7
)
def test_it_is_what_the_paper_prints(numbers: tuple[int, int, int, float, float], published: float) -> None:
    assert epsilon_of_guesses(*numbers) == pytest.approx(published, abs=1e-3)


def test_its_p_value_is_the_theorems_term_by_term() -> None:
    m, r, v, epsilon, delta = 60, 40, 30, 0.7, 1e-3
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    chances = [math.comb(r, k) * right**k * (1 - right) ** (r - k) for k in range(r + 1)]
    slack = max(sum(chances[v - i : v]) / i for i in range(1, v + 1))
    assert p_value(m, r, v, epsilon, delta) == pytest.approx(sum(chances[v:]) + 2 * m * delta * slack, rel=1e-10)


def refuting(m: int, epsilon: float, delta: float, level: float) -> int:
    """The fewest right guesses of m whose bound exceeds ε."""
    return next((v for v in range(m + 1) if p_value(m, m, v, epsilon, delta) < level), m + 1)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_randomised_response_is_refuted_in_one_run_of_twenty(epsilon: float) -> None:
    """It answers each bit truly with probability e^ε / (1 + e^ε): exactly ε-private, and the worst case."""
    wrong = binom.sf(refuting(500, epsilon, 0.0, 0.05) - 1, 500, expit(epsilon))
    assert 0.02 < wrong <= 0.05


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_for_many_answers_the_bound_is_close(epsilon: float) -> None:
    right = round(100_000 * float(expit(epsilon)))
    assert 0.95 * epsilon < epsilon_of_guesses(100_000, 100_000, right, 0.0, 0.05) < epsilon


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 200), st.floats(0, 4), st.floats(0, 0.01), st.sampled_from([0.05, 0.001]))
def test_a_mechanism_that_tells_all_with_probability_delta_keeps_its_level(
    m: int, epsilon: float, delta: float, level: float
) -> None:
    v = refuting(m, epsilon, delta, level)
    refuted = (1 - delta) * binom.sf(v - 1, m, expit(epsilon)) + (delta if v <= m else 0.0)
    assert refuted <= level * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.data())
def test_more_right_guesses_prove_no_less(r: int, data: st.DataObject) -> None:
    v = data.draw(st.integers(0, r - 1))
    fewer, more = (epsilon_of_guesses(400, r, each, 1e-6, 0.05) for each in (v, v + 1))
    assert fewer <= more + 1e-9


def test_guesses_at_random_prove_more_than_nothing_no_more_often_than_they_may() -> None:
    """Many rules are tried on the same scores; together they keep the level."""
    random = np.random.default_rng(0)
    proved = [prove(random.normal(size=(3, 64)), random.random(64) < 0.5, 0.0, 0.9).epsilon > 0 for _ in range(300)]
    assert np.mean(proved) <= 0.1


def test_a_statistic_that_knows_everything_is_found() -> None:
    included = np.random.default_rng(1).random(300) < 0.45
    blind, knowing = np.zeros(300), np.where(included, 5.0, -5.0)
    found = prove(np.stack([blind, knowing]), included, 1e-6, 0.95)
    assert (found.statistic, found.guesses, found.correct) == (1, 300, 300)
    assert found.epsilon == epsilon_of_guesses(300, 300, 300, 1e-6, 0.05 / found.rules)
    assert prove(knowing[None], included, 1e-6, 0.95, guesses=300).epsilon > found.epsilon  # fewer rules share the level


def test_scores_that_are_equal_or_not_numbers_prove_nothing() -> None:
    included = np.arange(200) < 100
    for score in (0.0, math.nan, math.inf):
        assert prove(np.full((1, 200), score), included, 1e-6, 0.99).epsilon == 0


def test_numbers_that_are_not_possible_are_refused() -> None:
    for numbers in ((10, 11, 3, 1.0, 0.0), (10, 5, 6, 1.0, 0.0), (10, 5, -1, 1.0, 0.0)):
        with pytest.raises(PlanError, match="are not possible"):
            p_value(*numbers)
    for epsilon, delta in ((-1.0, 0.0), (1.0, 2.0)):
        with pytest.raises(PlanError, match="epsilon, delta"):
            p_value(10, 5, 3, epsilon, delta)
    with pytest.raises(PlanError, match="guesses: 11 is not allowed"):
        prove(np.zeros((1, 10)), np.zeros(10, bool), 0.0, 0.95, guesses=11)
