"""Labels from the gradient of the last layer: where the rules are always right, how often otherwise, and where they fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from fedcdp.attacks.labels import infer_labels, last_layer
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.recipe import Seed
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import partition
from fedcdp.errors import ModelError, PlanError
from fedcdp.files.tree import Layout
from fedcdp.models.networks import build
from tests.support.pairs import sample_first
from tests.support.scenes import federation_of, one_example_each, scene

SHAPE = (1, 28, 28)
SINGLE = ("gradient", "agnostic", "negative-sum", "counts")


def inferred(captured: Captured, rule: Any, classes: int = 10, dummies: int | None = None, **knows: Any) -> Tensor:
    """The labels [victims, dummies], by default of as many dummies as there are examples."""
    shape = tuple(captured.inputs.shape[2:])
    seeds = Seed().draw(torch.arange(len(captured)), dummies or captured.inputs.shape[1], shape, 0)
    return infer_labels(captured, rule, classes, seeds, **knows)


def right(found: Tensor, captured: Captured) -> tuple[float, float]:
    """The share of examples whose label was found, however ordered, and of victims with all of theirs."""
    shares = []
    for labels, targets, present in zip(found, captured.targets, captured.present, strict=True):
        count = int(present.sum())
        both = [each.bincount(minlength=10) for each in (labels[:count], targets[present])]
        shares.append(float(torch.minimum(both[0], both[1]).sum()) / count)
    return sum(shares) / len(shares), sum(share == 1 for share in shares) / len(shares)


# One label ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "activation"), [("cpl", None), ("cnn", None), ("mlp", None), ("cnn", "tanh"), ("mlp", "sigmoid")]
)
def test_the_label_of_a_single_example_is_always_found(digits: Dataset, network: str, activation: str | None) -> None:
    there = scene(build(network, SHAPE, 10, activation), one_example_each(digits.take(torch.arange(60))))
    captured = there.look("type2", 60)
    for rule in SINGLE:
        assert torch.equal(inferred(captured, rule), captured.targets), rule


@pytest.mark.parametrize("method", ["nonprivate", "fed-cdp"])
def test_clipping_alone_does_not_hide_the_label(digits: Dataset, method: str) -> None:
    there = scene(
        build("cnn", SHAPE, 10), one_example_each(digits.take(torch.arange(60))), method=method, clip=0.01,
        noise_multiplier=0.0,
    )  # fmt: skip
    captured = there.look("type2", 60)
    assert torch.equal(inferred(captured, "gradient"), captured.targets)


@pytest.mark.parametrize("network", ["cnn", "mlp"])
def test_under_the_papers_fed_cdp_a_label_is_found_by_chance(digits: Dataset, network: str) -> None:
    there = scene(
        build(network, SHAPE, 10), one_example_each(digits.take(torch.arange(200))), method="fed-cdp", clip=4.0,
        noise_multiplier=6.0,
    )  # fmt: skip
    captured = there.look("type2", 200)
    for rule in SINGLE:
        hits = int((inferred(captured, rule) == captured.targets).sum())
        assert binomtest(hits, 200, 0.1).pvalue > 1e-3, rule


def two_classes(digits: Dataset, activation: type[nn.Module], bias: bool) -> Captured:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), activation(), nn.Linear(32, 2, bias=bias))
    data = Dataset(digits.inputs[:60], digits.targets[:60] % 2, 2)
    return scene(model, one_example_each(data)).look("type2", 60)


@pytest.mark.parametrize(
    ("activation", "bias"), [(nn.ReLU, True), (nn.ReLU, False), (nn.Sigmoid, False), (nn.Tanh, True)]
)  # fmt: skip
def test_of_two_classes_the_bias_tells_or_features_that_are_not_negative(
    digits: Dataset, activation: type[nn.Module], bias: bool
) -> None:
    captured = two_classes(digits, activation, bias)
    assert torch.equal(inferred(captured, "gradient", classes=2), captured.targets)


def test_of_two_classes_without_a_bias_features_of_any_sign_hide_the_label(digits: Dataset) -> None:
    """The rows of the two classes are each other's negative: which is which cannot be told."""
    captured = two_classes(digits, nn.Tanh, bias=False)
    rows = captured.seen["3.weight"]
    torch.testing.assert_close(rows[:, 0], -rows[:, 1])
    share = float((inferred(captured, "gradient", classes=2) == captured.targets).double().mean())
    assert share < 1


def test_the_bias_of_a_network_that_is_a_single_layer_is_used() -> None:
    """Logistic regression: its features are the inputs, of any sign."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 6, generator=generator), torch.randint(2, (40,), generator=generator)
    captured = scene(nn.Linear(6, 2), federation_of(inputs, targets, [1] * 40)).look("type2", 40)
    assert last_layer(captured.engine.layout, 2) == ("weight", "bias")
    assert torch.equal(inferred(captured, "gradient", classes=2), captured.targets)


def test_where_features_have_any_sign_the_agnostic_rule_is_right_and_sums_are_not() -> None:
    torch.manual_seed(2)
    inputs, targets = torch.randn(60, 6), torch.randint(4, (60,))
    captured = scene(nn.Linear(6, 4, bias=False), federation_of(inputs, targets, [1] * 60)).look("type2", 60)
    assert torch.equal(inferred(captured, "agnostic", classes=4), captured.targets)
    assert torch.equal(inferred(captured, "gradient", classes=4), captured.targets)
    assert float((inferred(captured, "negative-sum", classes=4) == captured.targets).double().mean()) < 0.9


# Counts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["iid", "shards"])
@pytest.mark.parametrize("batch", [2, 8])
def test_the_labels_of_a_batch_are_all_found_at_the_initialisation_of_the_papers_attack(
    digits: Dataset, cpl: nn.Module, batch: int, scheme: str
) -> None:
    captured = scene(cpl, partition(digits, 40, scheme), batch_size=batch).look("type1", 20)
    assert right(inferred(captured, "counts"), captured) == (1, 1)


def test_the_labels_of_poisson_batches_are_all_found_however_many_were_drawn(digits: Dataset, cpl: nn.Module) -> None:
    there = scene(cpl, partition(digits, 40, "iid"), batch_size=4, record_sampling="poisson")
    captured = there.look("type1", 20)
    assert len(set(captured.present.sum(1).tolist())) > 3
    assert right(inferred(captured, "counts"), captured) == (1, 1)


@pytest.mark.parametrize(
    ("scheme", "batch", "share"),
    [("iid", 2, 0.95), ("iid", 8, 0.9), ("shards", 2, 0.95), ("shards", 8, 0.7)],
)
def test_most_labels_of_a_batch_are_found_at_the_initialisation_of_the_trained_network(
    digits: Dataset, scheme: str, batch: int, share: float
) -> None:
    """It has no bias, and its features vary: what is measured is 0.95 to 1, of eight of two classes 0.78."""
    captured = scene(build("cnn", SHAPE, 10), partition(digits, 40, scheme), batch_size=batch).look("type1", 30)
    assert right(inferred(captured, "counts"), captured)[0] > share


def test_the_labels_of_a_batch_under_the_papers_fed_cdp_are_found_by_chance(digits: Dataset) -> None:
    there = scene(
        build("mlp", SHAPE, 10), partition(digits, 200, "iid"), method="fed-cdp", clip=4.0, noise_multiplier=6.0,
        batch_size=2,
    )  # fmt: skip
    captured = there.look("type1", 100)
    hits = int((inferred(captured, "counts")[:, 0] == captured.targets[:, 0]).sum())
    assert binomtest(hits, 100, 0.1).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("fields", sample_first([{"batch_size": 4}, {"batch_size": 2, "local_steps": 3}]), ids=str)
def test_where_it_clips_whoever_knows_the_method_finds_more_labels(digits: Dataset, fields: dict[str, int]) -> None:
    there = scene(
        build("mlp", SHAPE, 10), partition(digits, 40, "iid"), method="fed-cdp", noise_multiplier=0.0, clip=0.5, **fields
    )
    captured = there.look("type1", 30)
    plain, refined = (right(inferred(captured, "counts", knows=knows), captured)[0] for knows in ("gradient", "method"))
    assert plain < refined
    assert refined > 0.95


# The truth, and refusals ----------------------------------------------------------------------------------------------


def test_known_labels_are_the_true_ones(small: Any) -> None:
    captured = scene(small.model, federation_of(small.inputs, small.targets, [6] * 4), batch_size=3).look("type1", 4)
    assert torch.equal(inferred(captured, "known", 3), captured.targets)


def test_one_dummy_of_known_labels_has_the_most_frequent_one(small: Any) -> None:
    targets = torch.tensor([0, 1, 1, 2, 2, 0] * 4)
    there = scene(small.model, federation_of(small.inputs, targets, [3] * 8), batch_size=3)
    captured = there.look("type1", 8)
    found = inferred(captured, "known", 3, dummies=1)
    assert found.shape == (8, 1)
    assert all(int(label) == int(true.mode().values) for label, true in zip(found, captured.targets, strict=True))


def test_one_dummy_of_a_batch_of_one_class_has_its_label(digits: Dataset, cpl: nn.Module) -> None:
    ordered = digits.take(digits.targets.argsort(stable=True))
    there = scene(cpl, federation_of(ordered.inputs, ordered.targets, [100] * 10), batch_size=3)
    captured = there.look("type1", 10)
    assert torch.equal(inferred(captured, "gradient", dummies=1)[:, 0], captured.targets[:, 0])


class Averaged(nn.Module):
    """A network that ends in a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(1, 3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs).mean((2, 3))


def test_a_network_without_a_dense_last_layer_is_refused_in_a_sentence() -> None:
    inputs, targets = torch.rand(6, 1, 5, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    captured = scene(Averaged(), federation_of(inputs, targets, [2] * 3)).look("type2", 3)
    for rule in SINGLE:
        with pytest.raises(ModelError) as error:
            inferred(captured, rule, 3)
        assert str(error.value) == (
            "labels: the network has no dense last layer with 3 rows to infer them from; use known or joint"
        )
    assert torch.equal(inferred(captured, "known", 3), captured.targets)


def test_the_last_layer_is_the_last_dense_one_with_a_row_a_class() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3, bias=False))
    assert last_layer(Layout.of(model), 3) == ("2.weight", None)
    assert last_layer(Layout.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5))), 5) == ("2.weight", "2.bias")


@pytest.mark.parametrize("rule", ["guess", "joint"])
def test_a_rule_that_infers_nothing_is_refused_in_a_sentence(small: Any, rule: str) -> None:
    captured = scene(small.model, federation_of(small.inputs, small.targets, [6] * 4)).look("type2", 2)
    with pytest.raises(PlanError, match=rf"^labels: '{rule}' is not one of gradient, agnostic"):
        inferred(captured, rule, 3)


# A reader who knows the method ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["cnn", "mlp", "cpl", "small", "linear", "oriented-gradients"])
@pytest.mark.parametrize("clip", [0.1, 100.0], ids=["clipped", "not clipped"])
def test_knowing_the_method_never_costs_the_label_of_a_single_example(digits: Dataset, network: str, clip: float) -> None:
    """The rule of `clip-aware`: a seed in the place of the example must not overrule the signs of what was seen."""
    there = scene(
        build(network, SHAPE, 10), one_example_each(digits.take(torch.arange(40))), method="fed-cdp", clip=clip,
        noise_multiplier=0.0,
    )  # fmt: skip
    captured = there.look("type2", 40)
    assert torch.equal(inferred(captured, "counts", knows="method"), captured.targets)


@pytest.mark.parametrize(("network", "noise"), [("cnn", 0.02), ("oriented-gradients", 0.05), ("small", 0.02)])
def test_under_little_noise_the_rank_one_part_tells_the_label(digits: Dataset, network: str, noise: float) -> None:
    there = scene(
        build(network, SHAPE, 10), one_example_each(digits.take(torch.arange(60))), method="fed-cdp", clip=1.0,
        noise_multiplier=noise,
    )  # fmt: skip
    captured = there.look("type2", 60)
    found, plain = (float((inferred(captured, rule) == captured.targets).double().mean()) for rule in ("counts", "agnostic"))
    assert found >= plain
    assert found > 0.9
