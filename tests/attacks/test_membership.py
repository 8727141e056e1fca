"""Membership inference finds the records of a network that learned them by heart, and nothing where there is nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, norm
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor, nn

from fedcdp.attacks.membership import Estimate, Membership, infer_membership
from fedcdp.data.dataset import Dataset
from fedcdp.data.load import load
from fedcdp.errors import DataError
from fedcdp.models.networks import build


class Told(nn.Module):
    """A network of two classes that answers with what its input says: of the first class, the logit of its confidence."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([inputs, torch.zeros_like(inputs)], dim=1)


def told(scores: list[float] | np.ndarray) -> Dataset:
    """Records in whose label `Told` has just so much confidence."""
    inputs = torch.as_tensor(np.asarray(scores), dtype=torch.float32)[:, None]
    return Dataset(inputs, torch.zeros(len(inputs), dtype=torch.int64), 2)


def infer(inside: list[float] | np.ndarray, outside: list[float] | np.ndarray, seed: int = 0) -> Membership:
    return infer_membership(Told(), told(inside), told(outside), seed=seed)


@pytest.fixture(scope="module")
def splits() -> tuple[Dataset, Dataset]:
    """200 digits to learn by heart, and 1,000 others."""
    found = load("mnist5k")
    return found.train.take(torch.arange(0, 4000, 20)), found.validation


@pytest.fixture(scope="module")
def overfitted(splits: tuple[Dataset, Dataset]) -> nn.Module:
    model, members = build("mlp", (1, 28, 28), 10), splits[0]
    optimiser = torch.optim.Adam(model.parameters(), 0.005)
    for _ in range(150):
        optimiser.zero_grad()
        F.cross_entropy(model(members.inputs), members.targets).backward()
        optimiser.step()
    return model


# What is found --------------------------------------------------------------------------------------------------------


def test_a_network_that_learned_its_records_by_heart_gives_them_away(
    overfitted: nn.Module, splits: tuple[Dataset, Dataset]
) -> None:
    members, others = splits
    with torch.no_grad():
        assert F.cross_entropy(overfitted(members.inputs), members.targets) < 0.01
    found = infer_membership(overfitted, members, others)
    assert (found.members, found.others) == (200, 1000)
    assert found.auc.low > 0.6
    assert found.advantage.low > 0
    assert found.advantage_at_mean_loss.value > 0


def test_an_untrained_network_gives_nobody_away(splits: tuple[Dataset, Dataset]) -> None:
    found = infer_membership(build("mlp", (1, 28, 28), 10), *splits)
    assert found.tpr_at_1_percent is not None
    assert found.tpr_at_01_percent is not None
    chance = {
        "auc": 0.5,
        "advantage": 0.0,
        "advantage_at_mean_loss": 0.0,
        "tpr_at_1_percent": 0.01,
        "tpr_at_01_percent": 0.001,
    }
    for name, value in chance.items():
        estimate = getattr(found, name)
        assert estimate.low <= value <= estimate.high, name
    assert "0.5" in found.chance


def test_a_member_is_no_longer_one_when_membership_is_dealt_out_at_random(
    overfitted: nn.Module, splits: tuple[Dataset, Dataset]
) -> None:
    pooled = Dataset(*(torch.cat([getattr(data, name) for data in splits]) for name in ("inputs", "targets")), 10)
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(3))
    found = infer_membership(overfitted, pooled.take(order[:600]), pooled.take(order[600:]))
    assert found.auc.low <= 0.5 <= found.auc.high
    assert found.advantage.low <= 0 <= found.advantage.high


def test_members_and_others_in_exchanged_roles_have_the_complementary_auc(
    overfitted: nn.Module, splits: tuple[Dataset, Dataset]
) -> None:
    one, other = infer_membership(overfitted, *splits).auc, infer_membership(overfitted, *reversed(splits)).auc
    assert other == pytest.approx((1 - one.value, 1 - one.high, 1 - one.low))


def test_a_threshold_is_not_judged_by_the_records_that_chose_it() -> None:
    """Where scores say nothing, the best threshold of a few records gains much on them, and nothing on average elsewhere."""
    random = np.random.default_rng(4)
    found = [infer(random.normal(size=20), random.normal(size=20), seed).advantage.value for seed in range(300)]
    assert abs(np.mean(found)) < 4 * np.std(found) / math.sqrt(len(found))
    assert np.mean(found) < 0.05


# What is computed -----------------------------------------------------------------------------------------------------

SCORES = st.lists(st.integers(-4, 4).map(float) | st.floats(-50, 50, width=32), min_size=2, max_size=30)


@settings(deadline=None)
@given(SCORES, SCORES)
@example([1.0, 1.0], [1.0, 1.0])
@example([2.0, 3.0], [0.0, 1.0])
def test_auc_is_the_area_that_scikit_learn_finds_also_with_ties(inside: list[float], outside: list[float]) -> None:
    truth = [1] * len(inside) + [0] * len(outside)
    found = infer(inside, outside)
    assert found.auc.value == pytest.approx(roc_auc_score(truth, inside + outside), abs=1e-12)
    for estimate in (found.auc, found.advantage, found.advantage_at_mean_loss):
        assert estimate.low <= estimate.value <= estimate.high
    assert 0 <= found.auc.low < found.auc.high <= 1


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.7])
def test_the_interval_of_the_auc_holds_the_truth_as_often_as_it_says(shift: float) -> None:
    random = np.random.default_rng(5)
    truth, trials = norm.cdf(shift / math.sqrt(2)), 500
    intervals = [infer(random.normal(shift, size=60), random.normal(size=90)).auc for _ in range(trials)]
    missed = sum(not each.low <= truth <= each.high for each in intervals)
    assert binomtest(missed, trials, 0.01, "greater").pvalue > 1e-3


def test_the_interval_of_a_perfect_attack_still_allows_for_what_is_too_rare_to_be_seen() -> None:
    found = infer([2.0] * 40, [1.0] * 60).auc
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.005 ** (1 / 40))  # P(40 independent pairs in order) = AUC^40


@pytest.mark.slow
@settings(deadline=None)
@given(SCORES, st.lists(st.integers(-40, 40).map(float), min_size=100, max_size=250))
def test_true_positives_are_those_of_the_roc_curve(inside: list[float], outside: list[float]) -> None:
    truth = [1] * len(inside) + [0] * len(outside)
    false, true, _ = roc_curve(truth, inside + outside, drop_intermediate=False)
    found = infer(inside, outside)
    assert found.tpr_at_1_percent is not None
    assert found.tpr_at_1_percent.value == pytest.approx(true[false <= 0.01].max())
    interval = binomtest(round(found.tpr_at_1_percent.value * len(inside)), len(inside)).proportion_ci(0.99)
    assert found.tpr_at_1_percent[1:] == pytest.approx((interval.low, interval.high))
    assert found.tpr_at_01_percent is None


def test_too_few_others_show_no_rare_false_alarm() -> None:
    assert infer([1.0] * 5, [0.0] * 99).tpr_at_1_percent is None
    assert infer([1.0] * 5, [0.0] * 999).tpr_at_01_percent is None
    assert infer([1.0] * 5, [0.0] * 1000).tpr_at_01_percent == Estimate(1.0, pytest.approx(0.005 ** (1 / 5)), 1.0)


def test_advantage_is_that_of_the_best_threshold_and_of_the_mean_loss() -> None:
    """One member in four is lost; the mean loss, drawn up by it, still calls some others members."""
    inside, outside = [3.0, 3.0, 3.0, -6.0] * 500, [2.0, 0.0, -1.0, -6.0] * 500
    found = infer(inside, outside)
    assert found.advantage.value == pytest.approx(0.75, abs=0.05)
    mean_loss = np.mean(np.logaddexp(0, [-3.0, -3.0, -3.0, 6.0]))
    called = np.logaddexp(0, [-2.0, 0.0, 1.0, 6.0]) <= mean_loss
    assert found.advantage_at_mean_loss.value == pytest.approx(0.75 - called.mean(), abs=0.05)


def test_confidence_keeps_apart_what_the_loss_in_float_rounds_to_zero() -> None:
    """A loss of e^−200 is 0 in float32, and 1 − p is 0 even in float64."""
    assert infer([200.0, 201.0, 202.0], [190.0, 191.0, 192.0]).auc.value == 1.0


def test_an_answer_that_is_not_finite_is_the_least_confident() -> None:
    for broken in (math.nan, math.inf, -math.inf):
        assert infer([5.0] * 4, [broken] * 4).auc.value == 1.0
        assert infer([broken] * 4, [-1e30] * 4).auc.value == 0.0
        found = infer([broken] * 4, [broken] * 4)
        assert found.auc.value == 0.5
        assert found.advantage.value == found.advantage_at_mean_loss.value == 0.0


# How it is used -------------------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was_and_dropout_does_not_blur_it() -> None:
    model = nn.Sequential(nn.Dropout(0.5), Told()).train()
    members, others = told(np.linspace(1, 2, 50)), told(np.linspace(-1, 0.9, 50))
    assert infer_membership(model, members, others).auc.value == 1.0
    assert model.training
    assert model[0].training


def test_a_layer_that_mixes_a_batch_does_not_tell_members_by_their_company() -> None:
    """Batch statistics of members alone and of others alone would each centre the scores, and hide that they differ."""
    model = nn.Sequential(nn.BatchNorm1d(1, track_running_stats=False, affine=False), Told())
    random = np.random.default_rng(6)
    found = infer_membership(model, told(random.normal(2, size=1500)), told(random.normal(size=1500)))
    assert found.auc.value == pytest.approx(norm.cdf(math.sqrt(2)), abs=0.02)


def test_the_same_seed_gives_the_same_answer_and_no_more_than_asked_are_used() -> None:
    random = np.random.default_rng(7)
    members, others = told(random.normal(size=300)), told(random.normal(size=400))

    def run(seed: int) -> Membership:
        return infer_membership(Told(), members, others, most=50, seed=seed)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert (run(1).members, run(1).others) == (50, 50)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: infer([1.0], [1.0, 2.0]), "not 1"),
        (lambda: infer([1.0, 2.0], [1.0]), "not 1"),
        (lambda: infer([1.0, 2.0], []), "empty"),
        (lambda: infer_membership(Told(), told([1.0] * 4), told([1.0] * 4), most=0), "not 0"),
        (lambda: infer_membership(Told(), told([1.0] * 4), Dataset(torch.zeros(4, 2), torch.zeros(4).long(), 2)), "shape"),
        (lambda: infer_membership(nn.Unflatten(1, (-1, 1)), told([1.0] * 4), told([1.0] * 4)), "shape"),
    ],
)
def test_what_cannot_be_attacked_is_refused_in_a_sentence(call: Callable[[], Membership], words: str) -> None:
    with pytest.raises(DataError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_every_figure_is_a_plain_number() -> None:
    found = infer(np.arange(1000.0), np.arange(1000.0))
    for field in fields(found):
        value = getattr(found, field.name)
        assert all(type(each) is float for each in value) if isinstance(value, Estimate) else type(value) in (int, str)
