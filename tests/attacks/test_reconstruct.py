"""Attacks from end to end: what they get out of an unprotected network, what out of a protected one, and how they go on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcdp.attacks import reconstruct as reconstructing
from fedcdp.attacks.objectives import Objective, predicted
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.optimisers import LBFGS, Adam
from fedcdp.attacks.recipe import CPL, RECIPES, Recipe, Seed
from fedcdp.attacks.reconstruct import Patience, Reconstruction, reconstruct
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import partition
from fedcdp.errors import DataError, PlanError
from tests.support.scenes import Scene, federation_of, one_example_each, scene


def mse(found: Reconstruction, captured: Captured) -> Tensor:
    """[victims]: of the first example, clamped to what a pixel can be."""
    return (found.examples[:, 0].clamp(0, 1) - captured.inputs[:, 0]).square().flatten(1).mean(1)


@pytest.fixture(scope="module")
def few(digits: Dataset) -> Dataset:
    return digits.take(torch.arange(40))


def paper(cpl: nn.Module, few: Dataset, **fields: Any) -> Scene:
    return scene(cpl, one_example_each(few), **fields)


class Watched:
    """What an attack tells of itself on its way."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []
        self.where: dict[int, Tensor] = {}
        self.told: list[tuple[int, int]] = []

    def watch(self, iteration: int, who: Tensor, examples: Tensor) -> None:
        assert len(who) == len(examples)
        assert not examples.requires_grad
        self.seen.append((iteration, who.tolist()))
        for victim, example in zip(who.tolist(), examples, strict=True):
            self.where[victim] = example.clone()

    def progress(self, done: int, total: int) -> None:
        self.told.append((done, total))


# The paper's attack ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_papers_attack_sees_digits_in_unprotected_gradients_within_ten_iterations(cpl: nn.Module, few: Dataset) -> None:
    captured = paper(cpl, few).look("type2", 4)
    found = reconstruct(captured, CPL.but(iterations=10), 10)
    assert torch.equal(found.labels, captured.targets)
    assert sorted(mse(found, captured).tolist())[2] < 1e-3
    assert float(mse(found, captured).max()) < 10**-1.5


@pytest.mark.slow
def test_the_papers_attack_gets_nothing_out_of_fed_cdp(cpl: nn.Module, few: Dataset) -> None:
    """σ = 6, C = 4: below 15 dB, and farther off than a picture of the mean of all digits."""
    captured = paper(cpl, few, method="fed-cdp", clip=4.0, noise_multiplier=6.0).look("type2", 4)
    for name in ("cpl", "clip-aware"):
        found = reconstruct(captured, RECIPES[name].but(iterations=4), 10)
        assert float(mse(found, captured).min()) > 10**-1.5
        assert bool((mse(found, captured) > (few.inputs.mean(0) - captured.inputs[:, 0]).square().flatten(1).mean(1)).all())


@pytest.mark.slow
def test_clipping_without_noise_stops_only_a_reader_who_does_not_know_of_it(cpl: nn.Module, few: Dataset) -> None:
    captured = paper(cpl, few, method="fed-cdp", clip=0.5, noise_multiplier=0.0).look("type2", 3)
    blind = reconstruct(captured, RECIPES["cpl"].but(iterations=5), 10)
    aware = reconstruct(captured, RECIPES["clip-aware"].but(iterations=10), 10)
    assert float(mse(blind, captured).min()) > 0.02
    assert float(mse(aware, captured).median()) < 2e-3
    assert torch.equal(aware.labels, captured.targets)


def test_chunks_of_victims_give_what_all_at_once_give(cpl: nn.Module, few: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding, which L-BFGS amplifies: over a few moves."""
    captured = paper(cpl, few).look("type2", 5)
    recipe = CPL.but(iterations=2, optimiser=LBFGS(inner=4))
    whole = reconstruct(captured, recipe, 10)
    monkeypatch.setattr(reconstructing, "_victims_at_once", lambda *_: 2)
    chunked = reconstruct(captured, recipe, 10)
    assert torch.equal(chunked.seeds, whole.seeds)
    assert chunked.evaluations == whole.evaluations
    torch.testing.assert_close(chunked.examples, whole.examples, rtol=0, atol=1e-3)
    torch.testing.assert_close(chunked.loss, whole.loss, rtol=1e-2, atol=0)


def test_less_memory_means_smaller_chunks(cpl: nn.Module, few: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = paper(cpl, few).look("type2", 5)
    monkeypatch.setitem(reconstructing._MEMORY, "cpu", 3 * 2**20)
    watched = Watched()
    reconstruct(captured, CPL.but(iterations=1, optimiser=LBFGS(inner=1)), 10, watch=watched.watch)
    assert len(watched.seen) > 1
    assert sorted(victim for _, who in watched.seen for victim in who) == [0, 1, 2, 3, 4]


# Small problems, in which every victim is found -------------------------------------------------------------------------


def vectors(small: Any, each: int = 2, **fields: Any) -> Scene:
    """Clients with so many vectors each."""
    return scene(small.model, federation_of(small.inputs, small.targets, [each] * (24 // each)), **fields)


QUICK = CPL.but(seed=Seed("uniform"), iterations=30)


def distance(found: Reconstruction, captured: Captured) -> Tensor:
    """[victims]: to the first example."""
    return (found.examples[:, 0] - captured.inputs[:, 0]).norm(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("knows", ["gradient", "method"])
@pytest.mark.parametrize("optimiser", [LBFGS(), Adam(learning_rate=0.05, total=2400, inner=80)], ids=["lbfgs", "adam"])
def test_a_vector_is_found_exactly(small: Any, knows: Any, optimiser: Any) -> None:
    captured = vectors(small).look("type2", 6)
    found = reconstruct(captured, QUICK.but(knows=knows, optimiser=optimiser), 3)
    assert torch.equal(found.labels, captured.targets)
    assert int((distance(found, captured) < 0.05).sum()) >= 5
    torch.testing.assert_close(found.loss, losses(found, captured), rtol=1e-3, atol=1e-9)


def losses(found: Reconstruction, captured: Captured) -> Tensor:
    shown = predicted(captured, "gradient", found.examples, found.labels, captured.present[:, : found.examples.shape[1]])
    return Objective().between(shown, captured.seen)


@pytest.mark.slow
def test_an_example_of_a_poisson_batch_is_found_whatever_the_batch_was_expected_to_be(small: Any) -> None:
    captured = vectors(small, 6, record_sampling="poisson", batch_size=2, seed=5).look("type1", 3)
    alone = captured.present.sum(1) == 1
    assert bool(alone.any())
    found = reconstruct(captured, RECIPES["batch"].but(iterations=40, labels="known", restarts=3), 3)
    assert float(distance(found, captured)[alone].min()) < 0.01


def test_one_dummy_for_a_batch_may_know_the_method(small: Any) -> None:
    """The paper's single dummy with a reader who clips as the method does: attributes of a recipe are independent."""
    captured = vectors(small, 6, method="fed-cdp", noise_multiplier=0.0, clip=0.3, batch_size=3).look("type1", 4)
    found = reconstruct(captured, QUICK.but(knows="method", labels="counts"), 3)
    assert found.examples.shape == (4, 1, 4)
    assert bool((found.loss < 1).all())


@pytest.mark.slow
def test_labels_are_found_jointly_with_the_examples(small: Any) -> None:
    captured = vectors(small).look("type2", 6)
    found = reconstruct(captured, RECIPES["dlg"].but(iterations=60, restarts=3), 3)
    assert found.labels.shape == (6, 1)
    good = found.loss < 1e-6
    assert int(good.sum()) >= 4
    assert torch.equal(found.labels[good], captured.targets[good])
    assert float(distance(found, captured)[good].max()) < 0.1


def test_jointly_found_labels_do_not_depend_on_how_victims_are_chunked(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = vectors(small).look("type2", 6)
    recipe = RECIPES["dlg"].but(iterations=1, optimiser=LBFGS(inner=2), restarts=2)
    whole = reconstruct(captured, recipe, 3)
    monkeypatch.setattr(reconstructing, "_victims_at_once", lambda *_: 1)
    apart = reconstruct(captured, recipe, 3)
    torch.testing.assert_close(apart.last, whole.last, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(apart.loss, whole.loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("labels", ["known", "joint"])
def test_results_follow_from_the_seed(small: Any, labels: Any) -> None:
    captured = vectors(small).look("type2", 4)
    recipe = RECIPES["dlg"].but(labels=labels, iterations=2)
    one, same, other = (reconstruct(captured, recipe, 3, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one.examples, same.examples)
    assert not torch.isclose(one.seeds, other.seeds).any()


@pytest.mark.parametrize("labels", ["known", "joint"])
def test_restarts_keep_what_fits_better(small: Any, labels: Any) -> None:
    """Five iterations of two moves: some victims are better off with their second seed, some with the first."""
    captured = vectors(small).look("type2", 8)
    recipe = Recipe(seed=Seed("normal"), labels=labels, iterations=5, optimiser=LBFGS(inner=2))
    once, thrice = reconstruct(captured, recipe, 3), reconstruct(captured, recipe.but(restarts=3), 3)
    kept = thrice.loss == once.loss
    assert bool((thrice.loss <= once.loss).all())
    assert 0 < int(kept.sum()) < 8
    for name in ("examples", "last", "seeds", "labels", "iterations", "outcome"):
        assert torch.equal(getattr(thrice, name)[kept], getattr(once, name)[kept])
    assert not torch.isclose(thrice.seeds[~kept], once.seeds[~kept]).all(-1).any()
    assert thrice.evaluations > 2 * once.evaluations


# Victims that are done ------------------------------------------------------------------------------------------------


def test_victims_that_are_done_keep_their_results_while_others_go_on(small: Any) -> None:
    captured = vectors(small).look("type2", 8)
    watched = Watched()
    few_moves = QUICK.but(optimiser=LBFGS(inner=3))  # so that they need different numbers of iterations
    found = reconstruct(captured, few_moves, 3, watch=watched.watch)
    assert len(set(found.iterations.tolist())) > 1
    assert set(found.outcome.tolist()) <= {0, Reconstruction.CONVERGED, Reconstruction.DIVERGED}
    for victim in range(8):
        until = [iteration for iteration, who in watched.seen if victim in who]
        assert until == list(range(1, 1 + int(found.iterations[victim])))
        assert torch.equal(watched.where[victim], found.last[victim])
    torch.testing.assert_close(found.loss, losses(found, captured), rtol=1e-3, atol=1e-9)
    fits = found.loss < 1e-6
    assert int(fits.sum()) >= 4
    assert found.outcome[fits].tolist() == [Reconstruction.CONVERGED] * int(fits.sum())
    torch.testing.assert_close(found.examples[fits], found.last[fits], rtol=0, atol=1e-2)


def test_a_victim_that_is_found_at_once_is_done_after_one_iteration(small: Any) -> None:
    """Its example is the seed."""
    captured = vectors(replace(small, inputs=torch.zeros_like(small.inputs))).look("type2", 3)
    found = reconstruct(captured, QUICK.but(seed=Seed("zeros")), 3)
    assert found.iterations.tolist() == [1, 1, 1]
    assert found.outcome.tolist() == [Reconstruction.CONVERGED] * 3
    assert torch.equal(found.examples, captured.inputs)


@pytest.mark.parametrize("optimiser", [LBFGS(), Adam()], ids=["lbfgs", "adam"])
def test_a_victim_that_is_lost_does_not_disturb_the_others(small: Any, optimiser: Any) -> None:
    captured = vectors(small).look("type2", 4)
    recipe = QUICK.but(labels="known", optimiser=optimiser, iterations=4)
    expected = reconstruct(captured, recipe, 3)
    seen = {name: value.clone() for name, value in captured.seen.items()}
    for value in seen.values():
        value[1] = torch.nan
    found = reconstruct(replace(captured, seen=seen), recipe, 3)
    assert int(found.outcome[1]) == Reconstruction.DIVERGED
    assert int(found.iterations[1]) == 1
    assert math.isinf(float(found.loss[1]))
    assert torch.equal(found.examples[1], found.seeds[1])
    others = [0, 2, 3]
    torch.testing.assert_close(found.examples[others], expected.examples[others], rtol=1e-4, atol=1e-4)


def test_a_search_that_leaves_for_good_is_given_up(small: Any) -> None:
    captured = vectors(small).look("type2", 3)
    far = QUICK.but(optimiser=Adam(learning_rate=1e6, inner=2), iterations=20)
    found = reconstruct(captured, far, 3)
    assert found.outcome.tolist() == [Reconstruction.DIVERGED] * 3
    assert int(found.iterations.max()) < 3
    assert torch.equal(found.examples, found.seeds)


def test_patience_ends_with_gains_of_less_than_a_thousandth() -> None:
    """Steady, falling by .2 %, falling by .01 %, and falling below zero, as a posterior density may."""
    start, falls = torch.tensor([1.0, 1.0, 1.0, -5.0]), torch.tensor([0.0, 2e-3, 1e-4, 1.0])
    patience, who = Patience(3, torch.full((4,), torch.inf)), torch.arange(4)
    over = [patience.is_over(who, start - falls * turn, turn + 1).tolist() for turn in range(5)]
    assert over == [[False] * 4] * 3 + [[True, False, True, False]] * 2
    assert not any(Patience(None, start).is_over(who, start, 100))


def test_a_search_without_gains_ends_before_its_iterations_do(small: Any) -> None:
    captured = vectors(small, method="fed-cdp", noise_multiplier=50.0).look("type2", 6)
    recipe = QUICK.but(iterations=40)
    long, short = (reconstruct(captured, each, 3) for each in (recipe, recipe.but(patience=2)))
    assert int(short.iterations.sum()) < int(long.iterations.sum())
    assert bool((short.loss >= long.loss).all())


def test_sharpening_fits_closer_than_smooth_images_do(small: Any) -> None:
    """A preference that weighs as much as the fit; then a search from there without it, and no more iterations than said."""
    images = replace(small, model=nn.Sequential(nn.Flatten(), small.model), inputs=small.inputs.view(-1, 1, 2, 2))
    captured = vectors(images).look("type2", 3)
    smooth = QUICK.but(objective=Objective(total_variation=0.1), labels="known", iterations=2)
    one, other = reconstruct(captured, smooth, 3), reconstruct(captured, smooth.but(sharpening=2), 3)
    assert one.misfit is not None
    assert other.misfit is not None
    assert float(other.misfit.median()) < 0.01 * float(one.misfit.median())
    assert bool((other.misfit <= one.misfit).all())
    assert bool((other.iterations - one.iterations <= 2).all())
    assert bool((other.iterations > one.iterations).all())
    assert torch.equal(other.seeds, one.seeds)
    watched = Watched()
    few = smooth.but(iterations=1, sharpening=2, optimiser=LBFGS(inner=1))
    reconstruct(captured, few, 3, watch=watched.watch, progress=watched.progress)
    assert [iteration for iteration, _ in watched.seen] == [1, 2, 3]
    assert watched.told == [(1, 3), (2, 3), (3, 3), (3, 3)]


def test_some_victims_alone_are_attacked_as_among_all(small: Any) -> None:
    captured, some = vectors(small).look("type2", 6), torch.tensor([1, 4])
    recipe = RECIPES["dlg"].but(iterations=2, optimiser=LBFGS(inner=2))
    watched = Watched()
    whole, alone = reconstruct(captured, recipe, 3), reconstruct(captured, recipe, 3, who=some, watch=watched.watch)
    torch.testing.assert_close(alone.examples, whole.examples[some], rtol=1e-4, atol=1e-5)
    assert torch.equal(alone.seeds, whole.seeds[some])
    assert watched.seen == [(1, [1, 4]), (2, [1, 4])]
    kept = replace(whole, examples=whole.examples + 1.0).updated(some, alone)
    assert torch.equal(kept.examples[some], alone.examples)
    assert torch.equal(kept.examples[0], whole.examples[0] + 1.0)
    assert kept.evaluations == alone.evaluations < whole.evaluations


def test_what_fits_best_is_kept_and_where_the_search_ended_told_apart(small: Any) -> None:
    """A rate so large that the search passes by its best point."""
    captured = vectors(small).look("type2", 6)
    found = reconstruct(captured, QUICK.but(optimiser=Adam(learning_rate=1.0, inner=1, total=10**6), iterations=12), 3)
    ended = losses(replace(found, examples=found.last), captured)
    assert bool((found.loss <= ended * (1 + 1e-4)).all())
    assert bool((found.loss < ended).any())


def test_a_tensor_alone_is_done_when_it_fits_by_its_own_measure(small: Any) -> None:
    """Its gradient is a ten-millionth of the whole: against that, everything would fit."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e-7)
    captured = vectors(replace(small, model=model)).look("type2", 3)
    alone = QUICK.but(objective=Objective().only("0.weight"), optimiser=Adam(), iterations=3)
    found = reconstruct(captured, alone, 3)
    assert found.iterations.tolist() == [3, 3, 3]
    assert found.outcome.tolist() == [0, 0, 0]


# What is told on the way ------------------------------------------------------------------------------------------------


def test_watch_and_progress_are_told_after_every_iteration(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = vectors(small).look("type2", 5)
    monkeypatch.setattr(reconstructing, "_victims_at_once", lambda *_: 3)
    watched = Watched()
    recipe = QUICK.but(iterations=3, restarts=2, optimiser=LBFGS(inner=1))
    reconstruct(captured, recipe, 3, watch=watched.watch, progress=watched.progress)
    both = [(iteration, who) for who in ([0, 1, 2], [3, 4]) for _ in range(2) for iteration in (1, 2, 3)]
    assert watched.seen == both
    assert watched.told == [(done, 12) for done in range(1, 13)] + [(12, 12)]


def test_progress_reaches_its_end_when_victims_are_done_early(small: Any) -> None:
    watched = Watched()
    reconstruct(vectors(small).look("type2", 3), QUICK.but(iterations=500), 3, progress=watched.progress)
    assert watched.told[-1] == (500, 500)
    assert len(watched.told) < 400
    assert watched.told == sorted(watched.told)


def test_evaluations_are_counted_by_victim(small: Any) -> None:
    captured = vectors(small).look("type2", 4)
    found = reconstruct(captured, QUICK.but(iterations=2, optimiser=Adam(inner=5)), 3)
    assert found.evaluations == 4 * (2 * 5 + 1)


# Where it is looked for -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", [LBFGS(), Adam(learning_rate=0.5, signed=True)], ids=["lbfgs", "adam"])
def test_a_box_is_never_left(small: Any, optimiser: Any) -> None:
    captured = vectors(small).look("type2", 6)
    low, high = -0.5, 0.75
    watched = Watched()
    recipe = RECIPES["inverting-gradients"].but(labels="known", optimiser=optimiser, iterations=6)
    found = reconstruct(captured, recipe, 3, value_range=(low, high), watch=watched.watch)
    for examples in (found.examples, found.last, found.seeds, *watched.where.values()):
        assert low <= float(examples.min())
        assert float(examples.max()) <= high
    assert float(found.last.max()) == high
    free = reconstruct(captured, recipe.but(space="free"), 3, value_range=(low, high))
    assert float(free.last.abs().max()) > high


@pytest.mark.slow
def test_inverting_gradients_comes_closer_in_direction_from_iteration_to_iteration(cpl: nn.Module, few: Dataset) -> None:
    captured = paper(cpl, few).look("type2", 2)
    recipe = RECIPES["inverting-gradients"]
    short, longer = (reconstruct(captured, recipe.but(iterations=count), 10) for count in (1, 12))
    assert bool((longer.loss < 0.5 * short.loss).all())
    assert torch.equal(longer.labels, captured.targets)


@pytest.mark.slow
def test_principal_components_find_the_likely_image_under_noise_that_stops_pixels(
    cpl: nn.Module, few: Dataset, digits: Dataset
) -> None:
    there = paper(cpl, few, method="fed-cdp", clip=4.0, noise_multiplier=0.02)
    captured = there.look("type2", 4)
    recipe = RECIPES["averaging"].but(labels="known", iterations=4, restarts=1)
    public = digits.take(torch.arange(40, 1000))
    likely = reconstruct(captured, recipe, 10, public=public)
    pixels = reconstruct(captured, recipe.but(space="free"), 10)
    mean = (public.inputs.mean(0) - captured.inputs[:, 0]).square().flatten(1).mean(1)
    assert bool((mse(likely, captured) < 0.7 * mean).all())
    assert bool((mse(pixels, captured) > mean).all())


def test_principal_components_without_public_examples_are_refused_in_a_sentence(small: Any) -> None:
    captured = vectors(small).look("type2", 2)
    with pytest.raises(DataError, match=r"^public: this attack needs public examples for its principal components"):
        reconstruct(captured, RECIPES["averaging"], 3)


@pytest.mark.parametrize("name", ["batch", "unrolled"])
def test_a_victim_with_fewer_examples_than_another_gets_as_many_dummies(small: Any, name: str) -> None:
    there = scene(
        small.model, federation_of(small.inputs, small.targets, [1, 2, 6, 6]), batch_size=3, local_steps=2,
        learning_rate=0.1,
    )  # fmt: skip
    captured = there.look("type1", 4)
    found = reconstruct(captured, RECIPES[name].but(iterations=3, labels="known"), 3)
    assert found.examples.shape == captured.inputs.shape
    assert torch.equal(found.examples[~captured.present], found.seeds[~captured.present])
    assert not torch.isclose(found.last[captured.present], found.seeds[captured.present]).all(-1).any()


def test_an_update_of_several_steps_is_unrolled(small: Any) -> None:
    """Three steps of one record each, which the sum of three gradients at the first weights does not explain."""
    there = vectors(small, 6, local_steps=3, learning_rate=0.5)
    captured = there.look("type1", 3)
    unrolled, plain = (
        reconstruct(captured, RECIPES[name].but(iterations=30, labels="known", restarts=2), 3)
        for name in ("unrolled", "batch")
    )
    assert float(unrolled.loss.median()) < 1e-6
    assert float(plain.loss.median()) > 1e-4


# Recipes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["iterations", "restarts", "components"])
def test_a_recipe_that_does_nothing_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(PlanError, match=rf"^{name}: 0 is not allowed; it must be at least 1$"):
        CPL.but(**{name: 0})


def test_the_papers_recipe_is_as_its_authors_ran_it() -> None:
    assert Recipe(
        seed=Seed("pattern", 2), labels="gradient", dummies="one", knows="gradient", objective=Objective("squared"),
        optimiser=LBFGS(1.0, 20, 100), space="free", iterations=300, restarts=1,
    ) == CPL  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_on_every_leak_of_every_kind_of_method(small: Any, name: str) -> None:
    public = Dataset(torch.randn(80, 4), torch.zeros(80, dtype=torch.int64), 3)
    optimiser = RECIPES[name].optimiser
    recipe = RECIPES[name].but(iterations=2, restarts=1, components=3, optimiser=replace(optimiser, inner=2))
    for method in ("nonprivate", "fed-sdp", "fed-cdp", "dssgd"):
        for leak, fields in (("type2", {}), ("type1", {}), ("type0", {"local_steps": 2})):
            there = vectors(small, 6, method=method, record_sampling="poisson", batch_size=2, noise_at="client", **fields)
            captured = there.look(leak, 3)
            found = reconstruct(captured, recipe, 3, public=public)
            assert found.labels.shape == found.examples.shape[:2]
            assert bool(torch.isfinite(found.examples).all())


@pytest.mark.slow
def test_a_batch_of_digits_is_attacked_with_as_many_dummies(cpl: nn.Module, digits: Dataset) -> None:
    there = scene(cpl, partition(digits, 100, "iid"), batch_size=2)
    captured = there.look("type1", 2)
    found = reconstruct(captured, RECIPES["batch"].but(iterations=8), 10)
    assert torch.equal(found.labels.sort(1)[0], captured.targets.sort(1)[0])
    start = losses(replace(found, examples=found.seeds), captured)
    assert bool((found.loss < 0.01 * start).all())
