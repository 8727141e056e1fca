"""Who and what is drawn, by frequency. Bounds are five standard errors around the exact value, at fixed seeds."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedcdp.config.plan import Plan
from fedcdp.mechanism import sampling as sampling_module
from fedcdp.mechanism.sampling import Draw, choose_clients, choose_records, choose_records_of_steps, words_below


def draw_one(plan: Plan, size: int, round_: int = 0, step: int = 0, client: int = 0) -> list[int]:
    """The positions that one client uses in one step."""
    draw = choose_records(plan, torch.tensor([client]), torch.tensor([size]), round_, step)
    return draw.positions[0][draw.present[0]].tolist()


def inclusion(draw: Draw, size: int) -> torch.Tensor:
    """Which of its records each client uses [clients, size], as 0 and 1, and never more than once."""
    counts = torch.zeros(len(draw.positions), size, dtype=torch.int64)
    counts.scatter_add_(1, draw.positions, draw.present.long())
    assert counts.max() <= 1
    return counts


def many(plan: Plan, size: int, clients: int = 4000, round_: int = 0, step: int = 0) -> torch.Tensor:
    return inclusion(choose_records(plan, torch.arange(clients), torch.full((clients,), size), round_, step), size)


# Clients -------------------------------------------------------------------------------------------------------------


def test_fixed_clients_are_exactly_so_many_and_all_different_in_ascending_order():
    plan = Plan(per_round=7)
    for round_ in range(20):
        chosen = choose_clients(plan, 30, round_)
        assert len(set(chosen.tolist())) == 7
        assert chosen.tolist() == sorted(chosen.tolist())
        assert chosen.min() >= 0
        assert chosen.max() < 30


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_all_clients_take_part_when_all_are_planned(sampling):
    plan = Plan(per_round=9, client_sampling=sampling)
    assert all(choose_clients(plan, 9, round_).tolist() == list(range(9)) for round_ in range(20))


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_every_client_is_chosen_at_the_planned_rate(sampling):
    plan, rounds = Plan(per_round=3, client_sampling=sampling), 4000
    counts = sum(np.bincount(choose_clients(plan, 10, round_), minlength=10) for round_ in range(rounds))
    assert np.abs(counts - 0.3 * rounds).max() < 5 * math.sqrt(rounds * 0.3 * 0.7)


def test_the_number_of_poisson_clients_is_binomial_and_sometimes_zero():
    plan, rounds = Plan(per_round=2, client_sampling="poisson"), 3000
    sizes = np.bincount([len(choose_clients(plan, 8, round_)) for round_ in range(rounds)], minlength=9)
    chances = stats.binom.pmf(np.arange(9), 8, 0.25)
    assert (np.abs(sizes - rounds * chances) <= 5 * np.sqrt(rounds * chances * (1 - chances)) + 1).all()
    assert sizes[0] > 0


def test_poisson_clients_are_chosen_independently_of_each_other():
    plan, rounds = Plan(per_round=3, client_sampling="poisson"), 4000
    taken = np.zeros((rounds, 6))
    for round_ in range(rounds):
        taken[round_, choose_clients(plan, 6, round_)] = 1
    correlations = np.corrcoef(taken.T)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(rounds)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_the_choice_of_clients_is_a_function_of_seed_and_round(sampling):
    plan = Plan(per_round=10, client_sampling=sampling)
    first = [choose_clients(plan, 50, round_).tolist() for round_ in range(5)]
    assert [choose_clients(plan, 50, round_).tolist() for round_ in range(5)] == first
    assert len({tuple(each) for each in first}) == 5
    assert choose_clients(plan.but(seed=1), 50, 0).tolist() != first[0]


# Poisson records -----------------------------------------------------------------------------------------------------


def test_every_record_joins_a_poisson_step_at_rate_b_over_n():
    counts = many(Plan(batch_size=4, slots=20), size=20).sum(0)
    assert (counts - 4000 * 0.2).abs().max() < 5 * math.sqrt(4000 * 0.2 * 0.8)


def test_the_size_of_a_poisson_batch_is_binomial():
    sizes = many(Plan(batch_size=3, slots=12), size=12).sum(1).bincount(minlength=13).numpy()
    chances = stats.binom.pmf(np.arange(13), 12, 0.25)
    assert (np.abs(sizes - 4000 * chances) <= 5 * np.sqrt(4000 * chances * (1 - chances)) + 1).all()
    assert sizes[0] > 0


def test_records_join_independently_of_each_other():
    taken = many(Plan(batch_size=3, slots=10), size=10).double().numpy()
    correlations = np.corrcoef(taken.T)[np.triu_indices(10, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(4000)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize(
    "other", [{"step": 1}, {"round_": 1}, {"seed": 1}, {"shift": 1}], ids=["step", "round", "seed", "client"]
)
def test_steps_rounds_seeds_and_clients_draw_independently(sampling, other):
    plan = Plan(batch_size=3, record_sampling=sampling)
    plan_then = plan.but(seed=other.get("seed", 0))
    clients = torch.arange(4000)
    sizes = torch.full((4000,), 10)
    first = inclusion(choose_records(plan, clients, sizes, 0, 0), 10)
    then = inclusion(
        choose_records(plan_then, clients + other.get("shift", 0), sizes, other.get("round_", 0), other.get("step", 0)),
        10,
    )
    for record in range(10):
        correlation = np.corrcoef(first[:, record].numpy(), then[:, record].numpy())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(4000)


def test_poisson_batches_never_exceed_the_slots_and_the_rest_is_dropped_uniformly():
    taken = many(Plan(batch_size=4, slots=4), size=8)
    sizes = taken.sum(1)
    assert sizes.max() == 4
    full_chance = stats.binom.sf(3, 8, 0.5)
    assert abs(int((sizes == 4).sum()) - 4000 * full_chance) < 5 * math.sqrt(4000 * full_chance * (1 - full_chance))
    full = taken[sizes == 4]
    assert (full.sum(0) - len(full) / 2).abs().max() < 5 * math.sqrt(len(full) / 4)


def test_a_capped_batch_is_a_part_of_the_uncapped_one():
    few, enough = Plan(batch_size=4, slots=4), Plan(batch_size=4, slots=16)
    for client in range(200):
        assert set(draw_one(few, 16, client=client)) <= set(draw_one(enough, 16, client=client))


def test_a_client_with_fewer_records_than_a_batch_uses_each_of_them_once():
    for sampling in ("poisson", "fixed", "partition"):
        for size in (1, 2, 4, 5):
            drawn = draw_one(Plan(batch_size=5, record_sampling=sampling), size, step=3)
            assert sorted(drawn) == list(range(size))


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
def test_real_slots_come_first_and_the_shape_is_always_that_of_the_slots(sampling):
    plan = Plan(batch_size=3, record_sampling=sampling)
    draw = choose_records(plan, torch.arange(50), torch.tensor([1, 2, 7, 30, 300] * 10), 0, 1)
    assert draw.positions.shape == draw.present.shape == (50, plan.slots)
    assert (draw.present.long().diff(dim=1) <= 0).all()


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
def test_no_position_lies_outside_a_clients_own_records_even_in_empty_slots(sampling):
    plan, sizes = Plan(batch_size=3, record_sampling=sampling), torch.tensor([1, 2, 7, 30, 300] * 10)
    for step in range(5):
        draw = choose_records(plan, torch.arange(50), sizes, 0, step)
        assert (draw.positions[draw.present] < sizes[:, None].expand_as(draw.positions)[draw.present]).all()
        assert (draw.positions >= 0).all()
        assert (draw.positions < sizes.max()).all()


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
def test_what_a_client_draws_does_not_depend_on_the_clients_beside_it(sampling):
    plan = Plan(batch_size=3, record_sampling=sampling)
    clients, sizes = torch.tensor([9, 4, 17, 2]), torch.tensor([5, 2, 40, 11])
    together = choose_records(plan, clients, sizes, 2, 6)
    for row, (client, size) in enumerate(zip(clients.tolist(), sizes.tolist(), strict=True)):
        alone = choose_records(plan, torch.tensor([client]), torch.tensor([size]), 2, 6)
        assert torch.equal(together.present[row], alone.present[0])
        real = alone.present[0]
        assert torch.equal(together.positions[row][real], alone.positions[0][real])


# Fixed and partition -------------------------------------------------------------------------------------------------


def test_fixed_sampling_takes_exactly_b_different_records_each_as_often():
    taken = many(Plan(batch_size=3, record_sampling="fixed"), size=12)
    assert (taken.sum(1) == 3).all()
    assert (taken.sum(0) - 1000).abs().max() < 5 * math.sqrt(4000 * 0.25 * 0.75)


def test_fixed_sampling_takes_every_pair_as_often():
    taken = many(Plan(batch_size=2, record_sampling="fixed"), size=5).double()
    pairs = (taken.T @ taken)[tuple(torch.triu_indices(5, 5, 1))]
    assert (pairs - 400).abs().max() < 5 * math.sqrt(4000 * 0.1 * 0.9)


def test_partition_takes_consecutive_batches_and_wraps_around():
    plan = Plan(batch_size=3, record_sampling="partition")
    assert [draw_one(plan, 7, step=step) for step in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]]


def test_partition_starts_anew_every_round_and_is_the_same_for_every_client():
    plan = Plan(batch_size=3, record_sampling="partition")
    first = [draw_one(plan, 7, step=step) for step in range(3)]
    assert [draw_one(plan, 7, round_=5, step=step, client=8) for step in range(3)] == first


def test_partition_uses_a_record_at_most_so_often_as_privacy_counts():
    plan, size, steps = Plan(batch_size=4, record_sampling="partition"), 7, 5
    uses = np.bincount([position for step in range(steps) for position in draw_one(plan, size, step=step)])
    assert uses.max() == math.ceil(steps * 4 / size)


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
@pytest.mark.parametrize("at_once", [1, 200, 2**25])
def test_all_steps_at_once_draw_what_each_draws(sampling, at_once, monkeypatch):
    monkeypatch.setattr(sampling_module, "_AT_ONCE", at_once)
    plan = Plan(record_sampling=sampling, batch_size=3, local_steps=7)
    clients, sizes = torch.tensor([4, 0, 9]), torch.tensor([20, 2, 5])
    together = choose_records_of_steps(plan, clients, sizes, 3)
    for step in range(7):
        alone = choose_records(plan, clients, sizes, 3, step)
        assert torch.equal(together.positions[step], alone.positions)
        assert torch.equal(together.present[step], alone.present)


@given(st.integers(1, 10**6), st.lists(st.integers(1, 10**7), min_size=1, max_size=20))
def test_no_record_joins_a_step_more_often_than_its_rate(batch_size: int, sizes: list[int]) -> None:
    """The accountant amplifies by q = B/N, so rounding must never raise the real rate above it."""
    below = words_below(batch_size, torch.tensor(sizes)).tolist()
    for size, words in zip(sizes, below, strict=True):
        rate = min(Fraction(1), Fraction(batch_size, size))
        assert rate - Fraction(1, 2**32) < Fraction(words, 2**32) <= rate
