from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import fedcdp
from fedcdp.attacks.scores import Criteria, Judge, chance_interval, cleaned, match, rearrange, visible_inputs
from fedcdp.data.dataset import Dataset
from fedcdp.errors import PlanError
from fedcdp.models.networks import build

quick = settings(deadline=None, derandomize=True, max_examples=40)
seeds = st.integers(0, 2**31)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def public(*shape: int, size: int = 60, classes: int = 3) -> Dataset:
    return Dataset(drawn(1, size, *shape), torch.arange(size) % classes, classes)


def judge_of(drawn_from: int, victims: int = 2, examples: int = 3, shape: tuple[int, ...] = (5,), **more) -> Judge:
    labels = torch.arange(victims * examples).view(victims, examples) % 3
    return Judge(drawn(drawn_from, victims, examples, *shape), labels, public(*shape), **more)


def vectors(*values: list[float]) -> Tensor:
    """One victim's examples."""
    return torch.tensor([values])


# Distances -------------------------------------------------------------------------------------------------------------


def test_scores_of_a_small_case_are_those_computed_by_hand():
    judge = Judge(vectors([0.0, 0.5, 1.0, 0.5]), torch.tensor([[0]]), public(4))
    scores = judge.score(vectors([0.1, 0.5, 0.7, 0.5]))
    assert scores.mse.item() == pytest.approx((0.01 + 0.09) / 4)
    assert scores.rmse.item() == pytest.approx(math.sqrt(0.025))
    assert scores.psnr.item() == pytest.approx(10 * math.log10(1 / 0.025))
    assert math.isnan(scores.ssim.item())
    assert scores.coordinates == 4


@pytest.mark.parametrize("shape", [(5,), (1, 12, 12), (3, 6, 9)])
def test_the_truth_itself_is_exact_recognisable_and_identified(shape):
    judge = judge_of(0, shape=shape)
    scores = judge.score(judge.truth)
    assert (scores.mse == 0).all()
    assert (scores.exact & scores.recognisable & scores.identified).all()
    alike = math.nan if len(shape) == 1 else 1.0  # what has no neighbourhoods has no SSIM
    torch.testing.assert_close(scores.ssim, torch.full_like(scores.ssim, alike), equal_nan=True)


@quick
@given(seed=seeds, low=st.floats(-50, 50), span=st.floats(0.01, 100))
def test_psnr_follows_from_mse_and_neither_it_nor_ssim_depends_on_the_unit_of_the_data(seed, low, span):
    plain = judge_of(seed, shape=(1, 6, 7))
    guesses = drawn(seed + 1, *plain.truth.shape)
    pool = Dataset((plain.public.inputs.double() * span + low).float(), plain.public.targets, 3)
    inside = (plain.truth.double() * span + low).clamp(low, low + span)
    scaled = Judge(inside, plain.labels, pool, low=low, high=low + span)
    before, after = plain.score(guesses), scaled.score(guesses.double() * span + low)
    assert torch.allclose(before.psnr, -10 * before.mse.log10())
    assert torch.allclose(after.mse, before.mse * span**2)
    assert torch.allclose(after.psnr, before.psnr)
    assert torch.allclose(after.ssim, before.ssim)
    assert torch.allclose(before.rmse.square(), before.mse)


@quick
@given(seed=seeds, low=st.floats(-3, 0), high=st.floats(0.5, 3), scale=st.floats(0.1, 1e6))
def test_reconstructions_are_scored_as_their_clamped_values(seed, low, high, scale):
    judge = judge_of(seed, low=min(low, 0.0), high=max(high, 1.0))
    wild = (drawn(seed + 1, *judge.truth.shape) - 0.5) * scale
    tame = wild.clamp(judge.low, judge.high)
    assert judge.score(wild).summary() == pytest.approx(judge.score(tame).summary(), nan_ok=True)


def test_what_is_not_finite_becomes_the_end_it_points_to_and_nan_the_low_end():
    values = torch.tensor([math.nan, math.inf, -math.inf, 5.0, -5.0, 0.5])
    assert cleaned(values, -1.0, 2.0).tolist() == [-1, 2, -1, 2, -1, 0.5]
    judge = judge_of(0)
    assert torch.equal(
        judge.score(torch.full_like(judge.truth, math.nan)).mse, judge.score(torch.zeros_like(judge.truth)).mse
    )


def test_only_visible_coordinates_are_scored():
    visible = torch.tensor([True, True, False])
    judge = Judge(vectors([0.2, 0.4, 0.9]), torch.tensor([[0]]), public(3), visible=visible)
    scores = judge.score(vectors([0.2, 0.4, 0.0]))
    assert scores.mse.item() == 0
    assert scores.identified.item()
    assert scores.coordinates == 2
    assert judge.score(vectors([0.3, 0.4, 0.9])).mse.item() == pytest.approx(0.005)


# Matching --------------------------------------------------------------------------------------------------------------


@quick
@given(seed=seeds, examples=st.integers(1, 5), data=st.data())
def test_scores_do_not_depend_on_the_order_of_reconstructions(seed, examples, data):
    judge = judge_of(seed, victims=1, examples=examples, shape=(1, 3, 4))
    guesses = drawn(seed + 1, *judge.truth.shape)
    order = torch.tensor(data.draw(st.permutations(range(examples))))
    before, after = judge.score(guesses), judge.score(guesses[:, order])
    for name in ("mse", "rmse", "psnr", "ssim", "exact", "recognisable", "identified"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert torch.equal(rearrange(guesses, before.order), rearrange(guesses[:, order], after.order))


@quick
@given(seed=seeds, present=st.lists(st.booleans(), min_size=4, max_size=4))
def test_no_other_matching_has_a_smaller_error_and_absent_slots_stay_where_they_are(seed, present):
    truth, guesses, mask = drawn(seed, 1, 4, 2), drawn(seed + 1, 1, 4, 2), torch.tensor([present])
    guesses[~mask] = math.nan
    order = match(guesses, truth, mask)
    assert sorted(order[0].tolist()) == [0, 1, 2, 3]
    real = mask[0].nonzero()[:, 0].tolist()
    assert all(order[0, slot] == slot for slot in range(4) if slot not in real)

    def error(slots) -> float:
        return float((guesses[0, list(slots)] - truth[0, real]).square().sum())

    assert error(order[0, real].tolist()) == pytest.approx(min(map(error, itertools.permutations(real))))


def test_absent_slots_have_no_scores_whatever_they_hold():
    truth, labels = drawn(0, 2, 3, 1, 12, 12), torch.tensor([[0, 1, -1], [2, -1, -1]])
    present = labels >= 0
    truth[~present] = math.nan
    guesses = torch.where(truth.isnan(), math.nan, truth * 0.9)
    scores = Judge(truth, labels, public(1, 12, 12), present=present).score(guesses)
    for name in ("mse", "rmse", "psnr", "ssim"):
        assert torch.equal(getattr(scores, name).isnan(), ~present), name
    for name in ("recognisable", "identified"):
        assert torch.equal(getattr(scores, name), present), name
    assert (
        not Judge(torch.zeros_like(truth), labels, public(1, 12, 12), present=present)
        .score(guesses * 0)
        .exact[~present]
        .any()
    )
    summary = scores.summary()
    assert summary["examples"] == 3
    assert summary["mse"] == pytest.approx(float(scores.mse[present].mean()))
    assert summary["identified"] == 1


# Successes and baselines -----------------------------------------------------------------------------------------------


def test_recognisable_means_a_psnr_and_closer_than_the_mean_of_its_class():
    pool = Dataset(torch.tensor([[0.4, 0.4], [0.6, 0.6], [0.0, 0.0]]), torch.tensor([0, 0, 1]), 2)
    truth = vectors([0.5, 0.6], [0.5, 0.6])
    judge = Judge(truth, torch.tensor([[0, 1]]), pool)
    same = judge.score(vectors([0.5, 0.45], [0.5, 0.45]))
    assert (same.psnr >= 15).all()
    assert same.recognisable.tolist() == [[False, True]]  # of class 0 the mean, (0.5, 0.5), is nearer
    assert judge.score(vectors([0.5, 0.59], [0.9, 0.6])).recognisable.tolist() == [[True, False]]  # 0.9: 11 dB


def test_summary_gives_means_medians_and_shares():
    judge = judge_of(0, victims=2, examples=2, shape=(1,))
    truth = torch.tensor([[[0.0], [0.0]], [[0.0], [0.0]]])
    judge = Judge(truth, judge.labels, judge.public)
    summary = judge.score(torch.tensor([[[0.01], [0.1]], [[0.2], [0.4]]])).summary()
    assert summary["mse"] == pytest.approx((0.0001 + 0.01 + 0.04 + 0.16) / 4)
    assert summary["median_mse"] == pytest.approx(0.025)
    assert summary["rmse"] == pytest.approx(0.71 / 4)
    assert summary["exact"] == 0.25
    assert (summary["examples"], summary["coordinates"], summary["candidates"]) == (4, 1, 61)


def test_baselines_are_the_scores_of_black_and_of_the_public_means():
    inputs = torch.tensor([[0.0, 0.2], [0.4, 0.2], [1.0, 1.0], [1.0, 0.6]])
    judge = Judge(vectors([0.2, 0.3], [0.9, 0.8]), torch.tensor([[0, 1]]), Dataset(inputs, torch.tensor([0, 0, 1, 1]), 3))
    found = judge.baselines()
    assert found.black.mse.flatten().tolist() == pytest.approx([0.065, 0.725])
    assert found.dataset_mean.mse.flatten().tolist() == pytest.approx([(0.16 + 0.04) / 2, (0.09 + 0.09) / 2])
    assert found.class_mean.mse.flatten().tolist() == pytest.approx([0.005, 0.005])
    assert not found.class_mean.recognisable.any()


def test_many_guesses_without_knowledge_match_better_than_one():
    digits = fedcdp.load("mnist5k")
    some, labels = digits.validation.inputs[:200].view(2, 100, 1, 28, 28), digits.validation.targets[:200].view(2, 100)
    found = Judge(some, labels, digits.train).baselines()
    assert found.drawn_means is not None
    drawn, mean = found.drawn_means.summary(), found.dataset_mean.summary()
    assert drawn["mse"] < 0.9 * mean["mse"]
    assert drawn["exact"] == 0
    assert Judge(some[:, :1], labels[:, :1], digits.train).baselines().drawn_means is None


def test_a_class_without_public_examples_has_the_mean_of_all():
    inputs = torch.tensor([[0.0], [0.5]])
    judge = Judge(vectors([0.5]), torch.tensor([[2]]), Dataset(inputs, torch.tensor([0, 1]), 3))
    assert judge.baselines().class_mean.mse.item() == pytest.approx(0.0625)


def test_baselines_of_real_digits_are_far_from_success():
    digits = fedcdp.load("mnist5k")
    judge = Judge(digits.validation.inputs[::50, None], digits.validation.targets[::50, None], digits.train)
    black, mean, of_class = (vars(judge.baselines())[name].summary() for name in ("black", "dataset_mean", "class_mean"))
    assert 0.15 > black["mse"] > mean["mse"] > of_class["mse"] > 0.02
    for each in (black, mean, of_class):
        assert each["exact"] == 0
        assert each["identified"] <= 0.1
        assert each["candidates"] == 1000


# Identification --------------------------------------------------------------------------------------------------------


def test_a_public_copy_of_the_truth_is_not_a_rival_but_all_others_are():
    truth = torch.tensor([[[0.5, 0.5]], [[0.1, 0.9]]])
    inputs = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.1, 0.9], [0.3, 0.3]])
    judge = Judge(truth, torch.zeros(2, 1, dtype=torch.int64), Dataset(inputs, torch.zeros(4, dtype=torch.int64), 1))
    scores = judge.score(torch.tensor([[[0.5, 0.4]], [[0.4, 0.6]]]))
    assert scores.identified.tolist() == [[True], [False]]
    assert scores.candidates == 3  # the first victim's: itself and two others


def test_a_copy_in_all_that_is_visible_is_no_rival_either():
    inputs = torch.tensor([[0.5, 0.1], [0.5, 0.2], [0.0, 0.0]])
    pool = Dataset(inputs, torch.zeros(3, dtype=torch.int64), 1)
    judge = Judge(vectors([0.5, 0.9]), torch.tensor([[0]]), pool, visible=torch.tensor([True, False]))
    scores = judge.score(vectors([0.4, 0.0]))
    assert scores.identified.item()
    assert scores.candidates == 2


def test_a_tie_identifies_nobody():
    pool = Dataset(torch.tensor([[0.25], [1.0]]), torch.tensor([0, 0]), 1)
    judge = Judge(vectors([0.75]), torch.tensor([[0]]), pool)
    assert not judge.score(vectors([0.5])).identified.item()
    assert judge.score(vectors([0.51])).identified.item()


def test_candidates_are_drawn_from_the_seed_for_each_victim_apart():
    few = Criteria(candidates=10)
    many, again = (judge_of(0, victims=30, examples=1, criteria=few) for _ in range(2))
    other = judge_of(0, victims=30, examples=1, criteria=few, seed=1)
    one = Judge(many.truth[:1], many.labels[:1], many.public, criteria=few)
    guesses = drawn(5, *many.truth.shape)
    found = many.score(guesses).identified
    assert torch.equal(found, again.score(guesses).identified)
    assert not torch.equal(found, other.score(guesses).identified)
    assert torch.equal(found[:1], one.score(guesses[:1]).identified)
    assert many.score(guesses).candidates == 10
    assert 0 < found.double().mean() < 0.5  # about one in ten by chance


def test_victims_with_the_same_truth_have_different_candidates():
    pool = Dataset(torch.linspace(0, 1, 60)[:, None], torch.zeros(60, dtype=torch.int64), 1)
    labels = torch.zeros(30, 1, dtype=torch.int64)
    judge = Judge(torch.full((30, 1, 1), 0.5), labels, pool, criteria=Criteria(candidates=10))
    found = judge.score(torch.full((30, 1, 1), 0.45)).identified  # 6 of the 60 are nearer than the truth
    assert 0.1 < found.double().mean() < 0.7


def test_copies_of_the_truth_are_replaced_by_other_candidates():
    inputs = torch.cat([torch.full((30, 1), 0.5), torch.linspace(0, 0.4, 20)[:, None]])
    judge = Judge(vectors([0.5]), torch.tensor([[0]]), Dataset(inputs, torch.zeros(50, dtype=torch.int64), 1),
                  criteria=Criteria(candidates=15))  # fmt: skip
    scores = judge.score(vectors([0.48]))
    assert scores.identified.item()
    assert scores.candidates == 15


# Chance ----------------------------------------------------------------------------------------------------------------


@quick
@given(trials=st.integers(1, 500), probability=st.floats(0, 1), confidence=st.floats(0.5, 0.999))
def test_chance_falls_within_its_interval_as_often_as_promised(trials, probability, confidence):
    from scipy.stats import binom

    low, high = chance_interval(trials, probability, confidence)
    assert 0 <= low <= high <= 1
    inside = binom.cdf(round(high * trials), trials, probability) - binom.cdf(round(low * trials) - 1, trials, probability)
    assert inside >= confidence - 1e-9


def test_the_interval_of_a_hundred_guesses_among_ten_labels():
    assert chance_interval(100, 0.1) == (0.03, 0.18)


# Refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"exact_mse": 0.0}, "exact_mse: 0.0 is not allowed; it must be positive"),
        ({"recognisable_psnr": math.nan}, "recognisable_psnr: nan is not a finite number"),
        ({"candidates": 1}, "candidates: 1 is not allowed; it must be at least 2"),
        ({"candidates": 2.5}, "candidates: 2.5 is not a whole number"),
    ],
)
def test_criteria_that_make_no_sense_are_refused(given, sentence):
    with pytest.raises(PlanError) as caught:
        Criteria(**given)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"present": torch.ones(2, 2, dtype=torch.bool)}, "present: shape"),
        ({"present": torch.zeros(2, 3, dtype=torch.bool)}, "present: no victim has an example"),
        ({"visible": torch.ones(4, dtype=torch.bool)}, "visible: shape"),
        ({"visible": torch.zeros(5, dtype=torch.bool)}, "visible: no coordinate"),
        ({"low": 1.0}, "low, high: 1.0 to 1.0 is not a finite range"),
        ({"high": math.inf}, "low, high: 0.0 to inf is not a finite range"),
        ({"high": 0.5}, "truth: not every value lies between low, 0.0, and high, 0.5"),
    ],
)
def test_a_judge_that_makes_no_sense_is_refused(given, sentence):
    with pytest.raises(PlanError, match=sentence):
        judge_of(0, **given)


def test_public_examples_and_reconstructions_of_another_shape_are_refused():
    judge = judge_of(0)
    with pytest.raises(PlanError, match="public: shape"):
        Judge(judge.truth, judge.labels, public(6))
    with pytest.raises(PlanError, match="reconstructions: shape"):
        judge.score(judge.truth[:1])


def test_chance_without_trials_is_refused():
    with pytest.raises(PlanError, match="chance: 0 trials"):
        chance_interval(0, 0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_scores():
    host = judge_of(0, victims=4, examples=3, shape=(3, 20, 20))
    device = Judge(host.truth.cuda(), host.labels, host.public)
    guesses = (host.truth.flip(1) + 0.3 * drawn(9, *host.truth.shape)).clamp(0, 1)
    expected, found = host.score(guesses), device.score(guesses.cuda())
    for name, value in vars(expected).items():
        torch.testing.assert_close(torch.as_tensor(getattr(found, name)).cpu(), torch.as_tensor(value), msg=name)
    assert device.baselines().class_mean.summary() == pytest.approx(host.baselines().class_mean.summary())
    assert int(visible_inputs(build("cnn", (1, 28, 28), 10).cuda(), (1, 28, 28), "cuda").sum()) == 676
