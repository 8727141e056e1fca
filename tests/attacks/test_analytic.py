"""The closed form recovers examples exactly where there is something to recover, and knows when it has."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedcdp.attacks.analytic import Recovered, first_dense, invert_dense
from fedcdp.data.dataset import Dataset
from fedcdp.data.load import load
from fedcdp.errors import ModelError
from fedcdp.models.networks import build

DATA = os.environ.get("FEDCDP_DATA")  # read before a fixture hides it

quick = settings(deadline=None, derandomize=True, max_examples=40)
seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module")
def cancer() -> Dataset:
    return load("cancer").train


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some(data: Dataset, count: int, seed: int) -> Dataset:
    return data.take(torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count])


def gradients(model: nn.Module, batch: Dataset) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Of the first dense layer: the gradients of its weight and bias, and these themselves."""
    weight, bias = first_dense(model, tuple(batch.inputs.shape[1:]))
    named = {name: value for name, value in model.named_parameters() if name in (weight, bias)}
    loss = F.cross_entropy(model(batch.inputs), batch.targets)
    shown = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    return shown[weight], None if bias is None else shown[bias], named[weight], None if bias is None else named[bias]


def attacked(data: Dataset, count: int, seed: int, activation: str | None = None) -> tuple[Recovered, Dataset]:
    """The network for tables as initialised, and what the gradient over so many examples tells."""
    batch = some(data, count, seed)
    weight_gradient, bias_gradient, weight, bias = gradients(
        build("mlp", tuple(data.inputs.shape[1:]), data.classes, activation, seed), batch
    )
    return invert_dense(weight_gradient, bias_gradient, count, weight=weight, bias=bias), batch


def errors(recovered: Tensor, truth: Tensor) -> Tensor:
    """The mean squared error of each true example under the best assignment."""
    costs = (truth[:, None] - recovered[None]).square().mean(dim=2)
    rows, columns = linear_sum_assignment(costs.numpy())
    return costs[rows, columns]


def exact(recovered: Recovered, truth: Tensor) -> bool:
    return bool((errors(recovered.inputs, truth) < 1e-6).all())


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_one_example_is_exact_under_any_activation(cancer: Dataset, activation: str) -> None:
    for seed in range(40):
        recovered, batch = attacked(cancer, 1, seed, activation)
        assert recovered.found
        assert recovered.residual < 1e-6
        assert not recovered.up_to_scale
        assert exact(recovered, batch.inputs)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8])
def test_batches_of_up_to_eight_are_exact_and_known_to_be(cancer: Dataset, count: int) -> None:
    for seed in range(7):
        recovered, batch = attacked(cancer, count, seed)
        assert recovered.found
        assert recovered.consistency == 1
        assert exact(recovered, batch.inputs)


@pytest.mark.parametrize(("count", "seed"), [(5, 17), (5, 51), (5, 97), (8, 29), (8, 54), (8, 61)])
def test_batches_in_which_one_example_opens_most_units_are_exact(cancer: Dataset, count: int, seed: int) -> None:
    recovered, batch = attacked(cancer, count, seed)
    assert recovered.found
    assert exact(recovered, batch.inputs)


@pytest.mark.parametrize(("loss", "least"), [(1e-2, 5), (1e-4, 5), (1e-6, 4)])
def test_an_example_that_hardly_counts_is_recovered_all_the_same(cancer: Dataset, loss: float, least: int) -> None:
    # In float32: the units that it alone opens show it as sharply as any. Near the rounding, one batch may fail.
    recovered_exactly = 0
    for seed in range(5):
        batch, weight, bias = some(cancer, 3, seed), drawn(seed, 64, 30), drawn(seed + 1, 64)
        slopes = drawn(seed + 2, 3, 64) * (batch.inputs @ weight.T + bias > 0) * torch.tensor([1, 1, loss])[:, None]
        recovered = invert_dense(slopes.T @ batch.inputs, slopes.sum(dim=0), 3, weight=weight, bias=bias)
        recovered_exactly += exact(recovered, batch.inputs)
    assert recovered_exactly >= least


def test_what_is_called_found_is_exact_even_where_not_all_is_found(cancer: Dataset) -> None:
    # In the gradient of batch 144 one example is active only where another one is: its direction is not determined.
    recovered, batch = attacked(cancer, 4, 144)
    assert not recovered.found
    assert recovered.consistency is not None
    assert 0.9 < recovered.consistency < 1
    assert int((errors(recovered.inputs, batch.inputs) < 1e-6).sum()) == 3


@quick
@given(seed=seeds, units=st.integers(1, 40), features=st.integers(1, 40), size=st.sampled_from([1e-12, 1.0, 1e12]))
def test_any_rank_one_gradient_gives_its_input(seed: int, units: int, features: int, size: float) -> None:
    outer, truth = drawn(seed, units).double() * size, drawn(seed + 1, 1, features).double()
    recovered = invert_dense(outer[:, None] * truth, outer, 1)
    assert recovered.found
    torch.testing.assert_close(recovered.inputs, truth)


@quick
@given(seed=seeds, count=st.integers(2, 4), offset=st.floats(-8, 8), dead=st.integers(0, 20))
def test_features_of_any_scale_and_dead_units_do_no_harm(seed: int, count: int, offset: float, dead: int) -> None:
    scale = torch.logspace(-3, 5, 20, dtype=torch.float64)
    truth = drawn(seed, count, 20).double() + offset
    weight, bias = drawn(seed + 1, 64, 20).double(), -1e6 * (torch.arange(64) < dead).double()
    bias = bias - weight @ truth.mean(dim=0)  # every other unit is open for some and shut for some
    slopes = torch.where(truth @ weight.T + bias > 0, drawn(seed + 2, count, 64).double(), 0)
    recovered = invert_dense(slopes.T @ truth * scale, slopes.sum(dim=0), count, weight=weight / scale, bias=bias)
    assert recovered.found
    assert (errors(recovered.inputs / scale, truth) < 1e-6).all()


def test_without_the_weights_a_batch_is_recovered_but_not_judged(cancer: Dataset) -> None:
    hits = 0
    for seed in range(20):
        batch = some(cancer, 3, seed)
        recovered = invert_dense(*gradients(build("mlp", (30,), 2, None, seed), batch)[:2], 3)
        assert not recovered.found
        assert recovered.consistency is None
        hits += exact(recovered, batch.inputs)
    assert hits >= 19


def test_a_weight_without_its_bias_is_not_used(cancer: Dataset) -> None:
    weight_gradient, bias_gradient, weight, bias = gradients(build("mlp", (30,), 2), some(cancer, 3, 0))
    assert invert_dense(weight_gradient, bias_gradient, 3, weight=weight).consistency is None
    assert invert_dense(weight_gradient, None, 3, weight=weight, bias=bias).consistency is None


def without_bias(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 64, bias=False), nn.ReLU(), nn.Linear(64, 2))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_without_a_bias_the_direction_is_exact_and_its_length_left_to_the_caller(cancer: Dataset, count: int) -> None:
    for seed in range(10):
        batch = some(cancer, count, seed)
        weight_gradient, none, weight, _ = gradients(without_bias(seed), batch)
        assert none is None
        recovered = invert_dense(weight_gradient, None, count, weight=weight)
        assert recovered.found
        assert recovered.up_to_scale
        assert exact(recovered, F.normalize(batch.inputs))


def test_duplicates_are_recovered_once_and_the_rest_is_zero(cancer: Dataset) -> None:
    three = cancer.take(torch.tensor([7, 7, 8]))
    weight_gradient, bias_gradient, weight, bias = gradients(build("mlp", (30,), 2), three)
    recovered = invert_dense(weight_gradient, bias_gradient, 3, weight=weight, bias=bias)
    assert not recovered.found
    assert (errors(recovered.inputs[:2], three.inputs[1:]) < 1e-6).all()
    assert not recovered.inputs[2].any()


def test_more_examples_than_there_are_is_not_called_found(cancer: Dataset) -> None:
    weight_gradient, bias_gradient, weight, bias = gradients(build("mlp", (30,), 2), some(cancer, 2, 0))
    assert not invert_dense(weight_gradient, bias_gradient, 4, weight=weight, bias=bias).found


@pytest.mark.parametrize("count", [1, 3, 8])
def test_fewer_examples_than_there_are_is_not_called_found(cancer: Dataset, count: int) -> None:
    weight_gradient, bias_gradient, weight, bias = gradients(build("mlp", (30,), 2), some(cancer, count + 1, 0))
    recovered = invert_dense(weight_gradient, bias_gradient, count, weight=weight, bias=bias)
    assert not recovered.found
    assert recovered.residual > 1e-3


@pytest.mark.parametrize("learning_rate", [1.0, 0.1, 0.01])
def test_an_update_as_the_difference_of_rounded_weights_is_enough(cancer: Dataset, learning_rate: float) -> None:
    for seed in range(5):
        batch = some(cancer, 3, seed)
        weight_gradient, bias_gradient, weight, bias = gradients(build("mlp", (30,), 2, None, seed), batch)
        assert bias_gradient is not None
        assert bias is not None
        weight_update = weight - (weight - learning_rate * weight_gradient)
        bias_update = bias - (bias - learning_rate * bias_gradient)
        recovered = invert_dense(weight_update, bias_update, 3, weight=weight, bias=bias)
        assert (errors(recovered.inputs, batch.inputs) < 1e-4).all()


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_noise_is_recognised_at_once(cancer: Dataset, count: int) -> None:
    weight_gradient, bias_gradient, weight, bias = gradients(build("mlp", (30,), 2), some(cancer, count, 0))
    assert bias_gradient is not None
    size = float(weight_gradient.abs().max())
    noised = weight_gradient + size * drawn(1, 64, 30), bias_gradient + size * drawn(2, 64)
    start = time.process_time()
    recovered = invert_dense(*noised, count, weight=weight, bias=bias)
    assert time.process_time() - start < 0.5
    assert not recovered.found
    assert recovered.inputs.isfinite().all()
    assert (recovered.residual > 0.3) == (count < 30)  # 30 features and the bias hide no noise from 31 examples
    assert recovered.inputs.any() == (count == 1)


def test_a_batch_too_large_is_given_up_at_once(cancer: Dataset) -> None:
    start = time.process_time()
    recovered, _ = attacked(cancer, 32, 0)
    assert time.process_time() - start < 0.5
    assert not recovered.found
    assert not recovered.inputs.any()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_zeros_tell_nothing(count: int) -> None:
    for weight_gradient in (torch.zeros(64, 30), drawn(1, 64, 30), drawn(1, 64, 1) * drawn(2, 1, 30)):
        recovered = invert_dense(weight_gradient, torch.zeros(64), count)
        assert not recovered.found
        assert not recovered.inputs.any()


@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
def test_a_batch_without_a_relu_is_not_called_found(cancer: Dataset, activation: str) -> None:
    for count in (2, 3, 5):
        recovered, batch = attacked(cancer, count, 0, activation)
        assert not recovered.found
        assert recovered.residual < 1e-6
        assert not exact(recovered, batch.inputs)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [1, 3])
def test_a_gradient_that_is_not_finite_tells_nothing(value: float, count: int) -> None:
    weight_gradient, bias_gradient = drawn(1, 64, 30), drawn(2, 64)
    weight_gradient[3, 4] = value
    for recovered in (
        invert_dense(weight_gradient, bias_gradient, count),
        invert_dense(weight_gradient, None, count),
        invert_dense(drawn(1, 64, 30), bias_gradient * value, count),
    ):
        assert not recovered.found
        assert not recovered.inputs.any()


@quick
@given(
    seed=seeds,
    units=st.integers(1, 12),
    features=st.integers(1, 12),
    rank=st.integers(0, 12),
    count=st.integers(0, 20),
    power=st.sampled_from([-44, -30, 0, 30, 38]),
    open_share=st.sampled_from([0.1, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    biased=st.booleans(),
    judged=st.booleans(),
)
def test_no_gradient_raises_or_gives_what_is_not_finite(
    seed: int, units: int, features: int, rank: int, count: int, power: int, open_share: float, dtype: torch.dtype,
    biased: bool, judged: bool,
) -> None:  # fmt: skip
    masks = torch.rand(rank, units, generator=torch.Generator().manual_seed(seed)) < open_share
    slopes, truth = drawn(seed + 1, rank, units) * masks, drawn(seed + 2, rank, features).round()
    recovered = invert_dense(
        (slopes.T @ truth * 10.0**power).to(dtype),
        (slopes.sum(dim=0) * 10.0**power).to(dtype) if biased else None,
        count,
        weight=drawn(seed + 3, units, features) if judged else None,
        bias=drawn(seed + 4, units) if judged and biased else None,
        tries=600,
    )
    assert recovered.inputs.shape == (count, features)
    assert recovered.inputs.dtype == dtype
    assert recovered.inputs.isfinite().all()
    assert 0 <= recovered.residual <= 1 + 1e-9
    assert recovered.up_to_scale is not biased


def test_the_same_seed_gives_the_same_guess(cancer: Dataset) -> None:
    shown = gradients(build("mlp", (30,), 2), some(cancer, 8, 0))[:2]
    first, again = (invert_dense(*shown, 8, seed=5, tries=600) for _ in range(2))
    assert torch.equal(first.inputs, again.inputs)


def test_the_first_dense_layer_is_named_wherever_it_is() -> None:
    assert first_dense(build("mlp", (105,), 2), (105,)) == ("1.weight", "1.bias")
    assert first_dense(build("mlp", (1, 6, 5), 2), (1, 6, 5)) == ("1.weight", "1.bias")
    assert first_dense(nn.Linear(4, 2), (4,)) == ("weight", "bias")
    nested = nn.Sequential(
        nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)), nn.ReLU(), nn.Linear(3, 2)
    )
    assert first_dense(nested, (2, 2)) == ("1.1.weight", None)
    frozen = nn.Linear(4, 2)
    frozen.bias.requires_grad_(False)
    assert first_dense(frozen, (4,)) == ("weight", None)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (build("cnn", (1, 10, 10), 2), "whose first layer is dense; this one starts with Conv2d$"),
        (nn.Sequential(nn.Flatten()), "whose first layer is dense; this one starts with Sequential$"),
        (nn.Sequential(nn.LayerNorm(100), nn.Linear(100, 2)), "starts with LayerNorm$"),
        (nn.Linear(10, 2), r"dense, trainable and over all 100 inputs; this one starts with Linear\(in_features=10, "),
        (nn.Linear(100, 2).requires_grad_(False), "dense, trainable and over all 100 inputs; this one starts with Linear"),
    ],
)
def test_a_network_that_starts_otherwise_is_refused_in_a_sentence(model: nn.Module, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        first_dense(model, (1, 10, 10))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def adult() -> Dataset:
    if not DATA or not (Path(DATA) / "adult").is_dir():
        pytest.skip("FEDCDP_DATA does not name a directory with adult")
    return load("adult", DATA, download=False).train


@pytest.mark.full
@pytest.mark.parametrize(
    ("count", "trials"), [(1, 100), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(3, 100), (8, 20)])]
)
def test_records_of_adult_are_exact_in_batches_too(adult: Dataset, count: int, trials: int) -> None:
    hits = 0
    for seed in range(trials):
        recovered, batch = attacked(adult, count, seed)
        hits += recovered.found
        assert not recovered.found or exact(recovered, batch.inputs)
    assert hits >= 0.95 * trials
