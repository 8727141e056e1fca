"""The default attack: as strong as every single one, whatever the network and whatever the method leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedcdp
from fedcdp.attacks import RECIPES, Leaks
from fedcdp.attacks.portfolio import Attempts, recipe_of
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import FedcdpError
from fedcdp.models.networks import build
from tests.support.pairs import sample_first

SHAPE = (1, 14, 14)
NETWORKS = ("mlp", "linear", "oriented-gradients", "cnn", "cpl", "small")  # all but the first two are slow
DEFENCES: dict[str, dict[str, Any]] = {
    "no privacy": {"method": "nonprivate"},
    "clipping only": {"method": "fed-cdp", "noise_multiplier": 0.0, "clip": 0.1},
    "batch noise": {"method": "fed-cdp", "noise": "batch", "clip": 0.1},
}
SINGLE = ("cpl", "clip-aware", "inverting-gradients", "analytic")


def plan_of(**fields: Any) -> Plan:
    defaults = {"rounds": 2, "per_round": 4, "local_steps": 1, "batch_size": 1, "record_sampling": "partition"}
    return Plan(**defaults | {"learning_rate": 0.1} | fields)


@pytest.fixture(scope="module")
def images(digits: Dataset) -> Federation:
    """Small digits, one at a client; others are public."""
    small = Dataset(F.avg_pool2d(digits.inputs, 2), digits.targets, digits.classes)
    mine, public = torch.arange(0, 1000, 100), torch.arange(1, 1000, 2)
    return fedcdp.partition(small.take(mine), clients=10, scheme="iid", validation=small.take(public))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """All recipes with few iterations: those that work need no more here."""
    for name, recipe in RECIPES.items():
        monkeypatch.setitem(RECIPES, name, recipe.but(iterations=6, restarts=1))


def strength(found: Leaks) -> tuple[float, ...]:
    row = found.summary()
    return row["success_rate"], row["recognisable_rate"] or 0, row["identified_rate"]


@pytest.mark.slow
@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize("network", sample_first(NETWORKS, quick=2))
def test_the_default_is_at_least_as_strong_as_every_single_attack(images: Federation, network: str, defence: str) -> None:
    how: dict[str, Any] = {"model": build(network, SHAPE, 10), "federation": images, "victims": 2}
    plan = plan_of(**DEFENCES[defence])
    best = fedcdp.attack(plan, **how)
    assert isinstance(best, Leaks)
    assert best.attack in [each["attack"] for each in best.tried]
    for name in SINGLE:
        try:
            single = fedcdp.attack(plan, **how, attack=name)
        except FedcdpError:
            continue
        assert isinstance(single, Leaks)
        assert strength(best) >= strength(single), name


@pytest.mark.slow
def test_clipping_alone_does_not_look_like_a_defence(images: Federation) -> None:
    """The paper's attack gets nothing where one that clips its dummy gets everything."""
    how: dict[str, Any] = {"model": build("cpl", SHAPE, 10), "federation": images, "victims": 3}
    plan = plan_of(**DEFENCES["clipping only"])
    assert strength(fedcdp.attack(plan, **how, attack="cpl"))[0] == 0  # type: ignore[arg-type]
    best = fedcdp.attack(plan, **how)
    assert isinstance(best, Leaks)
    assert (best.attack, best.success_rate) == ("clip-aware", 1)
    assert [each["attack"] for each in best.tried] == ["clip-aware"]


@pytest.mark.slow
def test_under_noise_every_attack_that_was_tried_is_told_with_its_rate(images: Federation) -> None:
    plan = plan_of(method="fed-cdp", clip=4.0, noise_multiplier=6.0)
    row = fedcdp.attack(plan, model=build("small", SHAPE, 10), federation=images, victims=2).summary()
    assert [each["attack"] for each in row["tried"]] == [
        "clip-aware", "class-prior", "accumulated", "averaging", "matched-filter",
    ]  # fmt: skip
    assert all(0 <= each["success_rate"] <= 1 for each in row["tried"])
    assert row["attack"] in ("clip-aware", "class-prior", "accumulated", "averaging")


@pytest.mark.parametrize(("name", "patience"), [("batch", 20), ("class-prior", 20), ("inverting-gradients", None)])
def test_searches_end_once_they_stop_improving(name: str, patience: int | None) -> None:
    recipe = recipe_of(name, noisy=True)
    assert recipe is not None
    assert recipe.patience == patience
    assert RECIPES[name].patience is None
    assert recipe_of("matched-filter", noisy=True) is None


@pytest.mark.parametrize(
    ("name", "noisy", "sharpened"), [("batch", False, True), ("batch", True, False), ("cpl", False, False)]
)
def test_smooth_images_are_sharpened_where_there_is_no_noise(name: str, noisy: bool, sharpened: bool) -> None:
    recipe = recipe_of(name, noisy)
    assert recipe is not None
    assert (recipe.sharpening is not None) == sharpened


def test_a_search_leaves_out_what_another_recovered(images: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Attempts] = []

    def noted(attempts: Attempts, *_: object) -> Any:
        seen.append(attempts)
        return attempts.run("cpl", RECIPES["cpl"].but(iterations=1))

    monkeypatch.setattr("fedcdp.attacks.api.strongest", noted)
    first = fedcdp.attack(plan_of(method="nonprivate"), model=build("small", SHAPE, 10), federation=images, victims=4)
    assert isinstance(first, Leaks)
    assert first.scores is not None
    recovered = torch.tensor([True, False, True, False])
    first = replace(first, scores=replace(first.scores, exact=recovered[:, None]))
    recipe = RECIPES["clip-aware"].but(iterations=1)
    whole, rest = seen[0].run("clip-aware", recipe), seen[0].run("clip-aware", recipe, earlier=first)
    assert isinstance(whole, Leaks)
    assert isinstance(rest, Leaks)
    assert rest.summary()["spared"] == 2
    assert "spared" not in whole.summary()
    assert torch.equal(rest.found.examples[recovered], first.found.examples[recovered])
    assert torch.equal(rest.first_exact[recovered], first.first_exact[recovered])
    assert torch.equal(rest.found.seeds[~recovered], whole.found.seeds[~recovered])
    torch.testing.assert_close(rest.found.examples[~recovered], whole.found.examples[~recovered], rtol=0, atol=1e-2)
    assert rest.found.evaluations < whole.found.evaluations


@pytest.mark.slow
def test_all_rounds_are_left_out_where_they_take_too_long(images: Federation) -> None:
    plan = plan_of(method="fed-cdp", noise_multiplier=6.0, rounds=200)
    row = fedcdp.attack(plan, model=build("small", SHAPE, 10), federation=images, victims=2).summary()
    (left,) = [each for each in row["tried"] if each["attack"] == "accumulated"]
    assert "more than best spends" in left["refused"]
    assert "ask for accumulated by name" in left["refused"]


@pytest.mark.slow
def test_an_attack_that_does_not_apply_is_told_with_its_reason(images: Federation) -> None:
    """Sixty principal components need more public examples than these."""
    few = fedcdp.partition(images.train, clients=10, scheme="iid", validation=images.validation.take(torch.arange(30)))  # type: ignore[union-attr]
    plan = plan_of(method="fed-cdp", clip=4.0, noise_multiplier=6.0)
    row = fedcdp.attack(plan, model=build("small", SHAPE, 10), federation=few, victims=2).summary()
    (refused,) = [each for each in row["tried"] if each.get("refused")]
    assert refused["attack"] == "averaging"
    assert "public: 30 examples are too few" in refused["refused"]


def test_where_nothing_applies_the_first_reason_is_given(images: Federation) -> None:
    no_labels = nn.Sequential(nn.Conv2d(1, 10, 14), nn.Flatten())
    with pytest.raises(FedcdpError, match="labels: the network has no dense last layer"):
        fedcdp.attack(plan_of(method="nonprivate"), model=no_labels, federation=images, victims=1)


def test_raw_gradients_without_the_truth_give_what_explains_them_best(images: Federation) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 10))
    inputs, targets = images.train.inputs[:1], images.train.targets[:1]
    gradients = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
    found = fedcdp.attack(gradients, model=model, input_shape=SHAPE)
    assert isinstance(found, Leaks)
    assert found.summary()["tried"]
    assert float((found.found.examples[0] - inputs).abs().max()) < 1e-4
