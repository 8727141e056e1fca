"""What an attack got, as figures, files and pictures: complete, honest about what is not known, and readable by anyone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import RECIPES, Criteria, Leaks
from fedcdp.attacks.judging import Observer
from fedcdp.attacks.leaks import compared_truth, finite
from fedcdp.attacks.optimisers import LBFGS
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation

CONTRACT = [
    "method", "leak", "attack", "victims", "success_rate", "distance_mean", "distance_median", "psnr_mean",
    "iterations_mean",
]  # fmt: skip


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Small pictures, two at a client; some are public."""
    generator = torch.Generator().manual_seed(4)
    inputs, targets = torch.rand(60, 1, 6, 6, generator=generator), torch.randint(3, (60,), generator=generator)
    public = Dataset(inputs[40:], targets[40:], 3)
    return fedcdp.partition((inputs[:40], targets[:40]), clients=20, scheme="iid", validation=public)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 3))


def attacked(federation: Federation, batch: int = 1, **how: Any) -> Leaks:
    fields = {"method": "nonprivate", "rounds": 1, "per_round": 2, "local_steps": 1, "batch_size": batch}
    plan = Plan(**fields | {"record_sampling": "partition"} | how.pop("plan", {}))
    how = {"victims": 10, "leak": "type1", "attack": "analytic"} | how
    found = fedcdp.attack(plan, model=network(), federation=federation, **how)
    assert isinstance(found, Leaks)
    return found


@pytest.fixture(scope="module")
def pairs(federation: Federation) -> Leaks:
    """Ten batches of two, by the closed form."""
    return attacked(federation, batch=2)


@pytest.fixture(scope="module")
def searched(federation: Federation) -> Leaks:
    """Ten single examples, by a search that noise leads astray."""
    astray = {"method": "fed-cdp", "noise_multiplier": 0.1}
    return attacked(federation, attack=RECIPES["cpl"].but(iterations=7), leak="type2", plan=astray)


# Figures --------------------------------------------------------------------------------------------------------------


def test_the_summary_has_all_that_was_promised_and_is_strict_json(pairs: Leaks, searched: Leaks) -> None:
    for found in (pairs, searched):
        row = found.summary()
        assert list(row)[: len(CONTRACT)] == CONTRACT
        assert json.loads(json.dumps(row, allow_nan=False)) == row


@pytest.mark.parametrize(
    ("noise", "attack", "fitted"), [(0.0, "clip-aware", 1.0), (0.0, "cpl", 0.0), (5.0, "clip-aware", 0.0)]
)
def test_the_adversary_can_tell_whether_its_search_fits(
    federation: Federation, noise: float, attack: str, fitted: float
) -> None:
    """By its own measure: the one that ignores clipping, and the one that fits noise, know that they have failed."""
    plan = {"method": "fed-cdp", "noise_multiplier": noise, "clip": 0.1}
    found = attacked(federation, attack=RECIPES[attack].but(iterations=20), leak="type2", plan=plan, victims=4)
    assert found.summary()["fitted_rate"] == fitted
    assert found.found.misfit is not None
    assert bool((found.found.misfit >= 0).all())


def test_closed_forms_have_no_search_that_could_fit(pairs: Leaks) -> None:
    assert "fitted_rate" not in pairs.summary()


def test_a_result_prints_as_one_line(pairs: Leaks) -> None:
    told = pairs.summary()
    assert str(pairs) == repr(pairs)
    assert str(pairs).startswith("type1, attack analytic, 10 victims of nonprivate: ")
    assert f"{100 * told['success_rate']:.3g} % reconstructed exactly" in str(pairs)
    assert f"{100 * told['identified_rate']:.3g} % identified among {told['candidates']:,}" in str(pairs)
    assert "\n" not in str(pairs)


def test_the_summary_is_of_the_scores(pairs: Leaks) -> None:
    row, scores = pairs.summary(), pairs.scores
    assert scores is not None
    assert (row["victims"], row["examples"], row["method"], row["leak"]) == (10, 20, "nonprivate", "type1")
    assert row["success_rate"] == pairs.success_rate == float(scores.exact.double().mean())
    assert row["distance_mean"] == pytest.approx(float(scores.mse.mean()))
    assert row["distance_median"] == pytest.approx(float(scores.mse.quantile(0.5)))
    assert row["psnr_mean"] == pytest.approx(float(scores.psnr.mean()))
    assert row["out_of_iterations"] + row["converged"] + row["diverged"] == 10
    assert (row["visible_coordinates"], row["coordinates"]) == (36, 36)


def test_beside_every_figure_stands_what_knowing_nothing_scores(searched: Leaks) -> None:
    nothing = searched.summary()["knowing_nothing"]
    assert set(nothing) == {"black", "dataset_mean", "class_mean"}
    for row in nothing.values():
        assert set(row) == {"mse", "median_mse", "rmse", "psnr", "exact", "recognisable", "identified"}
        assert 0.05 < row["mse"] < 0.5
        assert row["exact"] == 0


def test_labels_are_those_of_the_reconstruction_that_was_matched(pairs: Leaks) -> None:
    assert pairs.scores is not None
    order = pairs.scores.order
    labels = pairs.found.labels.gather(1, order)
    assert pairs.label_accuracy() == float((labels == pairs.captured.targets).double().mean())
    low, high = pairs.summary()["label_chance_99"]
    assert 0 <= low < 1 / 3 < high <= 1


def test_iterations_are_counted_until_the_example_was_exact(federation: Federation) -> None:
    """An iteration of few steps, so that one does not do."""
    short = RECIPES["cpl"].but(optimiser=LBFGS(inner=3))
    long = attacked(federation, attack=short.but(iterations=40), leak="type2")
    reached = long.first_exact.isfinite()
    assert reached.any()
    assert (long.first_exact[reached] <= long.found.iterations[reached]).all()
    wanted = torch.where(reached, long.first_exact, long.found.iterations.double())
    assert long.summary()["iterations_mean"] == pytest.approx(float(wanted.mean()))
    first = int(long.first_exact[reached].min())
    assert first > 1
    for iterations in (first - 1, first):
        cut = attacked(federation, attack=short.but(iterations=iterations), leak="type2")
        assert torch.equal(cut.first_exact.isfinite(), long.first_exact <= iterations)


def test_nothing_is_recognised_in_a_table() -> None:
    """A mean may be near a record of a table; that is no picture of anybody."""
    tables = fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=40, scheme="iid")
    plan = Plan(method="fed-cdp", local_steps=1, batch_size=2)
    row = fedcdp.attack(plan, model=nn.Linear(30, 2), federation=tables, leak="type1", victims=20).summary()
    assert row["recognisable_rate"] is None
    assert row["ssim_mean"] is None
    assert row["success_rate"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_that_json_does_not_have_gets_through(value: float) -> None:
    given = {"a": value, "b": [1.0, value], "c": {"d": value, "e": (value, "f")}, "g": 2, "h": None, "i": True}
    wanted = {"a": None, "b": [1.0, None], "c": {"d": None, "e": [None, "f"]}, "g": 2, "h": None, "i": True}
    assert finite(given) == wanted


# One guess for several examples ---------------------------------------------------------------------------------------


def test_one_guess_for_a_batch_is_compared_with_the_nearest_example(federation: Federation) -> None:
    found = attacked(federation, batch=2, attack=RECIPES["cpl"].but(iterations=3))
    assert found.found.examples.shape == (10, 1, 1, 6, 6)
    truth, labels, present = compared_truth(found.captured, found.found.examples, (0.0, 1.0))
    assert truth.shape == (10, 1, 1, 6, 6)
    assert present.all()
    both = (found.found.examples.clamp(0, 1) - found.captured.inputs).square().flatten(2).mean(2)
    nearest = both.argmin(1)
    assert torch.equal(truth[:, 0], found.captured.inputs[torch.arange(10), nearest])
    assert torch.equal(labels[:, 0], found.captured.targets[torch.arange(10), nearest])
    assert found.scores is not None
    torch.testing.assert_close(found.scores.mse[:, 0], both.amin(1).double())


def test_the_nearest_example_is_judged_in_the_range_of_the_data(searched: Leaks) -> None:
    """Clamped to [0, 1], a guess of −4 would look nearer to 0 than to −5."""
    captured = searched.captured.take(torch.zeros(1, dtype=torch.int64))
    inputs = torch.stack([torch.zeros(1, 6, 6), torch.full((1, 6, 6), -5.0)])[None]
    several = type(captured)(**vars(captured) | {
        "inputs": inputs, "targets": torch.tensor([[0, 1]]), "present": torch.ones(1, 2, dtype=torch.bool),
    })  # fmt: skip
    truth, labels, _ = compared_truth(several, torch.full((1, 1, 1, 6, 6), -4.0), (-5.0, 0.0))
    assert (float(truth.mean()), int(labels)) == (-5, 1)


def test_an_absent_example_is_never_the_nearest(searched: Leaks) -> None:
    captured = searched.captured.take(torch.zeros(1, dtype=torch.int64))
    inputs = torch.stack([torch.zeros(1, 6, 6), torch.ones(1, 6, 6)])[None]
    several = type(captured)(**vars(captured) | {
        "inputs": inputs, "targets": torch.tensor([[0, 1]]), "present": torch.tensor([[True, False]]),
    })  # fmt: skip
    truth, _, present = compared_truth(several, torch.ones(1, 1, 1, 6, 6), (0.0, 1.0))
    assert float(truth.mean()) == 0
    assert present.all()


# Following a search ---------------------------------------------------------------------------------------------------


def observer_of(found: Leaks) -> Observer:
    return Observer(found.captured, Criteria(), torch.ones(1, 6, 6, dtype=torch.bool), (0.0, 1.0))


def test_the_observer_notes_when_a_victim_was_exact_for_the_first_time(searched: Leaks) -> None:
    watching, truth = observer_of(searched), searched.captured.inputs
    wrong = 1 - truth
    watching(1, torch.arange(10), wrong)
    watching(2, torch.tensor([3, 5]), torch.stack([truth[3], wrong[5]]))
    watching(3, torch.tensor([3, 5]), torch.stack([wrong[3], truth[5]]))
    expected = [math.inf] * 10
    expected[3], expected[5] = 2, 3
    assert watching.first_exact.tolist() == expected


def test_the_observer_keeps_what_the_first_victims_looked_like(searched: Leaks) -> None:
    watching, truth = observer_of(searched), searched.captured.inputs
    watching(1, torch.arange(10), truth)
    watching(2, torch.tensor([1, 9]), 1 - truth[[1, 9]])
    watching(4, torch.tensor([9]), truth[[9]])
    assert set(watching.snapshots) == {1, 2}
    assert torch.equal(watching.snapshots[1], truth[:8])
    moved = truth[:8].clone()
    moved[1] = 1 - truth[1]
    assert torch.equal(watching.snapshots[2], moved)


def test_a_batch_is_exact_in_any_order_once_all_of_it_is(pairs: Leaks) -> None:
    watching, truth = observer_of(pairs), pairs.captured.inputs
    half = truth.clone()
    half[:, 0] = 1 - half[:, 0]
    watching(1, torch.arange(10), half)
    assert not watching.first_exact.isfinite().any()
    watching(2, torch.arange(10), truth.flip(1))
    assert (watching.first_exact == 2).all()


# Files and pictures ---------------------------------------------------------------------------------------------------


def arrays(directory: Path) -> dict[str, Any]:
    with np.load(directory / "reconstructions.npz", allow_pickle=False) as stored:
        return dict(stored)


def test_saved_arrays_load_without_pickle_and_are_what_was_found(pairs: Leaks, tmp_path: Path) -> None:
    pairs.save(tmp_path / "new" / "place")
    assert {path.name for path in (tmp_path / "new" / "place").iterdir()} == {
        "summary.json", "reconstructions.npz", "grid.png"
    }  # fmt: skip
    stored = arrays(tmp_path / "new" / "place")
    assert set(stored) == {
        "original", "original_label", "seed", "reconstruction", "reconstruction_at_end", "label", "iterations", "mse",
        "order", "exact", "recognisable", "value_range", "snapshot_at", "snapshot",
    }  # fmt: skip
    assert stored["snapshot_at"].tolist() == sorted(pairs.snapshots)
    assert np.array_equal(stored["snapshot"][0], pairs.snapshots[min(pairs.snapshots)].numpy())
    assert stored["value_range"].tolist() == [0, 1]
    assert stored["original"].shape == stored["reconstruction"].shape == stored["seed"].shape == (10, 2, 1, 6, 6)
    assert stored["label"].shape == stored["order"].shape == stored["mse"].shape == (10, 2)
    assert np.array_equal(stored["reconstruction"], pairs.found.examples.numpy())
    matched = np.take_along_axis(stored["reconstruction"], stored["order"][:, :, None, None, None], axis=1)
    distances = ((np.clip(matched, 0, 1) - stored["original"]) ** 2).mean(axis=(2, 3, 4))
    np.testing.assert_allclose(stored["mse"], distances, rtol=1e-4, atol=1e-12)
    summary = json.loads((tmp_path / "new" / "place" / "summary.json").read_text())
    assert summary == pairs.summary()


def test_of_a_table_there_is_no_picture(tmp_path: Path) -> None:
    tables = fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=40, scheme="iid")
    found = fedcdp.attack(Plan(method="nonprivate"), model=nn.Linear(30, 2), federation=tables, victims=2)
    assert isinstance(found, Leaks)
    found.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "reconstructions.npz", "rows.csv"}
    assert found.picture() is None


def test_the_picture_shows_originals_seeds_the_way_and_the_end(searched: Leaks, tmp_path: Path) -> None:
    searched.save(tmp_path)
    with Image.open(tmp_path / "grid.png") as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        width, height = picture.size
    shown = 2 + len(searched.snapshots) + 1
    assert set(searched.snapshots) == {1, 2, 3, 5, 7}
    assert shown * 96 < width < shown * 160 + 200
    assert 8 * 96 < height < 8 * 130 + 100


def test_the_picture_of_data_outside_0_to_1_is_not_blown_out() -> None:
    generator = torch.Generator().manual_seed(4)
    inputs, targets = 10 * torch.rand(12, 1, 6, 6, generator=generator) - 5, torch.randint(3, (12,), generator=generator)
    found = attacked(fedcdp.partition((inputs, targets), clients=12, scheme="iid"), leak="type2", victims=4)
    assert found.success_rate == 1
    shades = np.asarray(found.picture().convert("L"))
    inside = shades[(shades > 40) & (shades < 190)]
    assert inside.size > 0.2 * shades.size  # neither black, white nor the page


def test_without_the_truth_none_is_saved_or_shown(searched: Leaks, tmp_path: Path) -> None:
    found = fedcdp.attack(
        searched.captured.seen, model=network(), input_shape=(1, 6, 6), attack=RECIPES["cpl"].but(iterations=3)
    )
    assert isinstance(found, Leaks)
    found.save(tmp_path)
    stored = arrays(tmp_path)
    assert set(stored) == {
        "seed", "reconstruction", "reconstruction_at_end", "label", "iterations", "value_range", "snapshot_at", "snapshot"
    }  # fmt: skip
    assert json.loads((tmp_path / "summary.json").read_text())["success_rate"] is None
    known, unknown = searched.picture(), found.picture()
    assert unknown.size[0] < known.size[0] - 96


def test_a_picture_of_a_batch_shows_each_original_beside_its_own_reconstruction(pairs: Leaks) -> None:
    """Whatever order the attack found them in."""
    assert pairs.scores is not None
    swapped = type(pairs.found)(**vars(pairs.found) | {"examples": pairs.found.examples.flip(1), "last": pairs.found.last})
    order = 1 - pairs.scores.order
    other = type(pairs)(**vars(pairs) | {
        "found": swapped, "scores": type(pairs.scores)(**vars(pairs.scores) | {"order": order}), "snapshots": {},
    })  # fmt: skip
    plain = type(pairs)(**vars(pairs) | {"snapshots": {}})
    assert other.picture().tobytes() == plain.picture().tobytes()


def test_tensors_that_are_kept_are_not_shown_to_whoever_prints_them(pairs: Leaks) -> None:
    assert "snapshots" not in repr(pairs)
    assert isinstance(pairs.found.examples, Tensor)
