"""Numbers at the edge: each is refused in one sentence, or does what docs/reliability.md says."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.accounting.calibrate import Target, calibrate_noise
from fedcdp.accounting.population import Population
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError, FedcdpError, ModelError, PlanError

METHODS = ("nonprivate", "dssgd", "fed-sdp", "fed-cdp", "fed-cdp-decay")
SMALL: dict[str, Any] = {"rounds": 2, "per_round": 2, "local_steps": 2, "batch_size": 2}
POPULATION = Population(clients=4, records=6, copies=1, layers=2)


def examples(count: int = 24, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % classes


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def trained(data: tuple[Tensor, Tensor] | None = None, clients: int = 4, model: nn.Module | None = None, **plan: Any) -> Any:
    federation = fedcdp.partition(data or examples(), clients=clients, scheme="iid")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fedcdp.simulate(model or network(), federation, fedcdp.Plan(**SMALL | plan))


def finite(run: Any) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in run.model.state_dict().values())


# Values of a plan ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["rounds", "per_round", "local_steps", "batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one_are_refused(field: str, value: int) -> None:
    with pytest.raises(PlanError, match=f"{field}: {value} is not allowed"):
        fedcdp.Plan(**SMALL | {field: value})


@pytest.mark.parametrize("delta", [0, 1, 1.5, -1, math.nan, math.inf, 5e-324])
def test_a_delta_that_is_no_probability_is_refused(delta: float) -> None:
    with pytest.raises(PlanError, match="delta: "):
        fedcdp.Plan(delta=delta)


@pytest.mark.parametrize(("delta", "warned"), [(0.5, True), (1 / 24, True), (1 / 25, False), (1e-5, False), (1e-300, False)])
def test_a_delta_of_one_in_the_records_or_more_is_remarked_on(delta: float, warned: bool) -> None:
    privacy = fedcdp.Plan(**SMALL, delta=delta).privacy(fedcdp.partition(examples(), clients=4, scheme="iid"))
    assert ("not below 1 / the number of records (24)" in str(privacy)) == warned
    assert all(row.epsilon >= 0 for row in privacy.rows)


def test_copies_of_a_record_do_not_count_as_more_records() -> None:
    federation = fedcdp.partition(examples(), clients=4, scheme="full")
    assert "records (24)" in str(fedcdp.Plan(**SMALL, delta=1 / 24).privacy(federation))


@pytest.mark.parametrize("sigma", [-1, math.nan, math.inf, 1e-300, 9e-7, 1.1e6, 1e300])
@pytest.mark.parametrize("method", ["fed-sdp", "fed-cdp"])
def test_noise_that_would_be_rounded_away_or_overflow_is_refused(sigma: float, method: str) -> None:
    with pytest.raises(PlanError, match="noise_multiplier: "):
        fedcdp.Plan(method=method, noise_multiplier=sigma)


def test_no_noise_is_an_infinite_epsilon() -> None:
    privacy = fedcdp.Plan(**SMALL, noise_multiplier=0).privacy(fedcdp.partition(examples(), clients=4, scheme="iid"))
    assert {row.epsilon for row in privacy.rows} == {math.inf}
    assert finite(trained(noise_multiplier=0))


@pytest.mark.parametrize("sigma", [1e-6, 1e6])
def test_the_least_and_the_most_noise_are_carried_and_accounted(sigma: float) -> None:
    assert finite(trained(noise_multiplier=sigma))
    privacy = fedcdp.Plan(**SMALL, noise_multiplier=sigma).privacy(fedcdp.partition(examples(), clients=4, scheme="iid"))
    assert (privacy.row("server").epsilon > 1e6) == (sigma < 1)
    assert (privacy.row("server").epsilon < 1e-4) == (sigma > 1)


@pytest.mark.parametrize(
    "clip",
    [0, -1, "inf", "nan", 1e-30, 1e30, 1e-300, 1e300, "linear(1, 1e-11)", "quantile(0.5, 1e5)", "quantile(0.5, 1e-5)"],
)
def test_a_bound_that_float32_norms_cannot_be_held_to_is_refused(clip: float | str) -> None:
    with pytest.raises(PlanError, match="clip: "):
        fedcdp.Plan(clip=clip)


def test_a_bound_that_follows_the_learning_rate_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError, match="clip: proportional"):
        fedcdp.Plan(clip="proportional(1)", learning_rate="linear(1, 1e-12)")


@pytest.mark.parametrize("clip", [1e-10, 1e10, "quantile(0.5, 1e-4)", "quantile(0.5, 1e4)"])
@pytest.mark.parametrize("method", ["fed-sdp", "fed-cdp"])
def test_the_least_and_the_largest_bound_train(clip: float | str, method: str) -> None:
    assert finite(trained(clip=clip, method=method))


@pytest.mark.parametrize("rate", [0, -1, "inf", "nan", 1e-31, 1e31, 1e300])
@pytest.mark.parametrize("field", ["learning_rate", "server_learning_rate"])
def test_a_learning_rate_beyond_float32_is_refused(rate: Any, field: str) -> None:
    with pytest.raises(PlanError, match=f"{field}: "):
        fedcdp.Plan(**{field: float(rate)})


@pytest.mark.parametrize("method", [method for method in METHODS if method != "fed-sdp"])  # whose noise is on the update
def test_a_vanishing_learning_rate_leaves_the_model_as_it_is(method: str) -> None:
    torch.manual_seed(1)
    model = network()
    run = trained(model=model, method=method, learning_rate=1e-30)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("target", [1e-300, 1e-12])
def test_a_target_below_every_loss_is_met_by_the_noise_that_hides_everything_at_this_delta(target: float) -> None:
    plan = calibrate_noise(fedcdp.Plan(**SMALL), POPULATION, Target(target))
    assert Target(target).reached(plan, POPULATION) == 0.0


def test_a_target_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(PlanError, match="no noise multiplier gives"):
        calibrate_noise(fedcdp.Plan(**SMALL, noise="batch"), POPULATION, Target(1.0, "example"))
    with pytest.raises(PlanError, match="no noise multiplier gives"):
        calibrate_noise(fedcdp.Plan(**SMALL, delta=1e-300), POPULATION, Target(1e-12))


@pytest.mark.parametrize("target", [1e6, 1e300])
def test_a_target_that_is_no_protection_gets_some_noise_all_the_same(target: float) -> None:
    plan = calibrate_noise(fedcdp.Plan(**SMALL), POPULATION, Target(target))
    assert 0 < plan.noise_multiplier < 0.1
    assert Target(target).reached(plan, POPULATION) <= target


@pytest.mark.parametrize("target", [0, -1, math.nan, math.inf])
def test_a_target_that_is_no_positive_number_is_refused(target: float) -> None:
    with pytest.raises(PlanError, match="epsilon: "):
        Target(target)


# For how many layers an ε holds --------------------------------------------------------------------------------------


def test_an_epsilon_without_a_model_says_for_how_many_layers_it_holds() -> None:
    federation, plan = fedcdp.partition(examples(), clients=4, scheme="iid"), fedcdp.Plan(**SMALL)
    assumed = plan.privacy(federation)
    assert "computed for the M = 3 layers of the paper's network; pass model= for your own" in str(assumed)
    deeper = plan.privacy(federation, model=nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)]))
    assert deeper.row("server").epsilon > assumed.row("server").epsilon
    assert "of the paper's network" not in str(deeper)
    flat = plan.but(clip_mode="flat").privacy(federation)
    assert "of the paper's network" not in str(flat)


# Data ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38, 1e30, 1e-40, 0.0])
def test_an_example_that_is_no_number_huge_or_denormal_does_no_harm(method: str, value: float) -> None:
    inputs, labels = examples()
    inputs[:3] = value
    assert finite(trained((inputs, labels), method=method))


@pytest.mark.parametrize("method", METHODS)
def test_the_smallest_federations_train(method: str) -> None:
    assert finite(trained(clients=1, per_round=1, method=method))
    assert finite(trained(per_round=1, method=method))
    assert finite(trained(examples(4), clients=4, method=method))  # one record each, so that classes are missing
    assert finite(trained(method=method, batch_size=50))
    assert finite(trained((examples()[0], torch.zeros(24, dtype=torch.int64)), method=method))


def test_labels_that_are_no_classes_are_refused() -> None:
    inputs, labels = examples()
    with pytest.raises(DataError, match="one whole number"):
        fedcdp.partition((inputs, labels / 0.0), clients=4)
    with pytest.raises(DataError, match="one whole number"):
        fedcdp.partition((inputs, labels + 0.5), clients=4)
    with pytest.raises(DataError, match="the label of record 0 is not allowed"):
        fedcdp.partition((inputs, labels - 1), clients=4)
    with pytest.raises(DataError, match="it must be from 0 to 2"):
        Dataset(inputs, labels + 1, 3)
    with pytest.raises(DataError, match="the dataset is empty"):
        fedcdp.partition((inputs[:0], labels[:0]), clients=4)


def test_a_class_without_an_output_is_refused_even_where_the_first_client_does_not_hold_it() -> None:
    data = (examples()[0], torch.arange(24) // 12)  # the first half are 0
    federation = fedcdp.partition(data, indices=[range(12), range(12, 24)])
    with pytest.raises(ModelError, match="the network has 1 outputs for the 2 classes"):
        fedcdp.simulate(network(outputs=1), federation, fedcdp.Plan(**SMALL))


# Networks ------------------------------------------------------------------------------------------------------------


class Casting(nn.Module):
    """A network in another precision, which takes and gives float32."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3).to(kind), kind

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.to(self.kind)).float()


class Undefined(nn.Linear):
    """A network whose loss is NaN, whatever it is shown."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * math.nan


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_weights_too_coarse_for_bounds_and_noise_are_refused(kind: torch.dtype, method: str) -> None:
    for model in (Casting(kind), network().to(kind)):
        with pytest.raises(ModelError, match=r"(layer|0)\.weight is") as refused:
            trained(model=model, method=method)
        assert "train in float32" in str(refused.value)


def test_frozen_weights_may_be_coarse() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5).half().requires_grad_(False), nn.Linear(5, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(nn.functional.linear(inputs, self.body.weight.float()))

    assert finite(trained(model=Frozen()))


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_is_never_a_number_leaves_noise_or_nothing(method: str) -> None:
    torch.manual_seed(2)
    model = Undefined(4, 3)
    run = trained(model=model, method=method)
    assert finite(run)
    if method in ("nonprivate", "dssgd"):
        assert torch.equal(run.model.weight, model.weight)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_first_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    model = network()
    model[0].weight.data[0, 0] = bad
    with pytest.raises(ModelError, match=r"0\.weight holds a weight that is not finite"):
        trained(model=model)


def test_a_network_without_anything_to_train_is_refused() -> None:
    for model in (nn.Flatten(), network().requires_grad_(False)):
        with pytest.raises(FedcdpError, match="no trainable parameter"):
            trained(model=model)
