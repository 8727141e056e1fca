"""Whole trainings by `simulate` give the weights that a naive loop over clients, steps, examples and layers gives.

The loop (naive.py) gets the clients and records that were drawn, and unit noise for the same (round, client, step); the
draws themselves are tested where they are made. It scales, clips, adds and divides by itself.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.config.schedules import quantile
from fedcdp.data.partition import Federation, partition
from fedcdp.files.tree import Inputs, Layout, each_tensor
from fedcdp.mechanism.noise import SeededNoise
from fedcdp.mechanism.sampling import choose_clients, choose_records
from fedcdp.training.simulate import simulate
from tests.support import naive
from tests.support.pairs import sample_first

TOLERANCE = 1e-5  # float32 against float64


def federation_of(inputs: Tensor, targets: Tensor, sizes: list[int]) -> Federation:
    starts = [sum(sizes[:client]) for client in range(len(sizes))]
    lists = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    return partition((inputs, targets), indices=lists)


def unit_noise(model: nn.Module, seed: int) -> naive.Unit:
    noise = SeededNoise(seed, Layout.of(model))

    def of_one(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value[0] for name, value in draw.items()}

    return naive.Unit(
        step=lambda round_, client, step: of_one(noise.for_step(round_, torch.tensor([client]), step, 1.0)),
        update=lambda round_, client: of_one(noise.for_update(round_, torch.tensor([client]), 1.0)),
        server=lambda round_: noise.for_server(round_, torch.device("cpu"), 1.0),
        count=lambda round_, client: noise.for_count(round_, torch.tensor([client]), 1.0).item(),
        server_count=lambda round_: noise.for_server_count(round_, torch.device("cpu"), 1.0),
    )


def records_of_step(plan: Plan, federation: Federation, client: int, round_: int, step: int) -> list[int]:
    order = federation.indices(client).tolist()
    if plan.record_sampling == "partition":
        return naive.batches_in_order(order, plan.batch_size, plan.local_steps)[step]
    draw = choose_records(plan, torch.tensor([client]), torch.tensor([len(order)]), round_, step)
    return [order[position] for position in draw.positions[0][draw.present[0]].tolist()]


def mean_records(plan: Plan, federation: Federation) -> float | None:
    if plan.weighting == "equal":
        return None
    sizes = [len(federation.indices(client)) for client in range(federation.clients)]
    return plan.mean_records or sum(sizes) / len(sizes)


def record_of(inputs: Inputs, record: int) -> Inputs:
    return each_tensor(inputs, lambda value: value[record])


def train_naively(model: nn.Module, federation: Federation, plan: Plan, **plain: Any) -> naive.Weights:
    setting = naive.Setting(
        **{
            "method": plan.method,
            "clips": [plan.clip.start] * plan.rounds,
            "rates": [plan.learning_rate.start] * plan.rounds,
            "planned": plan.per_round,
            "batch": plan.batch_size,
            "slots": plan.slots,
            "sigma": plan.noise_multiplier,
            "flat": plan.clip_mode == "flat",
            "convention": plan.noise,
            "noise_at": plan.noise_at,
            "momentum": plan.momentum,
            "proximal": plan.proximal,
            "server_rates": [plan.server_learning_rate_at(round_) for round_ in range(plan.rounds)],
            "optimizer": plan.server_optimizer,
            "beta1": plan.server_momentum,
            "beta2": plan.server_beta2,
            "tau": plan.server_epsilon,
            "averaging": plan.aggregation == "fedaveraging",
            "quantile": getattr(plan.clip, "target", None),
            "quantile_noise": plan.quantile_noise,
            "quantile_rate": plan.quantile_rate,
            "mean_records": mean_records(plan, federation),
        }
        | plain
    )
    data, unit, weights = federation.train, unit_noise(model, plan.seed), naive.trainable(model)
    memory: dict[str, naive.Weights] = {}
    for round_ in range(plan.rounds):
        updates, counts = [], []
        for client in choose_clients(plan, federation.clients, round_).tolist():
            steps = []
            for step in range(plan.local_steps):
                chosen = records_of_step(plan, federation, client, round_, step)
                steps.append([(record_of(data.inputs, record), data.targets[record]) for record in chosen])
            held = len(federation.indices(client))
            update, count = naive.train_client(model, weights, steps, held, setting, unit, round_, client)
            updates.append(update)
            counts.append(count)
        weights = naive.move_server(model, weights, updates, setting, unit, round_, memory)
        if setting.quantile is not None and round_ + 1 < plan.rounds:
            setting.clips[round_ + 1] = naive.next_clip(counts, setting, unit, round_)
    return weights


def assert_close(trained: dict[str, Tensor], expected: naive.Weights) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(trained[name].detach().double(), value, rtol=TOLERANCE, atol=TOLERANCE)


def assert_same_training(
    model: nn.Module, federation: Federation, plan: Plan, chunk: int | None = None, **plain: Any
) -> None:
    expected = train_naively(model, federation, plan, **plain)
    trained = dict(simulate(model, federation, plan, chunk=chunk).model.named_parameters())
    before = naive.trainable(model)
    assert any(not torch.equal(expected[name], before[name]) for name in expected)
    assert_close(trained, expected)


def small_plan(**fields: Any) -> Plan:
    """Three of four clients, two steps of three records, bounds that clip some gradients and not others."""
    defaults = {
        "method": "fed-cdp", "rounds": 1, "per_round": 3, "local_steps": 2, "batch_size": 3, "clip": 0.5, "seed": 5,
        "noise_multiplier": 0.0, "learning_rate": 0.2, "record_sampling": "partition",
    }  # fmt: skip
    return Plan(**defaults | fields)


SIZES = [6, 8, 5, 5]
METHODS: dict[str, dict[str, Any]] = {
    "nonprivate": {"method": "nonprivate"},
    "fed-sdp at the server": {"method": "fed-sdp", "noise_at": "server", "clip": 0.1},
    "fed-sdp at the client": {"method": "fed-sdp", "noise_at": "client", "clip": 0.1},
    "fed-cdp": {"method": "fed-cdp"},
    "dssgd": {"method": "dssgd", "share_fraction": 0.3},
}


def shared(plan: Plan) -> float:
    """The share of the entries that is sent."""
    return (plan.share_fraction if plan.method == "dssgd" else 1.0) * (1 - plan.compression)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_without_noise_equals_the_naive_loop_for_every_network(problem, method):
    federation = federation_of(problem.inputs, problem.targets, SIZES)
    plan = small_plan(**METHODS[method])
    assert_same_training(problem.model, federation, plan, sent=shared(plan))


@pytest.mark.parametrize("convention", ["example", "batch", "cohort"])
def test_a_noisy_fed_cdp_round_equals_the_naive_loop_for_every_network(problem, convention):
    federation = federation_of(problem.inputs, problem.targets, SIZES)
    assert_same_training(problem.model, federation, small_plan(noise_multiplier=0.7, noise=convention))


@pytest.mark.parametrize("placement", ["server", "client"])
@pytest.mark.parametrize("aggregation", ["fedsgd", "fedaveraging"])
def test_noisy_fed_sdp_rounds_equal_the_naive_loop(small, placement, aggregation):
    federation = federation_of(small.inputs, small.targets, SIZES)
    plan = small_plan(
        method="fed-sdp", noise_at=placement, noise_multiplier=0.7, clip=0.1, rounds=3, aggregation=aggregation,
        server_learning_rate=1.5,
    )  # fmt: skip
    assert_same_training(small.model, federation, plan)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("aggregation", ["fedsgd", "fedaveraging"])
def test_rounds_with_momentum_server_rate_and_noise_equal_the_naive_loop(small, method, aggregation):
    federation = federation_of(small.inputs, small.targets, SIZES)
    plan = small_plan(
        **METHODS[method], rounds=3, local_steps=4, momentum=0.8, server_learning_rate=0.6, noise_multiplier=0.4,
        aggregation=aggregation,
    )  # fmt: skip
    assert_same_training(small.model, federation, plan, sent=shared(plan))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi"])
def test_rounds_of_a_server_optimiser_equal_the_naive_loop(small, method, optimizer):
    federation = federation_of(small.inputs, small.targets, SIZES)
    plan = small_plan(
        **METHODS[method], rounds=4, server_optimizer=optimizer, server_learning_rate="linear(0.5, 0.1)",
        server_momentum=0.7, server_beta2=0.8, server_epsilon=0.05, noise_multiplier=0.4, client_sampling="poisson",
        aggregation="fedaveraging", momentum=0.5, proximal=0.5, local_steps=3,
    )  # fmt: skip
    assert_same_training(small.model, federation, plan, sent=shared(plan), server_rates=[0.5, 11 / 30, 7 / 30, 0.1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_local_steps_with_a_proximal_term_equal_the_naive_loop(small, method, momentum):
    federation = federation_of(small.inputs, small.targets, SIZES)
    plan = small_plan(
        **METHODS[method], rounds=2, local_steps=4, momentum=momentum, proximal=2.0, noise_multiplier=0.4,
        weighting="records",
    )  # fmt: skip
    assert_same_training(small.model, federation, plan, sent=shared(plan))
    without = train_naively(small.model, federation, plan, sent=shared(plan), proximal=0.0)
    expected = train_naively(small.model, federation, plan, sent=shared(plan))
    assert max(float((expected[name] - without[name]).abs().max()) for name in without) > 100 * TOLERANCE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["layer", "flat"])
def test_clipping_each_layer_or_the_whole_equals_the_naive_loop(small, method, mode):
    federation = federation_of(small.inputs, small.targets, SIZES)
    plan = small_plan(**METHODS[method], clip_mode=mode, noise_multiplier=0.2)
    assert_same_training(small.model, federation, plan, sent=shared(plan))


def test_layer_and_flat_clipping_really_differ_here(small):
    """Otherwise the comparison above could not tell them apart."""
    federation = federation_of(small.inputs, small.targets, SIZES)
    by_layer, whole = (train_naively(small.model, federation, small_plan(), flat=flat) for flat in (False, True))
    assert max(float((by_layer[name] - whole[name]).abs().max()) for name in whole) > 100 * TOLERANCE


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(
    ("written", "clips"),
    [
        ("linear(0.9, 0.3)", [0.9, 0.7, 0.5, 0.3]),
        ("exponential(0.8, 0.1)", [0.8, 0.4, 0.2, 0.1]),
        ("cosine(0.9, 0.1)", [0.9, 0.7, 0.3, 0.1]),
        ("proportional(0.8)", [0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_fed_cdp_with_a_decaying_bound_equals_the_naive_loop(small, written, clips, follows):
    federation = federation_of(small.inputs, small.targets, SIZES)
    plan = small_plan(
        method="fed-cdp-decay", rounds=4, clip=written, noise_multiplier=0.5, learning_rate="linear(0.4, 0.1)",
        noise_follows_clip=follows,
    )  # fmt: skip
    plain = {"method": "fed-cdp", "clips": clips, "rates": [0.4, 0.3, 0.2, 0.1]}
    noise_clips = clips if follows else [clips[0]] * 4
    assert_same_training(small.model, federation, plan, noise_clips=noise_clips, **plain)


QUANTILE: dict[str, dict[str, Any]] = {
    "fed-cdp, example noise": {"method": "fed-cdp", "noise": "example"},
    "fed-cdp, batch noise": {"method": "fed-cdp", "noise": "batch"},
    "fed-cdp, cohort noise": {"method": "fed-cdp", "noise": "cohort"},
    "fed-sdp at the server": {"method": "fed-sdp", "noise_at": "server"},
    "fed-sdp at the client": {"method": "fed-sdp", "noise_at": "client"},
}


@pytest.mark.parametrize("name", QUANTILE)
@pytest.mark.parametrize("sampling", ["poisson", "partition"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chunk": 1, "clip_mode": "flat"},
        {"chunk": 2, "client_sampling": "poisson", "compression": 0.4, "aggregation": "fedaveraging"},
    ],
)
def test_a_bound_that_follows_a_quantile_equals_the_naive_loop(small, name, sampling, fields):
    """Weights and the bound of every round; clients of fewer records than a batch, and an example that is not finite."""
    inputs = small.inputs.clone()
    inputs[3] = math.nan
    federation = federation_of(inputs, small.targets, [9, 2, 6, 7])
    fields = dict(fields)
    chunk = fields.pop("chunk", None)
    start = 0.4 if QUANTILE[name]["method"] == "fed-cdp" else 0.1
    plan = small_plan(
        **QUANTILE[name], **fields, rounds=4, clip=f"quantile(0.7, {start})", noise_multiplier=0.2, quantile_noise=0.8,
        quantile_rate=1.5, record_sampling=sampling,
    )  # fmt: skip
    clips = [start] * plan.rounds
    expected = train_naively(small.model, federation, plan, clips=clips, sent=shared(plan))
    run = simulate(small.model, federation, plan, chunk=chunk)
    assert len(set(clips)) == plan.rounds
    assert [row["clip"] for row in run.metrics] == pytest.approx(clips, rel=1e-5)
    assert_close(dict(run.model.named_parameters()), expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_pruned_update_equals_the_naive_loop(small, method):
    federation = federation_of(small.inputs, small.targets, SIZES)
    plan = small_plan(**METHODS[method], compression=0.6, noise_multiplier=0.3)
    assert_same_training(small.model, federation, plan, sent=shared(plan))


def test_pruning_an_update_of_a_network_with_a_scalar_weight_equals_the_naive_loop(problem):
    federation = federation_of(problem.inputs, problem.targets, SIZES)
    assert_same_training(problem.model, federation, small_plan(compression=0.5, noise_multiplier=0.1), sent=0.5)


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", sample_first([2, 1, 5]))
def test_clients_of_different_sizes_equal_the_naive_loop_however_they_are_chunked(small, sampling, method, chunk):
    """One client has fewer records than a batch, one a single record."""
    federation = federation_of(small.inputs, small.targets, [9, 2, 1, 7, 5])
    plan = small_plan(**METHODS[method], per_round=5, record_sampling=sampling, noise_multiplier=0.3, local_steps=3)
    assert_same_training(small.model, federation, plan, chunk, sent=shared(plan))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "fields", [{}, {"mean_records": 3.5, "aggregation": "fedaveraging"}], ids=["own mean", "given mean"]
)
def test_clients_weighted_by_records_equal_the_naive_loop(small, method, fields):
    """Weighted before an update is clipped or pruned; one client has a single record."""
    federation = federation_of(small.inputs, small.targets, [9, 2, 1, 7, 5])
    plan = small_plan(
        **METHODS[method], **fields, weighting="records", per_round=4, rounds=2, noise_multiplier=0.3, batch_size=6,
        compression=0.2,
    )  # fmt: skip
    assert_same_training(small.model, federation, plan, sent=shared(plan))
    equal = simulate(small.model, federation, plan.but(weighting="equal", mean_records=None))
    weighted = simulate(small.model, federation, plan)
    assert not torch.allclose(*(next(run.model.parameters()) for run in (equal, weighted)), atol=1e-3)


def test_weighting_by_records_takes_one_step_of_the_whole_federation(small):
    """One local step on all records: the sum of all gradients over the number of all records."""
    federation = federation_of(small.inputs, small.targets, [9, 2, 1, 7, 5])
    plan = small_plan(weighting="records", per_round=5, local_steps=1, batch_size=9)
    union = federation_of(small.inputs, small.targets, [24])
    together = simulate(small.model, union, plan.but(per_round=1, batch_size=24, weighting="equal"))
    assert_close(dict(simulate(small.model, federation, plan).model.named_parameters()), naive.trainable(together.model))


@pytest.mark.parametrize("method", METHODS)
def test_poisson_clients_equal_the_naive_loop(small, method):
    federation = federation_of(small.inputs, small.targets, SIZES)
    plan = small_plan(**METHODS[method], client_sampling="poisson", rounds=4, per_round=2, noise_multiplier=0.3)
    taking_part = {len(choose_clients(plan, 4, round_)) for round_ in range(4)}
    assert taking_part - {2}
    assert_same_training(small.model, federation, plan, sent=shared(plan))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_an_example_without_a_finite_gradient_contributes_nothing(small, method, bad):
    inputs = small.inputs.clone()
    inputs[[1, 7]] = bad
    federation = federation_of(inputs, small.targets, SIZES)
    plan = small_plan(**METHODS[method], per_round=4, record_sampling="fixed", batch_size=5, noise_multiplier=0.2)
    assert_same_training(small.model, federation, plan, sent=shared(plan))


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    widths = [4, *draw(st.lists(st.integers(1, 5), max_size=2)), 3]
    activation = draw(st.sampled_from([nn.Tanh, nn.Sigmoid, nn.Softplus]))
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 1000)))
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after, bias=draw(st.booleans())), activation()]
    for layer in layers[:-2:2]:
        layer.requires_grad_(draw(st.booleans()))
    return nn.Sequential(*layers[:-1])


@st.composite
def plans(draw: st.DrawFn, clients: int) -> Plan:
    batch = draw(st.integers(1, 4))
    sampling = draw(st.sampled_from(["poisson", "fixed", "partition"]))
    return Plan(
        method=draw(st.sampled_from(["nonprivate", "fed-sdp", "fed-cdp"])),
        rounds=draw(st.integers(1, 2)),
        per_round=draw(st.integers(1, clients)),
        local_steps=draw(st.integers(1, 3)),
        batch_size=batch,
        slots=draw(st.integers(batch, 3 * batch)) if sampling == "poisson" else None,
        record_sampling=sampling,
        client_sampling=draw(st.sampled_from(["fixed", "poisson"])),
        clip=draw(st.one_of(st.floats(0.01, 2.0), st.builds(quantile, st.floats(0.01, 0.99), st.floats(0.01, 2.0)))),
        quantile_noise=draw(st.floats(0.01, 3.0)),
        quantile_rate=draw(st.floats(0.01, 2.0)),
        clip_mode=draw(st.sampled_from(["layer", "flat"])),
        noise_multiplier=draw(st.just(0.0) | st.floats(1e-6, 2.0)),
        noise=draw(st.sampled_from(["example", "batch", "cohort"])),
        noise_at=draw(st.sampled_from(["server", "client"])),
        learning_rate=draw(st.floats(0.01, 0.3)),
        server_learning_rate=draw(st.floats(0.1, 2.0)),
        momentum=draw(st.floats(0.0, 0.95)),
        proximal=draw(st.just(0.0) | st.floats(0.0, 3.0)),
        server_optimizer=draw(st.sampled_from(["sgd", "momentum", "adam", "yogi"])),
        server_momentum=draw(st.floats(0.0, 0.95)),
        server_beta2=draw(st.floats(0.0, 0.999)),
        server_epsilon=draw(st.floats(0.1, 1.0)),
        aggregation=draw(st.sampled_from(["fedsgd", "fedaveraging"])),
        weighting=draw(st.sampled_from(["equal", "records"])),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    model=networks(),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    data=st.data(),
    chunk=st.sampled_from([None, 1, 2]),
)
def test_random_networks_federations_and_plans_equal_the_naive_loop(model, sizes, data, chunk):
    plan = data.draw(plans(len(sizes)))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(sum(sizes), 4, generator=generator)
    federation = federation_of(inputs, torch.randint(3, (sum(sizes),), generator=generator), sizes)
    expected = train_naively(model, federation, plan)
    assert_close(dict(simulate(model, federation, plan, chunk=chunk).model.named_parameters()), expected)
