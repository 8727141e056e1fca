"""From a target to a plan: just enough noise, never too little."""

from __future__ import annotations

import pytest

from fedcdp.accounting.calibrate import Target, calibrate_noise, calibrate_slots, rounds_within
from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError
from tests.support.pairs import sample_first

PAPER = Population(clients=1000, records=500, copies=1, layers=3)
SMALL = Population(clients=50, records=40, copies=1, layers=3)


@pytest.mark.parametrize(
    ("slots", "epsilon", "expected"),
    [
        (10, 1, 0.978),
        (15, 8, 0.292),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(10, 8, 0.465), (15, 1, 0.681), (15, 2, 0.470)]),
    ],
)
def test_noise_for_the_servers_view(slots: int, epsilon: float, expected: float) -> None:
    assert calibrate_noise(Plan(slots=slots), PAPER, Target(epsilon)).noise_multiplier == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("epsilon", "expected"), [(1, 22.7), (2, 12.3), (4, 6.74), (8, 3.81)])
def test_noise_for_the_reader_of_examples(epsilon: float, expected: float) -> None:
    plan = calibrate_noise(Plan(record_sampling="partition"), PAPER, Target(epsilon, "example"))
    assert plan.noise_multiplier == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("method", ["fed-cdp", "fed-sdp"])
@pytest.mark.parametrize("epsilon", sample_first([5.0, 0.5]))
def test_the_target_is_met_and_hardly_more(method: str, epsilon: float) -> None:
    target = Target(epsilon, "model", "client") if method == "fed-sdp" else Target(epsilon)
    plan = calibrate_noise(Plan(method=method, per_round=10, rounds=5, local_steps=5), SMALL, target)
    assert epsilon * 0.98 <= target.reached(plan, SMALL) <= epsilon


@pytest.mark.slow
def test_slots_are_chosen_for_the_least_noise_at_the_same_epsilon() -> None:
    plan, target = Plan(per_round=10, rounds=5, local_steps=5, batch_size=4), Target(2.0)
    chosen = calibrate_slots(plan, SMALL, target)
    assert target.reached(chosen, SMALL) <= 2.0
    for slots in (6, 12):
        other = calibrate_noise(plan.but(slots=slots), SMALL, target)
        assert chosen.noise_multiplier * chosen.slots**0.5 <= other.noise_multiplier * slots**0.5 * 1.02


@pytest.mark.parametrize(("plan", "target", "said"), [
    (Plan(method="nonprivate", per_round=10), Target(1), "nothing is noised"),
    (Plan(noise="batch", per_round=10), Target(1, "example"), "only clipped"),
    (Plan(method="fed-sdp", per_round=10), Target(1, "server", "client"), "raw updates"),
    (Plan(per_round=10), Target(1, "nobody"), "has no row"),
])  # fmt: skip
def test_a_target_that_no_noise_reaches_is_refused_with_the_reason(plan: Plan, target: Target, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        calibrate_noise(plan, SMALL, target)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_an_epsilon_that_is_none_is_refused(epsilon: float) -> None:
    with pytest.raises(PlanError, match="epsilon"):
        Target(epsilon)


def test_as_many_rounds_as_the_target_allows_and_not_one_more() -> None:
    plan, target = (
        Plan(per_round=10, rounds=40, local_steps=5, noise_multiplier=1.0, record_sampling="partition"),
        Target(3.0),
    )
    rounds = rounds_within(plan, SMALL, target)
    assert 0 < rounds < 40
    assert target.reached(plan, SMALL, rounds) <= 3.0 < target.reached(plan, SMALL, rounds + 1)
    assert rounds_within(plan, SMALL, Target(1e4)) == 40
    assert rounds_within(plan, SMALL, Target(1e-4)) == 0
