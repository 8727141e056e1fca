from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcdp.data import load
from fedcdp.data.prepare import logarithmic, standardise, unit_pixels
from fedcdp.errors import DataError


def test_pixels_become_float32_between_0_and_1() -> None:
    inputs = unit_pixels(np.array([[0, 51, 255]], dtype=np.uint8))
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, torch.tensor([[0.0, 0.2, 1.0]]))


def test_training_features_get_mean_0_and_deviation_1() -> None:
    raw = np.random.default_rng(0).normal(5, 3, size=(200, 4))
    train, _ = standardise(raw, raw[:1])
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(axis=0), 1, atol=1e-6)


def test_images_are_standardised_by_channel() -> None:
    raw = np.random.default_rng(0).normal(5, 3, size=(50, 3, 8, 8))
    train, _ = standardise(raw, raw[:1])
    np.testing.assert_allclose(train.mean(axis=(0, 2, 3)), 0, atol=1e-6)
    assert np.abs(train.mean(axis=0)).max() > 0.1


def test_a_feature_constant_in_training_stays_finite() -> None:
    train, validation = standardise(np.full((7, 1), 0.1), np.array([[0.1], [2.1]]))
    np.testing.assert_allclose(train, 0, atol=1e-6)
    np.testing.assert_allclose(validation, [[0], [2]], atol=1e-6)


def test_validation_has_no_influence_on_training_inputs() -> None:
    raw = np.random.default_rng(0).normal(size=(20, 3))
    first, _ = standardise(raw, np.zeros((5, 3)))
    second, _ = standardise(raw, np.full((5, 3), 1e9))
    np.testing.assert_array_equal(first, second)


def test_a_logarithmic_scale_puts_its_range_from_minus_one_to_one() -> None:
    ranges = np.array([[0.0, 3.0], [10.0, 1000.0]])
    scaled = logarithmic(np.array([[0.0, 1000.0], [3.0, 10.0], [1.0, 100.0]]), ranges)
    assert scaled[:2] == pytest.approx(np.array([[-1, 1], [1, -1]]), abs=1e-6)
    assert np.all((scaled[2] > -1) & (scaled[2] < 1))


def test_public_scaling_uses_no_statistic_of_the_training_records() -> None:
    public, other_split = (load("cancer", scaling="public", split_seed=seed) for seed in (0, 1))
    rows = {tuple(row) for part in (public.train, public.validation) for row in part.inputs.tolist()}
    assert {tuple(row) for row in other_split.train.inputs.tolist()} <= rows
    assert "statistics" not in public.normalisation


def test_a_scaling_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DataError, match="scaling is 'secret': choose one of training, public"):
        load("cancer", scaling="secret")  # type: ignore[arg-type]
