"""Fixed features: of one example alone, of norm at most 1, and the same on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine import BatchedEngine, FunctionalEngine
from fedcdp.engine.base import Batch
from fedcdp.models.features import OrientedGradients, PeriodicFeatures, UnitNorm
from fedcdp.models.image_features import Mirrored, SideBySide
from fedcdp.models.networks import build, resolve
from fedcdp.models.scattering import Scattering
from fedcdp.training.export import export_model

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
    "layer",
    [
        OrientedGradients(),
        OrientedGradients(colour=0.5),
        Scattering(32, 32),
        SideBySide([Scattering(32, 32), OrientedGradients()]),
        Mirrored(OrientedGradients(colour=0.7)),
        nn.Sequential(nn.Flatten(), UnitNorm()),
        nn.Sequential(nn.Flatten(), PeriodicFeatures()),
    ],
)
def test_the_features_of_an_example_do_not_depend_on_the_others(layer: nn.Module) -> None:
    batch = images(5, 3, 32, 32)
    alone = torch.cat([layer(each[None]) for each in batch])
    assert torch.allclose(layer(batch), alone, atol=1e-6)


def test_mirrored_features_are_those_of_the_mirror_image_and_of_norm_one() -> None:
    layer, batch = Mirrored(OrientedGradients(colour=0.7)), images(4, 3, 32, 32)
    assert torch.allclose(layer(batch), layer(batch.flip(3)), atol=1e-6)
    assert torch.allclose(layer(batch).norm(dim=1), torch.ones(4), atol=1e-5)


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


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        ("oriented-gradients", (1, 28, 28)),
        ("scattering", (1, 12, 12)),
        ("scattering+oriented-gradients", (3, 12, 12)),
        ("linear", (9,)),
        ("periodic", (9,)),
    ],
)
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
@pytest.mark.parametrize("network", ["oriented-gradients", "scattering", "scattering+oriented-gradients"])
def test_the_network_can_be_exported_by_tracing(network: str, shape: tuple[int, ...]) -> None:
    model = build(network, shape, 4)
    with torch.no_grad():
        model[1].weight.normal_()
    traced = torch.jit.trace(model, images(1, *shape))
    assert torch.allclose(traced(images(3, *shape)), model(images(3, *shape)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_network_can_be_exported_to_onnx(shape: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model = build("scattering+oriented-gradients", shape, 4)
    with torch.no_grad():
        model[1].weight.normal_(generator=torch.Generator().manual_seed(1))
        expected = model(images(3, *shape))
    written = export_model("onnx", tmp_path / "model.onnx", model=model, inputs=images(1, *shape), metrics=[], settings={})
    program = ReferenceEvaluator(str(written))
    found = program.run(None, {program.input_names[0]: images(3, *shape).numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=1e-4)


# Tables ---------------------------------------------------------------------------------------------------------------


def test_columns_of_every_scale_give_waves_of_one_size() -> None:
    scales = torch.tensor([1e-2, 1.0, 1e3, 1e30])
    waves = PeriodicFeatures()(torch.randn(500, 4, generator=torch.Generator().manual_seed(1)) * scales)
    assert waves.shape == (500, 32)
    assert waves.isfinite().all()
    assert waves.abs().max() <= 2
    assert waves.view(500, 8, 4).square().sum(1).mean(0)[1:].min() > 1


def test_a_zero_gives_zeros() -> None:
    assert PeriodicFeatures()(torch.zeros(2, 5)).abs().max() == 0


def test_values_that_differ_by_some_per_cent_are_told_apart_at_any_size() -> None:
    for value in (10.0, 1e3, 1e6):
        near, far = PeriodicFeatures()(torch.tensor([[value], [1.1 * value]]))
        assert (near - far).norm() > 0.3


def test_what_the_linear_layer_reads_has_norm_one() -> None:
    front = build("periodic", (6,), 2)[:3]
    for scale in (1e-3, 1.0, 1e4):
        features = front(scale * images(4, 6))
        assert torch.allclose(features.norm(dim=1), torch.ones(4), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "network"),
    [
        ("auto", (1, 28, 28), "cnn"),
        ("auto", (30,), "mlp"),
        ("best-features", (1, 28, 28), "oriented-gradients"),
        ("best-features", (3, 16, 20), "random-process"),
        ("best-features", (3, 8, 8), "periodic"),
        ("best-features", (30,), "periodic"),
        ("fixed-features", (1, 28, 28), "oriented-gradients"),
        ("fixed-features", (3, 16, 16), "oriented-gradients"),
        ("fixed-features", (1, 8, 28), "periodic"),
        ("fixed-features", (30,), "periodic"),
        ("linear", (30,), "linear"),
        ("package.module:factory", (30,), "package.module:factory"),
    ],
)
def test_a_name_may_stand_for_the_network_that_suits_the_data(name: str, shape: tuple[int, ...], network: str) -> None:
    assert resolve(name, shape) == network
    if ":" not in name:
        assert str(build(name, shape, 3)) == str(build(network, shape, 3))


def test_a_small_colour_image_is_taken() -> None:
    assert build("fixed-features", (3, 3, 3), 2)(images(2, 3, 3, 3)).shape == (2, 2)
