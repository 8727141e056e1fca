"""Fixed features: of one example alone, of norm at most 1, and the same on every machine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine import BatchedEngine, FunctionalEngine
from fedcdp.engine.base import Batch
from fedcdp.models.features import OrientedGradients, UnitNorm
from fedcdp.models.networks import build

SHAPES = [(1, 28, 28), (3, 32, 32)]


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("shape", "colour"), [((1, 28, 28), 0.0), ((3, 32, 32), 0.0), ((3, 32, 32), 0.7)])
def test_features_have_norm_one_whatever_the_brightness_and_contrast(shape: tuple[int, ...], colour: float) -> None:
    features = OrientedGradients(colour=colour)
    for contrast in (0.01, 1.0):
        assert torch.allclose(features(contrast * images(4, *shape)).norm(dim=1), torch.ones(4), atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_a_picture_without_edges_has_features_zero(value: float) -> None:
    assert OrientedGradients()(torch.full((2, 1, 28, 28), value)).abs().max() == 0


@pytest.mark.parametrize(
    "layer", [OrientedGradients(), OrientedGradients(colour=0.5), nn.Sequential(nn.Flatten(), UnitNorm())]
)
def test_the_features_of_an_example_do_not_depend_on_the_others(layer: nn.Module) -> None:
    batch = images(5, 3, 32, 32)
    alone = torch.cat([layer(each[None]) for each in batch])
    assert torch.allclose(layer(batch), alone, atol=1e-6)


def test_nothing_is_trained_and_the_constants_are_exact_binary_fractions() -> None:
    layer = OrientedGradients(orientations=7, reach=6)
    assert not list(layer.parameters())
    for name in ("slopes", "directions"):
        assert torch.equal(getattr(layer, name) * 2**12, (getattr(layer, name) * 2**12).round())


def test_an_edge_is_seen_in_its_own_direction() -> None:
    rising = torch.linspace(0, 1, 28).expand(1, 1, 28, 28)
    directions = OrientedGradients()(rising).view(8, 7, 7)
    assert (directions.argmax(0) == 0).all()
    assert (OrientedGradients()(rising.mT).view(8, 7, 7).argmax(0) == 2).all()


@pytest.mark.parametrize(("network", "shape"), [("oriented-gradients", (1, 28, 28)), ("linear", (9,))])
def test_the_fast_engine_knows_them_and_agrees_with_the_reference(network: str, shape: tuple[int, ...]) -> None:
    model = build(network, shape, 3)
    weights = {name: torch.rand(2, *p.shape) for name, p in model.named_parameters()}
    batch = Batch(images(2, 4, *shape), torch.tensor([[0, 1, 2, 0]] * 2), torch.ones(2, 4, dtype=torch.bool))
    fast, reference = (kind(model, F.cross_entropy) for kind in (BatchedEngine, FunctionalEngine))
    expected = reference.per_example_gradients(weights, batch)
    for name, value in fast.per_example_gradients(weights, batch).items():
        assert torch.allclose(value, expected[name], atol=1e-6)


def test_the_gradient_of_a_linear_layer_on_them_is_no_longer_than_the_distance_of_two_answers() -> None:
    model = build("oriented-gradients", (1, 28, 28), 10)
    batch = Batch(images(1, 6, 1, 28, 28), torch.arange(6)[None], torch.ones(1, 6, dtype=torch.bool))
    weights = {name: 9 * torch.randn(1, *p.shape) for name, p in model.named_parameters()}
    gradients = FunctionalEngine(model, F.cross_entropy).per_example_gradients(weights, batch)["1.weight"]
    assert gradients.flatten(2).norm(dim=2).max() <= 2**0.5 + 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_the_network_can_be_exported_by_tracing(shape: tuple[int, ...]) -> None:
    model = build("oriented-gradients", shape, 4)
    with torch.no_grad():
        model[1].weight.normal_()
    traced = torch.jit.trace(model, images(1, *shape))
    assert torch.allclose(traced(images(3, *shape)), model(images(3, *shape)), atol=1e-5)
