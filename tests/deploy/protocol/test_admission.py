"""What an honest client sends is never too large; what is much larger is left out."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("flwr")

from fedcdp.attacks.observe import step_weights
from fedcdp.config.plan import Plan
from fedcdp.deploy.protocol.admission import check_size, largest_norm, norm_of, outliers
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.messages import Update
from fedcdp.errors import WireError
from fedcdp.files.tree import Layout
from fedcdp.models.networks import build
from tests.support.local_grid import experiment

LAYOUT = Layout.of(build("mlp", (30,), 2))
FIRST = Round(0, 0, None)
PLANS: dict[str, dict[str, Any]] = {
    "noise of each slot": {},
    "noise of the batch": {"noise": "batch"},
    "momentum": {"momentum": 0.9, "local_steps": 20},
    "proximal": {"proximal": 3.0, "local_steps": 3},
    "momentum and proximal": {"proximal": 3.0, "momentum": 0.5, "local_steps": 3},
    "much noise": {"noise_multiplier": 10.0},
    "flat clipping": {"clip_mode": "flat"},
    "no noise": {"noise_multiplier": 0.0},
}


def at_the_bound(plan: Plan, records: int) -> torch.Tensor:
    """The sum of a step in which every slot is filled and every gradient is one coordinate of each layer, at the bound."""
    direction = {name: torch.zeros(shape) for name, shape in LAYOUT.shapes.items()}
    for group in LAYOUT.groups(plan.clip_mode):
        direction[group[0]].view(-1)[0] = plan.clip_at(0) * min(plan.slots, records)
    return torch.cat([value.flatten() for value in direction.values()])


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("records", [2, 20, 500])
def test_the_worst_that_a_client_can_honestly_send_is_admitted(changes: dict[str, Any], records: int) -> None:
    """Every slot of every step filled, every gradient at the clip bound in every layer, all in one direction, and noise."""
    plan = experiment(**changes).plan
    direction = at_the_bound(plan, records)
    generator = torch.Generator().manual_seed(1)
    velocity, update = torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    for _ in range(plan.local_steps):
        noise = torch.randn(LAYOUT.size, generator=generator) * plan.noise_scale_at(0) * plan.noise_on_sum
        velocity = plan.momentum * velocity + (direction + noise) / min(plan.batch_size, records) + plan.proximal * update
        update = update - plan.learning_rate_at(0) * velocity
    sent = LAYOUT.unflatten(update)
    check_size(Update(sent, None), plan, LAYOUT, FIRST, records)
    with pytest.raises(WireError, match="update is too large"):
        check_size(Update({name: 40 * value for name, value in sent.items()}, None), plan, LAYOUT, FIRST, records)


@pytest.mark.parametrize("changes", [{}, {"method": "fed-sdp", "noise_at": "client"}])
def test_the_room_for_noise_cannot_be_put_into_one_small_tensor(changes: dict[str, Any]) -> None:
    """A rogue's whole update may have the norm of all noise, and the last layer's bias not more than its own share."""
    plan = experiment(noise_multiplier=6.0, **changes).plan
    zero = {name: torch.zeros(shape) for name, shape in LAYOUT.shapes.items()}
    name, bias = list(zero.items())[-1]
    whole = largest_norm(plan, LAYOUT, FIRST, 20)
    own = largest_norm(plan, LAYOUT, FIRST, 20, part=name)
    assert own < whole / 3
    admitted = torch.full_like(bias, 0.999 * own / math.sqrt(bias.numel()))
    check_size(Update(zero | {name: admitted}, None), plan, LAYOUT, FIRST, 20)
    with pytest.raises(WireError, match=f"its update is too large in {name}: "):
        check_size(Update(zero | {name: 1.01 * admitted}, None), plan, LAYOUT, FIRST, 20)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(momentum=st.floats(0, 0.99), pull=st.floats(0, 0.999), steps=st.integers(1, 60))
def test_a_proximal_term_never_makes_a_step_count_more(momentum: float, pull: float, steps: int) -> None:
    """So the bound of a plan without one holds: Σβ^j, at most 1 / (1 − β), for every step."""
    weights = step_weights(experiment(learning_rate=0.5, momentum=momentum, proximal=2 * pull).plan, 0, steps)
    most = [sum(momentum**later for later in range(left + 1)) for left in reversed(range(steps))]
    assert all(abs(weight) <= bound * (1 + 1e-9) for weight, bound in zip(weights, most, strict=True))


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS.keys())
def test_an_honest_client_with_more_records_than_the_fewest_stays_below_the_bound(changes: dict[str, Any]) -> None:
    """The bound is that of the fewest records, and no client with more makes larger updates."""
    plan = experiment(**changes).plan
    bounds = [largest_norm(plan, LAYOUT, FIRST, records) for records in range(1, 40)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[plan.batch_size - 1 :] == [bounds[-1]] * len(bounds[plan.batch_size - 1 :])


@pytest.mark.parametrize("noise", [{}, {"noise": "batch"}, {"noise_slots": "held", "record_sampling": "partition"}])
@pytest.mark.parametrize("records", [2, 4, 20, 1200])
def test_honest_clients_are_admitted_where_records_are_weights(noise: dict[str, Any], records: int) -> None:
    """A client with 1,200 records sends 60 times the mean client's update, and one with few does not get that room."""
    plan = experiment(weighting="records", mean_records=20.0, local_steps=2, **noise).plan
    direction = at_the_bound(plan, records)
    generator, update = torch.Generator().manual_seed(1), torch.zeros(LAYOUT.size)
    for _ in range(plan.local_steps):
        noised = direction + torch.randn(LAYOUT.size, generator=generator) * plan.noise_scale_at(0) * plan.noise_on_sum
        update = update - plan.learning_rate_at(0) * noised / min(plan.batch_size, records)
    sent = Update(LAYOUT.unflatten(update * records / 20.0), None)
    check_size(sent, plan, LAYOUT, FIRST, 2, records)
    larger = Update({name: 40 * value for name, value in sent.update.items()}, None)
    with pytest.raises(WireError, match="update is too large"):
        check_size(larger, plan, LAYOUT, FIRST, 2, records)
    if records == 1200:
        with pytest.raises(WireError, match="update is too large"):
            check_size(sent, plan, LAYOUT, FIRST, 2, 20)


def test_the_weighted_bound_grows_with_the_stated_records_only_above_a_batch() -> None:
    plan = experiment(weighting="records", mean_records=20.0).plan
    bounds = [largest_norm(plan, LAYOUT, FIRST, 1, records) for records in (1, 2, plan.batch_size, 10 * plan.batch_size)]
    assert bounds == pytest.approx([bounds[0], bounds[0], bounds[0], 10 * bounds[0]])
    unweighted = experiment().plan
    assert largest_norm(unweighted, LAYOUT, FIRST, 9, 1) == largest_norm(unweighted, LAYOUT, FIRST, 9)


def test_a_server_that_clips_itself_admits_any_size() -> None:
    assert largest_norm(experiment(method="fed-sdp").plan, LAYOUT, FIRST, 20) == math.inf
    assert largest_norm(experiment(method="fed-sdp", noise_at="client").plan, LAYOUT, FIRST, 20) < math.inf


def test_a_count_that_no_client_can_have_is_left_out() -> None:
    plan = experiment(clip="quantile(0.5, 1)").plan
    zero = LAYOUT.unflatten(torch.zeros(LAYOUT.size))
    check_size(Update(zero, 6.0), plan, LAYOUT, Round(0, 0, 1.0), 20)
    with pytest.raises(WireError, match="count is too large"):
        check_size(Update(zero, 1e6), plan, LAYOUT, Round(0, 0, 1.0), 20)


def test_without_privacy_the_median_judges() -> None:
    plan = experiment(method="nonprivate").plan
    cohort = {n: Update({"a": torch.full((4,), size)}, None) for n, size in enumerate([1.0, 2.0, 3.0, 900.0])}
    assert set(outliers(cohort, plan, 100.0)) == {3}
    assert not outliers(cohort, plan, 1000.0)
    assert not outliers(cohort, experiment().plan, 100.0)
    nothing = {n: Update({"a": torch.full((4,), size)}, None) for n, size in enumerate([0.0, 0.0, 1.0])}
    assert not outliers(nothing, plan, 100.0)


def test_a_norm_does_not_overflow() -> None:
    assert norm_of({"a": torch.full((4,), 3e38), "b": torch.zeros(())}) == pytest.approx(6e38)
