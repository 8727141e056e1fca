from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcdp.config.plan import Plan
from fedcdp.data.partition import partition
from fedcdp.engine import FunctionalEngine
from fedcdp.files.tree import Tree
from fedcdp.mechanism.noise import SeededNoise
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.methods import METHODS, Moment
from fedcdp.methods.aggregation import Aggregate, moving_average, server_update
from fedcdp.methods.server_optimizers import first_optimizer_state
from fedcdp.training.simulate import simulate

MODEL = nn.Linear(2, 3)
ENGINE = FunctionalEngine(MODEL, F.cross_entropy)
NOISE = SeededNoise(0, ENGINE.layout)


def weights() -> Tree:
    return {"weight": torch.arange(6.0).reshape(3, 2), "bias": torch.tensor([0.5, -0.5, 2.0])}


def updates(clients: int, seed: int = 0, scale: float = 1.0) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(clients, *w.shape, generator=generator) for name, w in weights().items()}


def after_round(plan: Plan, chunks: list[Tree], start: Tree | None = None) -> Tree:
    start = weights() if start is None else start
    received = Aggregate(start, plan)
    for chunk in chunks:
        received.add(chunk)
    nobody = torch.zeros(0, dtype=torch.int64)
    at = Moment(plan, ENGINE, NOISE, 0, nobody, nobody)
    return server_update(METHODS[plan.method], start, received, at)[0]


def plan_of(**fields: Any) -> Plan:
    return Plan(**{"method": "nonprivate", "per_round": 4} | fields)


@pytest.mark.parametrize("aggregation", ["fedsgd", "fedaveraging"])
@pytest.mark.parametrize("took_part", [1, 3, 4, 6])
def test_the_sum_is_divided_by_the_planned_number_of_clients_whoever_took_part(aggregation, took_part):
    sent = updates(took_part)
    moved = after_round(plan_of(aggregation=aggregation), [sent])
    for name, before in weights().items():
        torch.testing.assert_close(moved[name], before + sent[name].sum(0) / 4)


@pytest.mark.parametrize("rate", [0.1, 1.0, 10.0])
def test_the_server_learning_rate_scales_the_mean_update(rate):
    sent = updates(4)
    moved = after_round(plan_of(server_learning_rate=rate), [sent])
    for name, before in weights().items():
        torch.testing.assert_close(moved[name], before + rate * sent[name].mean(0))


@pytest.mark.parametrize("took_part", [0, 1, 3, 4])
def test_sending_models_and_sending_updates_agree_also_with_fewer_clients(took_part):
    chunks = [updates(1, seed) for seed in range(took_part)]
    by_updates = after_round(plan_of(aggregation="fedsgd", server_learning_rate=0.7), chunks)
    by_models = after_round(plan_of(aggregation="fedaveraging", server_learning_rate=0.7), chunks)
    for name in by_updates:
        torch.testing.assert_close(by_models[name], by_updates[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["fedsgd", "fedaveraging"])
def test_the_order_and_grouping_of_clients_do_not_matter_even_if_large_updates_cancel(aggregation):
    """In float32 the small updates would be lost beside 1e6 and come back or not depending on the order."""
    small, large = updates(20, seed=1, scale=1e-2), updates(1, seed=2, scale=1e6)
    opposite = {name: -value for name, value in large.items()}
    plan = plan_of(per_round=22, aggregation=aggregation)
    results = [
        after_round(plan, [large, small, opposite]),
        after_round(plan, [small, large, opposite]),
        after_round(plan, [opposite, {n: v[:7] for n, v in small.items()}, large, {n: v[7:] for n, v in small.items()}]),
        after_round(plan, [{n: torch.cat([small[n], opposite[n], large[n]]) for n in small}]),
    ]
    for result in results:
        for name, before in weights().items():
            expected = before.double() + small[name].double().sum(0) / 22
            torch.testing.assert_close(result[name].double(), expected, rtol=1e-6, atol=1e-6)


def test_the_global_weights_keep_their_type_and_the_given_ones_are_left_alone():
    start = weights()
    moved = after_round(plan_of(), [updates(4)], start)
    assert {value.dtype for value in moved.values()} == {torch.float32}
    assert all(torch.equal(start[name], value) for name, value in weights().items())


def test_nobody_leaves_the_weights_unchanged_to_the_bit_without_privacy():
    for aggregation in ("fedsgd", "fedaveraging"):
        moved = after_round(plan_of(aggregation=aggregation), [])
        assert all(torch.equal(moved[name], value) for name, value in weights().items())


def test_fed_sdp_noise_at_the_server_comes_also_when_nobody_took_part():
    """Otherwise the absence of noise would show that a Poisson round was empty."""
    plan = plan_of(method="fed-sdp", noise_at="server", noise_multiplier=2.0, clip=3.0)
    moved, noise = after_round(plan, []), NOISE.for_server(0, torch.device("cpu"), 6.0)
    for name, before in weights().items():
        torch.testing.assert_close(moved[name], before + noise[name] / 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "nonprivate"},
        {"method": "dssgd"},
        {"method": "fed-cdp", "secure_aggregation": True},
        {"method": "fed-sdp", "noise_at": "client"},
        {"method": "fed-sdp", "noise_at": "server"},
        {"method": "fed-sdp", "noise_at": "server", "client_sampling": "poisson", "aggregation": "fedaveraging"},
        {"method": "fed-sdp", "noise_at": "server", "clip": "quantile(0.5, 3)"},
    ],
    ids=str,
)
def test_an_optimisers_state_follows_from_the_released_models_alone(fields):
    """m_t = (W(t+1) − W(t)) / s: what anybody knows who gets the models, and nothing of the raw sum."""
    plan = plan_of(
        **{"clip": 3.0, "noise_multiplier": 2.0, "server_learning_rate": 0.5} | fields, server_optimizer="momentum"
    )
    method, nobody, now = METHODS[plan.method], torch.zeros(0, dtype=torch.int64), weights()
    state = first_optimizer_state(plan, now)
    for round_ in range(3):
        received = Aggregate(now, plan)
        received.add(updates(3, seed=round_))
        at = Moment(plan, ENGINE, NOISE, round_, nobody, nobody, current_clip=3.0 if plan.quantile else None)
        after, state = server_update(method, now, received, at, state)
        for name, value in after.items():
            torch.testing.assert_close(state.momentum[name], (value.double() - now[name]) / 0.5, rtol=1e-4, atol=1e-5)
        now = after


def empty_first_round(plan: Plan, clients: int) -> Plan:
    """The plan with the first seed for which nobody takes part in round 0."""
    seeds = (seed for seed in range(1000) if len(choose_clients(plan.but(seed=seed), clients, 0)) == 0)
    return plan.but(seed=next(seeds))


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
@pytest.mark.parametrize("method", ["nonprivate", "fed-cdp", "dssgd"])
def test_a_poisson_round_without_clients_leaves_the_model_unchanged(method, sampling):
    plan = Plan(
        method=method, rounds=1, per_round=1, client_sampling="poisson", record_sampling=sampling, batch_size=2,
        local_steps=2,
    )  # fmt: skip
    data = torch.ones(9, 2), torch.zeros(9, dtype=torch.int64)
    run = simulate(MODEL, partition(data, clients=3, scheme="iid"), empty_first_round(plan, 3))
    trained = dict(run.model.named_parameters())
    assert run.metrics[0]["clients"] == 0
    assert all(torch.equal(trained[name], p) for name, p in MODEL.named_parameters())


@pytest.mark.parametrize("kept", [0.0, 0.25, 0.9])
def test_a_moving_average_keeps_its_share_of_the_old_average(kept):
    old, new = weights(), {name: value + 4 for name, value in weights().items()}
    average = moving_average(old, new, kept)
    for name, value in old.items():
        torch.testing.assert_close(average[name], kept * value + (1 - kept) * (value + 4))


def test_the_moving_average_of_a_run_starts_at_the_initial_model_and_does_not_steer_the_training():
    data = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    federation = partition(data, clients=3, scheme="iid")
    plan = Plan(method="nonprivate", rounds=1, per_round=3, batch_size=2, local_steps=2, record_sampling="partition")
    models = [MODEL]
    for rounds in (1, 2, 3):
        models.append(simulate(MODEL, federation, plan.but(rounds=rounds)).model)
    averaged = dict(simulate(MODEL, federation, plan.but(rounds=3, ema=0.6)).model.named_parameters())
    for name, value in averaged.items():
        path = [dict(model.named_parameters())[name] for model in models]
        expected = 0.6 * (0.6 * (0.6 * path[0] + 0.4 * path[1]) + 0.4 * path[2]) + 0.4 * path[3]
        torch.testing.assert_close(value, expected)
