"""The prior of features that outnumber the public examples: the same Gaussian, held along few axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedcdp.attacks.head_attack import _likelihood
from fedcdp.attacks.head_solver import _densities, _step, _steps, shown
from fedcdp.attacks.linear_head import _LEAST_SPREAD, _RIDGES, FeaturePrior, LinearHead, find_head
from fedcdp.attacks.presence import scores_among_others
from fedcdp.attacks.sightings import Sighting
from fedcdp.data.dataset import Dataset
from fedcdp.training import feature_cache

CLASSES, INPUTS, FEATURES, EXAMPLES = 3, 6, 60, 40
NONE = torch.zeros(0, INPUTS)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def head() -> LinearHead:
    front = nn.Linear(INPUTS, FEATURES).requires_grad_(False)
    front.weight.copy_(drawn(FEATURES, INPUTS, seed=1))
    found = find_head(nn.Sequential(front, nn.Tanh(), nn.Linear(FEATURES, CLASSES, bias=False)), (INPUTS,))
    assert found is not None
    return found


@pytest.fixture
def public() -> Dataset:
    targets = torch.arange(EXAMPLES) % CLASSES
    return Dataset(drawn(EXAMPLES, INPUTS, seed=2) + drawn(CLASSES, INPUTS, seed=3)[targets], targets, CLASSES)


@pytest.fixture
def prior(head: LinearHead, public: Dataset) -> FeaturePrior:
    return FeaturePrior.of(head, public, (INPUTS,), NONE)


@pytest.fixture
def complete(prior: FeaturePrior) -> FeaturePrior:
    """The same prior with an axis for every direction."""
    more = torch.linalg.qr(prior.basis, mode="complete").Q[:, len(prior.variances) :]
    rest = torch.full((prior.others,), prior.rest, dtype=torch.float64)
    return replace(prior, basis=torch.cat([prior.basis, more], 1), variances=torch.cat([prior.variances, rest]))


def centred(head: LinearHead, public: Dataset) -> Tensor:
    features = head.features(public.tensor)
    return features - torch.stack([features[public.targets == k].mean(0) for k in range(CLASSES)])[public.targets]


def sighting(labels: Tensor, features: Tensor) -> Sighting:
    """Two noisy releases of a batch."""
    releases = 2
    found = Sighting(
        seen=torch.zeros(releases, CLASSES, FEATURES, dtype=torch.float64),
        weights=0.1 * drawn(releases, CLASSES, FEATURES, seed=4).double(),
        biases=torch.zeros(releases, CLASSES, dtype=torch.float64),
        deviation=torch.full((releases,), 0.01, dtype=torch.float64),
        bound=torch.full((releases,), 0.5, dtype=torch.float64),
        shares=torch.full((releases, len(labels)), 1 / len(labels), dtype=torch.float64),
        has_bias=False,
    )
    return replace(found, seen=shown(found, features, labels) + 0.01 * drawn(releases, CLASSES, FEATURES, seed=5))


def test_it_holds_the_covariance_of_public_features(head: LinearHead, public: Dataset, prior: FeaturePrior) -> None:
    assert 0 < len(prior.variances) < EXAMPLES < FEATURES
    rows = centred(head, public)
    variances, axes = torch.linalg.eigh(rows.T @ rows / EXAMPLES)
    expected = axes @ torch.diag(variances.clamp(min=_LEAST_SPREAD * float(variances.max()))) @ axes.T
    inside = prior.basis @ torch.diag(prior.variances - prior.rest) @ prior.basis.T
    torch.testing.assert_close(inside + prior.rest * torch.eye(FEATURES, dtype=torch.float64), expected)


def test_inputs_come_from_the_regression_on_all_features(head: LinearHead, public: Dataset, prior: FeaturePrior) -> None:
    rows, wanted = centred(head, public), public.tensor.double() - prior.input_means[public.targets]
    gram = rows.T @ rows
    fits = [
        torch.linalg.solve(gram + (ridge * gram.trace() + 1e-12) * torch.eye(FEATURES), rows.T @ wanted) for ridge in _RIDGES
    ]
    assert prior.inverse is not None
    assert min(float((fit - prior.inverse).abs().max()) for fit in fits) < 1e-6 < float((fits[0] - fits[-1]).abs().max())


@pytest.mark.parametrize("noisy", [True, False])
def test_attacks_find_the_same_as_with_every_axis(
    head: LinearHead, prior: FeaturePrior, complete: FeaturePrior, noisy: bool
) -> None:
    labels = torch.tensor([0, 1, 1])
    features = head.features(drawn(3, INPUTS, seed=6))
    seen, guess = sighting(labels, features), prior.typical(labels) + 0.1 * drawn(3, FEATURES, seed=7)
    assert prior.others > 0
    assert complete.others == 0
    for each in (seen, seen.first()):
        few, all_ = (_step(each, which, guess, labels, noisy) for which in (prior, complete))
        torch.testing.assert_close(few, all_, atol=1e-6, rtol=1e-6)
        alone = replace(each, shares=each.shares.sum(1, keepdim=True))
        few, all_ = (_densities(alone, which, guess, labels) for which in (prior, complete))
        torch.testing.assert_close(few, all_, rtol=1e-6, atol=1e-6)
        for tried in (labels, torch.tensor([2, 0, 0])):
            assert _likelihood(each, prior, tried) == pytest.approx(_likelihood(each, complete, tried))
        candidates, theirs = head.features(drawn(20, INPUTS, seed=8)), torch.arange(20) % 2
        few, all_ = (scores_among_others(each, which, labels, candidates, theirs) for which in (prior, complete))
        torch.testing.assert_close(few, all_, rtol=1e-6, atol=1e-6)
        assert float(few.std()) > 0.1


def test_rows_are_solved_at_once_as_they_are_one_by_one(head: LinearHead, prior: FeaturePrior) -> None:
    labels = torch.tensor([1])
    seen = sighting(labels, head.features(drawn(1, INPUTS, seed=6)))
    guesses, tried = prior.means + 0.1 * drawn(len(prior.means), FEATURES, seed=7), torch.arange(len(prior.means))
    moved, densities = _steps(seen, prior, guesses, tried), _densities(seen, prior, guesses, tried)
    for row, label in enumerate(tried):
        alone, own = guesses[row : row + 1], label[None]
        torch.testing.assert_close(moved[row : row + 1], _step(seen, prior, alone, own, noisy=True), rtol=1e-8, atol=1e-8)
        variance = torch.where(seen.deviation > 0, seen.deviation, 1.0).square()
        misfit = ((seen.seen - shown(seen, alone, own)).square().sum((1, 2)) / variance).sum()
        away = alone - prior.typical(own)
        inside = away @ prior.basis
        unlikely = (inside.square() / prior.variances).sum() + (away.square().sum() - inside.square().sum()) / prior.rest
        assert float(densities[row]) == pytest.approx(float(misfit + unlikely), rel=1e-9)


def test_very_many_examples_of_very_many_features_are_thinned(
    head: LinearHead, public: Dataset, prior: FeaturePrior, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcdp.attacks.linear_head._MOST", 30)
    fewer = FeaturePrior.of(head, public, (INPUTS,), NONE)
    assert len(fewer.variances) < 30
    assert not torch.equal(fewer.means, prior.means)


def test_features_of_a_benchmark_come_from_the_cache(
    head: LinearHead, public: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path))
    monkeypatch.setattr(feature_cache, "WORTH_KEEPING", -1.0)
    rows, known = torch.tensor([7, 0, 3]), replace(public, benchmark="known")
    torch.testing.assert_close(head.features_of(known, rows), head.features(public.tensor[rows]), rtol=1e-6, atol=1e-6)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    monkeypatch.setattr(feature_cache, "through", None)  # nothing is computed again
    torch.testing.assert_close(head.features_of(known, rows), head.features(public.tensor[rows]), rtol=1e-6, atol=1e-6)
