from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from fedcdp.attacks.scores import psnr, ssim, visible_inputs
from fedcdp.models.networks import build

quick = settings(deadline=None, derandomize=True, max_examples=40)
seeds = st.integers(0, 2**31)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@quick
@given(mse=st.floats(0, 1e3), more=st.floats(0, 1e3))
def test_psnr_is_finite_and_never_grows_with_the_error(mse, more):
    nearer, farther = psnr(torch.tensor([mse, mse + more], dtype=torch.float64)).tolist()
    assert math.isfinite(nearer)
    assert farther <= nearer <= 138.5


# SSIM ------------------------------------------------------------------------------------------------------------------


def reference_ssim(first: np.ndarray, second: np.ndarray) -> float:
    """As scikit-image computes it with gaussian_weights, sigma 1.5 and no sample covariance."""
    from scipy.ndimage import gaussian_filter

    def blurred(values: np.ndarray) -> np.ndarray:
        return gaussian_filter(values, 1.5, truncate=3.5)

    x, y = blurred(first), blurred(second)
    covariance = blurred(first * second) - x * y
    spread = blurred(first**2) - x * x + blurred(second**2) - y * y
    similar = (2 * x * y + 1e-4) * (2 * covariance + 9e-4) / ((x * x + y * y + 1e-4) * (spread + 9e-4))
    return float(similar[5:-5, 5:-5].mean())


@pytest.mark.parametrize(("height", "width"), [(11, 11), (28, 28), (12, 40)])
def test_ssim_is_that_of_an_independent_implementation(height, width):
    first, second = drawn(0, 4, 3, height, width).double(), drawn(1, 4, 3, height, width).double()
    second = 0.6 * first + 0.4 * second
    expected = [np.mean([reference_ssim(a.numpy(), b.numpy()) for a, b in zip(x, y, strict=True)])
                for x, y in zip(first, second, strict=True)]  # fmt: skip
    assert ssim(first, second).tolist() == pytest.approx(expected, abs=1e-9)


def test_ssim_is_that_of_scikit_image():
    metrics = pytest.importorskip("skimage.metrics")
    first, second = drawn(0, 28, 28), drawn(1, 28, 28)
    expected = metrics.structural_similarity(
        first.double().numpy(), second.double().numpy(), data_range=1.0,
        gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
    )  # fmt: skip
    assert ssim(first[None], second[None]).item() == pytest.approx(expected, abs=1e-9)


def test_ssim_of_two_flat_images_compares_their_brightness_alone():
    value = ssim(torch.full((1, 28, 28), 0.2), torch.full((1, 28, 28), 0.8)).item()
    assert value == pytest.approx((2 * 0.2 * 0.8 + 1e-4) / (0.2**2 + 0.8**2 + 1e-4), rel=1e-6)


def test_ssim_of_three_by_three_pixels_is_the_one_computed_by_hand():
    """One window: the centre has a weight of 1/s², an edge e^(-2/9)/s², a corner e^(-4/9)/s², s = 1 + 2 e^(-2/9)."""
    side = math.exp(-1 / (2 * 1.5**2))
    centre = 1 / (1 + 2 * side) ** 2
    first, second = torch.zeros(1, 3, 3), torch.zeros(1, 3, 3)
    first[0, 1, 1] = second[0, 0, 1] = 1.0
    edge, variances = centre * side, centre - centre**2 + centre * side - (centre * side) ** 2
    expected = (2 * centre * edge + 1e-4) * (-2 * centre * edge + 9e-4)
    expected /= (centre**2 + edge**2 + 1e-4) * (variances + 9e-4)
    assert ssim(first, second).item() == pytest.approx(expected)


@quick
@given(seed=seeds, height=st.integers(1, 14), width=st.integers(1, 14))
def test_ssim_is_symmetric_at_most_one_and_one_for_equal_images_of_any_size(seed, height, width):
    first, second = drawn(seed, 2, height, width), drawn(seed + 1, 2, height, width)
    assert ssim(first, first).item() == pytest.approx(1)
    assert ssim(first, second).item() <= 1
    assert ssim(first, second).item() == pytest.approx(ssim(second, first).item())


def test_ssim_of_a_visible_rectangle_is_that_of_the_cropped_image():
    first, second = drawn(0, 2, 1, 28, 28), drawn(1, 2, 1, 28, 28)
    visible = torch.zeros(1, 28, 28, dtype=torch.bool)
    visible[:, :26, :26] = True
    assert torch.allclose(ssim(first, second, visible), ssim(first[..., :26, :26], second[..., :26, :26]))
    visible[:, ::5] = False
    assert ssim(first, second, visible).isnan().all()


# What the network sees -------------------------------------------------------------------------------------------------


def test_the_papers_network_sees_exactly_the_first_26_rows_and_columns():
    expected = torch.zeros(1, 28, 28, dtype=torch.bool)
    expected[:, :26, :26] = True
    assert torch.equal(visible_inputs(build("cnn", (1, 28, 28), 10), (1, 28, 28)), expected)


@pytest.mark.parametrize(("network", "shape"), [("cpl", (1, 28, 28)), ("mlp", (30,))])
def test_these_networks_see_everything(network, shape):
    assert visible_inputs(build(network, shape, 10), shape).all()


def test_what_shows_only_rarely_or_in_one_output_is_found_and_what_is_cut_off_is_not():
    def function(inputs: Tensor) -> Tensor:
        rare = nn.functional.relu(inputs[:, 0] - 2.2)
        return torch.stack([rare, inputs[:, 1].square(), 0 * inputs[:, 2], inputs[:, 4].detach()], -1)

    with torch.no_grad():
        assert visible_inputs(function, (5,)).tolist() == [True, True, False, False, False]
