"""`make_private`: the words of Opacus as a plan, and DP-SGD as the result."""

from __future__ import annotations

from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import poisson
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedcdp
from fedcdp.errors import ModelError, PlanError
from fedcdp.training.adoption import PrivateTraining, _enough_slots
from tests.support.dp_sgd import clouds, dp_sgd, flat, network


def private(data: Any = None, **changes: Any) -> PrivateTraining:
    usual = {"epochs": 2, "batch_size": 20, "learning_rate": 0.5, "noise_multiplier": 1.0}
    return fedcdp.make_private(network(), clouds(200) if data is None else data, **usual | changes)


# The plan ------------------------------------------------------------------------------------------------------------


def test_the_words_of_opacus_become_a_plan() -> None:
    made = private(max_grad_norm=0.7, target_delta=1e-6, seed=3, secure_noise=True)
    plan = made.plan
    assert (plan.method, plan.noise, plan.clip_mode, plan.record_sampling) == ("fed-cdp", "batch", "flat", "poisson")
    assert (plan.clip_at(0), plan.noise_multiplier, plan.delta, plan.learning_rate_at(0)) == (0.7, 1.0, 1e-6, 0.5)
    assert (plan.rounds, plan.per_round, plan.local_steps, plan.batch_size, plan.seed) == (20, 1, 1, 20, 3)
    assert plan.secure_noise
    assert made.steps_per_epoch == 10


@pytest.mark.parametrize(
    ("records", "batch", "drop_last", "steps", "expected"),
    [
        (200, 20, False, 10, 20),
        (200, 30, False, 7, 28),
        (200, 30, True, 6, 33),
        (20, 30, False, 1, 20),
        (20, 30, True, 1, 20),
    ],
)
def test_a_loader_brings_its_rate_and_batch(records: int, batch: int, drop_last: bool, steps: int, expected: int) -> None:
    loader = DataLoader(TensorDataset(*clouds(records)), batch_size=batch, shuffle=True, drop_last=drop_last)
    made = private(loader, batch_size=None)
    assert (made.steps_per_epoch, made.plan.batch_size) == (steps, expected)


@settings(max_examples=30)
@given(expected=st.integers(1, 10_000), steps=st.integers(1, 10**6), delta=st.floats(1e-12, 0.1))
def test_a_step_hardly_ever_overflows_its_slots(expected: int, steps: int, delta: float) -> None:
    slots = _enough_slots(fedcdp.Plan(batch_size=expected, rounds=steps, local_steps=1, delta=delta))
    assert poisson.sf(slots - 1, expected) <= delta / 1000 / steps
    assert slots <= 2 * expected + 12 * (40 + expected**0.5), "more than needed costs time"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_epsilon": 3}, "give exactly one"),
        ({"noise_multiplier": None}, "give exactly one"),
        ({"batch_size": None}, "batch_size: give it"),
        ({"batch_size": 0}, "batch_size: 0 is not allowed"),
        ({"epochs": 1.5}, "epochs: 1.5 is not allowed"),
        ({"rounds": 4}, "rounds: make_private sets it; use epochs"),
        ({"noise": "example"}, "noise: make_private sets it; make a fedcdp.Plan"),
        ({"momentum": 0.9}, "momentum: make_private sets it; a step is a round"),
        ({"clients": 50}, "batch_size: 20 is not allowed; 50 clients need at least 50"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"target_delta": 0.0}, "delta: 0.0 is not allowed"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        private(**changes)


def test_a_federation_has_its_clients_and_validation() -> None:
    federation = fedcdp.partition(clouds(200), clients=4, scheme="iid")
    for more in ({"clients": 2}, {"validation": clouds(20)}):
        with pytest.raises(PlanError, match="a Federation has both"):
            private(federation, **more)


def test_a_network_that_mixes_examples_is_refused_at_once() -> None:
    mixing = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(ModelError, match="BatchNorm1d"):
        fedcdp.make_private(mixing, clouds(40), epochs=1, batch_size=10, learning_rate=1, noise_multiplier=1.0)


# ε -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("records", "batch", "sigma", "epochs"), [(60_000, 600, 1.1, 15), (1_500, 100, 1.0, 10)])
def test_epsilon_is_that_of_dp_sgd(records: int, batch: int, sigma: float, epochs: int) -> None:
    data = (torch.zeros(records, 5), torch.arange(records) % 2)
    made = private(data, batch_size=batch, noise_multiplier=sigma, epochs=epochs)
    step = dp_accounting.PoissonSampledDpEvent(batch / records, dp_accounting.GaussianDpEvent(sigma))
    exact = PLDAccountant().compose(step, epochs * records // batch).get_epsilon(1e-5)
    assert exact <= made.privacy().row("server").epsilon * (1 + 1e-9)
    assert made.privacy().row("server").epsilon <= 1.01 * exact


def test_a_step_has_no_more_slots_than_records() -> None:
    assert private(clouds(30), batch_size=15).plan.slots == 30
    assert private(slots=25).plan.slots == 25


def test_noise_is_calibrated_to_epsilon() -> None:
    made = private(noise_multiplier=None, target_epsilon=2.0)
    assert 1.98 <= made.privacy().row("server").epsilon <= 2.0


def test_more_clients_leave_epsilon_of_the_server_as_it_is() -> None:
    one, ten = private(), private(clients=10)
    assert (ten.plan.per_round, ten.plan.batch_size, ten.plan.rounds) == (10, 2, one.plan.rounds)
    assert ten.privacy().row("server").epsilon == pytest.approx(one.privacy().row("server").epsilon, rel=0.01)


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 4])
def test_training_is_dp_sgd(clients: int) -> None:
    made = private(noise_multiplier=0.0, max_grad_norm=0.2, clients=clients)
    before = flat(made.model)
    run = made.train()
    torch.testing.assert_close(flat(run.model), flat(dp_sgd(made)), rtol=0, atol=1e-6)
    assert torch.equal(flat(made.model), before)
    assert (flat(run.model) - before).norm() > 0.1


@pytest.mark.parametrize("clients", [1, 4])
def test_noise_on_the_sum_of_a_client_is_sigma_times_clip(clients: int) -> None:
    model = nn.Linear(2000, 10)
    data = (torch.zeros(40, 2000), torch.arange(40) % 10)
    options = {"epochs": 1, "batch_size": 40, "learning_rate": 2.0, "max_grad_norm": 0.5, "clients": clients}
    noised, plain = (
        fedcdp.make_private(model, data, noise_multiplier=sigma, **options).train().model  # type: ignore[arg-type]
        for sigma in (1.5, 0.0)
    )
    deviation = float((flat(noised) - flat(plain)).std())
    assert deviation == pytest.approx(2.0 * 1.5 * 0.5 * clients**0.5 / 40, rel=0.03)


def test_clients_of_unequal_size_weigh_by_their_records() -> None:
    federation = fedcdp.partition(clouds(200), indices=[range(150), range(150, 200)])
    made = private(federation)
    assert (made.plan.per_round, made.plan.batch_size, made.plan.weighting) == (2, 10, "records")
    assert made.plan.privacy(federation, model=made.model).row("server").epsilon > private().privacy().row("server").epsilon


def test_owners_of_records_are_the_clients() -> None:
    data = fedcdp.as_dataset(clouds(60))
    owners = torch.arange(60).numpy() % 3
    splits = fedcdp.Splits("owned", data, None, None, "as given", owners=owners, owner_names=("a", "b", "c"))  # type: ignore[arg-type]
    assert private(splits, batch_size=30).federation.names == ("a", "b", "c")


def test_a_bound_may_follow_a_quantile() -> None:
    run = private(max_grad_norm="quantile(0.5, 1)").train()
    assert len({row["clip"] for row in run.metrics}) > 10
    assert run.privacy().row("server").epsilon > private().privacy().row("server").epsilon


def test_a_model_is_evaluated_once_an_epoch() -> None:
    run = private(validation=clouds(50)).train()
    assert [row["round"] for row in run.metrics if "accuracy" in row] == [10, 20]
    assert run.releases == 20
