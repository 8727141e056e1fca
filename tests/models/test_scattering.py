"""Scattering features: the coefficients of kymatio, normalised for each image by itself; and features side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedcdp.errors import ModelError
from fedcdp.models.features import OrientedGradients, PeriodicFeatures
from fedcdp.models.image_features import IMAGE_FEATURES, SideBySide
from fedcdp.models.networks import build
from fedcdp.models.scattering import Scattering
from tools.scattering_vectors import SHAPES, kymatio_transform

VECTORS = Path(__file__).with_name("scattering.npz")
ROUNDED = 3e-5  # filters are rounded to 16 binary digits
BOTH = "scattering+oriented-gradients"


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


# Coefficients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_stored_coefficients_of_kymatio_are_computed_again(name: str) -> None:
    with np.load(VECTORS, allow_pickle=False) as stored:
        given_images, expected = (torch.from_numpy(stored[f"{name}_{what}"]) for what in ("images", "maps"))
    found = Scattering(*given_images.shape[2:]).maps(given_images)
    assert expected.norm() > 1
    torch.testing.assert_close(found, expected, atol=ROUNDED, rtol=0)


@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (2, 3, 32, 32), (1, 1, 30, 37), (1, 1, 8, 9)])
def test_coefficients_are_those_of_the_real_kymatio(shape: tuple[int, ...]) -> None:
    try:
        theirs = kymatio_transform(*shape[2:])
    except ImportError:
        pytest.skip("kymatio is not installed (make integrations)")
    batch = images(*shape)
    torch.testing.assert_close(Scattering(*shape[2:]).maps(batch), theirs(batch), atol=ROUNDED, rtol=0)


def test_a_group_of_maps_has_mean_zero_and_equal_weight() -> None:
    features = Scattering(16, 16, groups=27)(100 * images(2, 3, 16, 16)).view(2, 27, -1)
    assert features.mean(2).abs().max() < 1e-6
    assert torch.allclose(features.square().sum(2), torch.full((2, 27), 1 / 27), rtol=1e-3)


def test_groups_are_of_channels_that_follow_each_other() -> None:
    layer = Scattering(16, 16, groups=9)
    expected = F.group_norm(layer.maps(images(2, 3, 16, 16)).reshape(2, 243, 4, 4), 9).flatten(1)
    torch.testing.assert_close(layer(images(2, 3, 16, 16)), expected / expected.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("shape", "features"), [((1, 28, 28), 81 * 7 * 7), ((3, 32, 32), 243 * 8 * 8), ((2, 30, 11), 162 * 7 * 2)]
)
def test_one_value_of_each_map_for_every_four_by_four_pixels(shape: tuple[int, ...], features: int) -> None:
    model = build("scattering", shape, 10)
    assert model[0](images(2, *shape)).shape == (2, features)
    assert not model[1].weight.any()


@pytest.mark.parametrize("shape", [(1, 7, 28), (3, 28, 7)])
def test_small_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=f"scattering needs images of at least 8×8 pixels, not {shape[1]}×{shape[2]}"):
        build("scattering", shape, 10)


# A fixed function of one example --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_flat_pictures_have_finite_features_and_gradients(value: float) -> None:
    batch = torch.full((2, 1, 12, 12), value, requires_grad=True)
    features = Scattering(12, 12)(batch)
    features.square().sum().backward()
    assert features.norm(dim=1).max() <= 1 + 1e-6
    assert batch.grad is not None
    assert batch.grad.isfinite().all()


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(0, 9))
def test_the_norm_is_at_most_one_whatever_the_image(contrast: float, brightness: float, seed: int) -> None:
    image = torch.rand(1, 1, 9, 12, generator=torch.Generator().manual_seed(seed))
    for network in ("scattering", BOTH):
        assert NETWORKS[network](contrast * image + brightness).norm() <= 1 + 1e-5


NETWORKS = {name: build(name, (1, 9, 12), 2)[0] for name in ("scattering", BOTH)}


def test_gradients_of_each_example_are_the_same_under_vmap() -> None:
    front, batch = build(BOTH, (3, 12, 12), 2)[0], images(3, 3, 12, 12).requires_grad_()
    towards = torch.randn(front(batch[:1]).shape[1], generator=torch.Generator().manual_seed(2))
    alone = torch.func.vmap(torch.func.grad(lambda image: front(image[None])[0] @ towards))(batch.detach())
    (front(batch) @ towards).sum().backward()
    assert batch.grad is not None
    assert batch.grad.abs().max() > 0.01
    torch.testing.assert_close(alone, batch.grad, atol=1e-5, rtol=1e-4)


def test_the_constants_are_exact_binary_fractions_without_negative_zeros() -> None:
    layer = Scattering(28, 32)
    assert not list(layer.parameters())
    for name, value in layer.named_buffers():
        assert torch.equal(value * 2**18, (value * 2**18).round()), name
        assert not torch.signbit(value)[value == 0].any(), name


# Side by side ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_features_side_by_side_are_those_of_the_parts(shape: tuple[int, ...]) -> None:
    batch = images(3, *shape)
    parts = [build(name, shape, 2)[0](batch) for name in BOTH.split("+")]
    whole = build(BOTH, shape, 2)[0](batch)
    torch.testing.assert_close(whole, torch.cat(parts, dim=1) / 2**0.5)
    assert torch.allclose(whole.norm(dim=1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        ("cnn+scattering", "model: 'cnn+scattering' joins 'cnn', but + joins fixed features of images: oriented-gradients"),
        ("linear+x", "model: 'linear+x' joins 'linear', but"),
        ("scattering+periodic", "joins 'periodic', but"),
        ("scattering+", "joins '', but"),
        ("+", "joins '', but"),
        ("scattering+scattering", "model: 'scattering+scattering' names scattering twice"),
    ],
)
def test_a_name_that_joins_anything_else_is_refused(network: str, sentence: str) -> None:
    with pytest.raises(ModelError) as refused:
        build(network, (1, 28, 28), 10)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("network", [*IMAGE_FEATURES, BOTH])
def test_tables_and_activations_are_refused(network: str) -> None:
    with pytest.raises(ModelError, match=r"needs images \[channels, height, width\], not inputs of shape \[30\]"):
        build(network, (30,), 2)
    with pytest.raises(ModelError, match="has no activation"):
        build(network, (1, 28, 28), 2, activation="relu")


def test_parts_must_have_norm_one() -> None:
    with pytest.raises(ModelError, match="not PeriodicFeatures"):
        SideBySide([OrientedGradients(), PeriodicFeatures()])
