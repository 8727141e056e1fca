"""Noise by its distribution.

Statistical bounds are five standard errors around the exact value: σ/√(2n) for a standard deviation, 1/√n for a
correlation of n independent pairs. Seeds are fixed, so a test either always passes or always fails.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.partition import partition
from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.noise import SeededNoise, deviation_of_count, deviation_of_step_sum
from fedcdp.methods import METHODS, Local, Moment, train_locally
from fedcdp.models.networks import build
from fedcdp.training.simulate import simulate

SIGMA, BOUND, BATCH, PLANNED = 1.5, 2.0, 4, 10
MODEL = build("mlp", (150,), 50)
LAYOUT = Layout.of(MODEL)
ENGINE = FunctionalEngine(MODEL, F.cross_entropy)
NOISE = SeededNoise(3, LAYOUT)


def plan_of(**fields: Any) -> Plan:
    defaults = {"noise_multiplier": SIGMA, "clip": BOUND, "batch_size": BATCH, "per_round": PLANNED, "seed": 3}
    return Plan(**defaults | fields)


def moment(plan: Plan, clients: list[int], **fields: Any) -> Moment:
    defaults = {"round": 0, "expected_batch": torch.full((len(clients),), plan.batch_size)}
    return Moment(plan, ENGINE, NOISE, clients=torch.tensor(clients), **defaults | fields)


def weights_for(clients: int) -> Tree:
    return {name: p.detach().expand(clients, *p.shape) for name, p in MODEL.named_parameters()}


def batch_of(present: list[list[bool]]) -> Batch:
    mask = torch.tensor(present)
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(*mask.shape, 150, generator=generator)
    return Batch(inputs, torch.randint(50, mask.shape, generator=generator), mask)


def flat(tree: Tree, lead: int = 1) -> np.ndarray:
    return LAYOUT.flatten(tree, lead).double().numpy()


def assert_deviation(values: np.ndarray, expected: float) -> None:
    assert abs(values.std() - expected) < 5 * expected / math.sqrt(2 * values.size)
    assert abs(values.mean()) < 5 * expected / math.sqrt(values.size)


def assert_uncorrelated(left: np.ndarray, right: np.ndarray) -> None:
    assert abs(np.corrcoef(left, right)[0, 1]) < 5 / math.sqrt(left.size)
    assert abs(np.corrcoef(left**2, right**2)[0, 1]) < 5 / math.sqrt(left.size)


CONVENTIONS = [
    ("example", "poisson", SIGMA * BOUND * math.sqrt(3 * BATCH)),
    ("example", "partition", SIGMA * BOUND * math.sqrt(BATCH)),
    ("example", "fixed", SIGMA * BOUND * math.sqrt(BATCH)),
    ("batch", "poisson", SIGMA * BOUND),
    ("cohort", "poisson", SIGMA * BOUND / PLANNED),
]

# Scale ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("convention", "sampling", "expected"), CONVENTIONS)
def test_the_deviation_of_a_steps_sum_by_convention(convention, sampling, expected):
    plan = plan_of(noise=convention, record_sampling=sampling)
    assert deviation_of_step_sum(plan, 0) == pytest.approx(expected)


@pytest.mark.parametrize(("convention", "sampling", "expected"), CONVENTIONS)
def test_a_step_carries_that_noise_when_its_batch_is_empty(convention, sampling, expected):
    plan = plan_of(noise=convention, record_sampling=sampling)
    total = METHODS["fed-cdp"].gradient_sum(weights_for(2), batch_of([[False], [False]]), moment(plan, [5, 6])).total
    assert_deviation(flat(total), expected)


@pytest.mark.parametrize(("convention", "sampling", "expected"), CONVENTIONS)
@pytest.mark.parametrize("tapped", [False, True])
def test_a_step_carries_the_same_noise_whatever_the_batch(convention, sampling, expected, tapped):
    plan = plan_of(noise=convention, record_sampling=sampling)
    at = moment(plan, [5, 6, 7], tap=(lambda *_: None) if tapped else None)
    batch = batch_of([[True] * BATCH, [True] + [False] * (BATCH - 1), [False] * BATCH])
    silent = moment(plan.but(noise_multiplier=0.0), [5, 6, 7])
    method = METHODS["fed-cdp"]
    noise = flat(method.gradient_sum(weights_for(3), batch, at).total) - flat(
        method.gradient_sum(weights_for(3), batch, silent).total
    )
    for of_client in noise:
        assert_deviation(of_client, expected)
    alone = method.gradient_sum(weights_for(1), batch_of([[False] * BATCH]), moment(plan, [5], tap=at.tap)).total
    np.testing.assert_allclose(noise[0], flat(alone)[0], atol=1e-4)


@pytest.mark.parametrize("tapped", [False, True])
def test_the_noise_is_divided_by_the_expected_batch_not_the_real_one(tapped):
    """Clients of one record, of B, and of more, each with an empty batch: σC√S / min(B, N_i) on the mean."""
    plan = plan_of(learning_rate=1.0, local_steps=1)
    sizes = torch.tensor([1, BATCH, 10 * BATCH])
    at = moment(plan, [1, 2, 3], expected_batch=sizes.clamp(max=BATCH), tap=(lambda *_: None) if tapped else None)
    before = {name: p.detach() for name, p in MODEL.named_parameters()}
    update = flat(train_locally(METHODS["fed-cdp"], before, [batch_of([[False]] * 3)], at))
    for of_client, divisor in zip(update, [1, BATCH, BATCH], strict=True):
        assert_deviation(of_client, SIGMA * BOUND * math.sqrt(3 * BATCH) / divisor)


@pytest.mark.parametrize(("follows", "expected"), [(True, SIGMA * 2.0), (False, SIGMA * 6.0)])
@pytest.mark.parametrize("convention", ["example", "batch", "cohort"])
def test_under_a_decaying_bound_the_noise_shrinks_with_it_or_stays_at_that_of_the_first_round(follows, expected, convention):
    plan = plan_of(method="fed-cdp-decay", clip="linear(6, 2)", rounds=5, noise_follows_clip=follows, noise=convention)
    factor = {"example": math.sqrt(3 * BATCH), "batch": 1.0, "cohort": 1 / PLANNED}[convention]
    total = METHODS["fed-cdp-decay"].gradient_sum(weights_for(1), batch_of([[False]]), moment(plan, [5], round=4)).total
    assert_deviation(flat(total), expected * factor)


def test_fed_sdp_noise_at_the_client_is_sigma_c_on_each_update():
    plan = plan_of(method="fed-sdp", noise_at="client", noise="cohort")
    still = {name: torch.zeros(2, *p.shape) for name, p in MODEL.named_parameters()}
    assert_deviation(flat(METHODS["fed-sdp"].release(still, Local(still), moment(plan, [3, 4]))), SIGMA * BOUND)


def test_fed_sdp_noise_at_the_server_is_sigma_c_once_on_the_sum():
    plan = plan_of(method="fed-sdp", noise_at="server")
    nothing = {name: torch.zeros(p.shape) for name, p in MODEL.named_parameters()}
    total = METHODS["fed-sdp"].sanitise_sum(nothing, moment(plan, [3, 4, 5]))
    assert_deviation(flat(total, lead=0), SIGMA * BOUND)


@pytest.mark.parametrize("fields", [{"noise_at": "server"}, {"noise_at": "client"}])
def test_fed_sdp_noise_keeps_the_first_rounds_scale_where_the_plan_says_so(fields):
    plan = plan_of(method="fed-sdp", clip="linear(6, 2)", rounds=3, noise_follows_clip=False, **fields)
    still = {name: torch.zeros(1, *p.shape) for name, p in MODEL.named_parameters()}
    at = moment(plan, [3], round=2)
    released = METHODS["fed-sdp"].release(still, Local(still), at)
    total = METHODS["fed-sdp"].sanitise_sum({name: value[0] for name, value in released.items()}, at)
    assert_deviation(flat(total, lead=0), SIGMA * 6)


# Distribution and independence ---------------------------------------------------------------------------------------


def draws() -> dict[str, np.ndarray]:
    """One draw at a place, and one at each place that differs from it in a single respect."""
    one, other = torch.tensor([5]), torch.tensor([6])
    examples = flat(NOISE.for_examples(2, one, 3, 3, 1.0), lead=2)[0]
    return {
        "a step": flat(NOISE.for_step(2, one, 3, 1.0))[0],
        "another round": flat(NOISE.for_step(3, one, 3, 1.0))[0],
        "another client": flat(NOISE.for_step(2, other, 3, 1.0))[0],
        "another step": flat(NOISE.for_step(2, one, 4, 1.0))[0],
        "another seed": flat(SeededNoise(4, LAYOUT).for_step(2, one, 3, 1.0))[0],
        "its first slot": examples[0],
        "its second slot": examples[1],
        "its third slot": examples[2],
        "another client's first slot": flat(NOISE.for_examples(2, other, 3, 1, 1.0), lead=2)[0, 0],
        "another step's first slot": flat(NOISE.for_examples(2, one, 4, 1, 1.0), lead=2)[0, 0],
        "the update": flat(NOISE.for_update(2, one, 1.0))[0],
        "another client's update": flat(NOISE.for_update(2, other, 1.0))[0],
        "another round's update": flat(NOISE.for_update(3, one, 1.0))[0],
        "the update of client 0": flat(NOISE.for_update(2, torch.tensor([0]), 1.0))[0],
        "the first step of client 0": flat(NOISE.for_step(2, torch.tensor([0]), 0, 1.0))[0],
        "the server": flat(NOISE.for_server(2, torch.device("cpu"), 1.0), lead=0),
        "the server in another round": flat(NOISE.for_server(3, torch.device("cpu"), 1.0), lead=0),
    }


def counts() -> dict[str, np.ndarray]:
    """The same for a quantile's indicators: 4,000 clients, or the first of as many slots."""
    clients = torch.arange(4000)
    first, second, *_ = NOISE.for_indicators(2, clients, 9, 1.0).numpy().T
    server = [NOISE.for_server_count(round_, torch.device("cpu"), 1.0) for round_ in range(4000)]
    return {
        "a count": NOISE.for_count(2, clients, 1.0).numpy(),
        "another round": NOISE.for_count(3, clients, 1.0).numpy(),
        "another seed": SeededNoise(4, LAYOUT).for_count(2, clients, 1.0).numpy(),
        "its first slot": first,
        "its second slot": second,
        "another round's first slot": NOISE.for_indicators(3, clients, 9, 1.0).numpy()[:, 0],
        "the server": np.array(server),
    }


def test_the_noise_of_indicators_is_standard_normal_and_independent():
    drawn = list(counts().values())
    for index, left in enumerate(drawn):
        assert_deviation(left, 1.0)
        assert stats.kstest(left, "norm").pvalue > 1e-4
        for right in drawn[index + 1 :]:
            assert_uncorrelated(left, right)


def test_no_indicator_shares_its_noise_with_a_gradient_or_an_update():
    """By place: the coordinates of any other draw for the same client have the same counters, but for the stream."""
    clients = torch.tensor([0, 1, 5])
    others = [NOISE.for_step(2, clients, 0, 1.0), NOISE.for_update(2, clients, 1.0)]
    others += [
        {name: value[:, slot] for name, value in NOISE.for_examples(2, clients, 0, 3, 1.0).items()} for slot in range(3)
    ]
    server = flat(NOISE.for_server(2, torch.device("cpu"), 1.0), lead=0)
    counted = np.concatenate(
        [NOISE.for_count(2, clients, 1.0).numpy()[:, None], NOISE.for_indicators(2, clients, 9, 1.0).numpy()], axis=1
    )
    for drawn in [*map(flat, others), server[None]]:
        assert (drawn[:, :10] != counted).all()
        assert (drawn[:, :9] != counted[:, 1:]).all()
    assert NOISE.for_server_count(2, torch.device("cpu"), 1.0) not in {*server[:4], *counted[0]}


def test_the_noise_of_a_count_does_not_depend_on_who_is_asked_for_with_it():
    clients = torch.tensor([4, 9, 2])
    for draw in (lambda those: NOISE.for_count(1, those, 2.0), lambda those: NOISE.for_indicators(1, those, 3, 2.0)):
        for row in range(3):
            assert torch.equal(draw(clients[row : row + 1])[0], draw(clients)[row])
    assert torch.equal(NOISE.for_indicators(1, clients, 2, 2.0), NOISE.for_indicators(1, clients, 5, 2.0)[:, :2])


@pytest.mark.parametrize(("convention", "sampling", "expected"), CONVENTIONS)
def test_the_deviation_of_a_count_by_convention(convention, sampling, expected):
    plan = plan_of(noise=convention, record_sampling=sampling, clip="quantile(0.5, 2)", quantile_noise=7.0)
    assert deviation_of_count(plan) == pytest.approx(expected / (SIGMA * BOUND) * 7.0)
    assert deviation_of_step_sum(plan, 3, 5.0) == pytest.approx(expected / BOUND * 5.0)


def test_rounds_clients_steps_slots_purposes_and_seeds_are_independent():
    drawn = list(draws().items())
    for index, (_, left) in enumerate(drawn):
        for _, right in drawn[index + 1 :]:
            assert_uncorrelated(left, right)


@pytest.mark.parametrize("name", draws())
def test_every_draw_is_standard_normal(name):
    values = draws()[name]
    assert_deviation(values, 1.0)
    assert stats.kstest(values, "norm").pvalue > 1e-4


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 32, 64, 150])
def test_coordinates_are_independent(lag):
    values = draws()["a step"]
    assert_uncorrelated(values[:-lag], values[lag:])


def test_tensors_of_one_network_get_different_noise():
    drawn = NOISE.for_step(0, torch.tensor([1]), 0, 1.0)
    first, second = drawn["1.weight"].flatten(), drawn["3.weight"].flatten()
    n = min(len(first), len(second))
    assert_uncorrelated(first[:n].double().numpy(), second[:n].double().numpy())


def test_the_noise_of_clients_does_not_depend_on_who_is_asked_for_with_them_or_in_which_order():
    clients = torch.tensor([4, 9, 2, 7])
    for draw in (
        lambda those: NOISE.for_step(1, those, 2, 1.0),
        lambda those: NOISE.for_examples(1, those, 2, 3, 1.0),
        lambda those: NOISE.for_update(1, those, 1.0),
    ):
        together = draw(clients)
        backwards = draw(clients.flip(0))
        for row in range(4):
            alone = draw(clients[row : row + 1])
            for name, value in together.items():
                assert torch.equal(alone[name][0], value[row])
                assert torch.equal(backwards[name][3 - row], value[row])


def test_the_noise_of_a_slot_does_not_depend_on_how_many_slots_there_are():
    few, many = (NOISE.for_examples(1, torch.tensor([3]), 2, slots, 1.0) for slots in (2, 5))
    assert all(torch.equal(many[name][:, :2], few[name]) for name in few)


def test_the_deviation_scales_the_noise():
    one, three = (flat(NOISE.for_step(1, torch.tensor([3]), 2, deviation)) for deviation in (1.0, 3.0))
    np.testing.assert_allclose(three, 3 * one, rtol=1e-6)


def test_one_draw_for_the_sum_and_one_for_each_slot_have_the_same_distribution():
    plan = plan_of(noise="example")
    empty = batch_of([[False]] * 4)
    summed = METHODS["fed-cdp"].gradient_sum(weights_for(4), empty, moment(plan, [1, 2, 3, 4])).total
    one_by_one = (
        METHODS["fed-cdp"].gradient_sum(weights_for(4), empty, moment(plan, [1, 2, 3, 4], tap=lambda *_: None)).total
    )
    left, right = flat(summed).ravel(), flat(one_by_one).ravel()
    assert_deviation(left, SIGMA * BOUND * math.sqrt(3 * BATCH))
    assert_deviation(right, SIGMA * BOUND * math.sqrt(3 * BATCH))
    assert stats.ks_2samp(left, right).pvalue > 1e-4
    assert_uncorrelated(left, right)


# Which weights -------------------------------------------------------------------------------------------------------


def trained_pair(model: nn.Module, plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after training with the plan's noise and without."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
    federation = partition(data, clients=2, scheme="iid")
    noisy = simulate(model, federation, plan).model
    clean = simulate(model, federation, plan.but(noise_multiplier=0.0)).model
    return dict(noisy.named_parameters()), dict(clean.named_parameters())


@pytest.mark.parametrize(
    "fields",
    [
        {"noise": "example"},
        {"noise": "batch"},
        {"noise": "cohort"},
        {"method": "fed-sdp", "noise_at": "server"},
        {"method": "fed-sdp", "noise_at": "client"},
    ],
)
def test_every_trainable_weight_is_noised_biases_too_and_frozen_ones_are_untouched(fields):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    plan = Plan(rounds=2, per_round=2, local_steps=2, batch_size=2, noise_multiplier=1.0, clip=1.0, learning_rate=0.1)
    noisy, clean = trained_pair(model, plan.but(**fields))
    for name, given in model.named_parameters():
        if given.requires_grad:
            assert (noisy[name] != clean[name]).all()
        else:
            assert torch.equal(noisy[name], given)


@pytest.mark.parametrize("method", ["nonprivate", "dssgd"])
def test_methods_that_are_not_private_add_no_noise(method):
    plan = Plan(method=method, rounds=1, per_round=2, local_steps=2, batch_size=2, noise_multiplier=5.0)
    noisy, clean = trained_pair(nn.Linear(4, 3), plan)
    assert all(torch.equal(noisy[name], clean[name]) for name in noisy)
