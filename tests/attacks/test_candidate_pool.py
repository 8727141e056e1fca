"""Public candidates: the posterior over them gives labels and starts, and a search from there beats one from a pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedcdp
from fedcdp.attacks import RECIPES
from fedcdp.attacks.candidate_pool import CandidatePool
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.models.networks import build

WHO = torch.arange(2)


def pool_of(scores: list[list[float]]) -> CandidatePool:
    """Five candidates of two classes, whose pixels are their numbers."""
    inputs = torch.arange(5.0)[:, None].expand(5, 3)
    return CandidatePool(inputs, torch.tensor([0, 0, 0, 1, 1]), torch.tensor(scores, dtype=torch.float64))


def test_a_label_is_as_likely_as_its_candidates_together() -> None:
    one, many = [0.0, -50, -50, -0.5, -50], [0.0, -50, -50, -0.5, -0.5]
    assert pool_of([one, many]).labels(2).tolist() == [[0], [1]]


def test_a_search_begins_at_the_posterior_mean_of_its_class() -> None:
    pool = pool_of([[0.0, 0, 0, 99, 0], [-500.0, 0, -500, 0, 0]])
    start = pool.start(torch.tensor([[0], [0]]), WHO, 1, seed=0, restart=0)
    torch.testing.assert_close(start, torch.tensor([[[1.0] * 3], [[1.0] * 3]]))
    torch.testing.assert_close(pool.start(None, WHO, 1, seed=0, restart=0)[0, 0], torch.tensor([3.0] * 3))


def test_other_searches_begin_at_likely_candidates_of_their_class() -> None:
    pool = pool_of([[0.0, 0, -500, 0, 0]] * 2)
    labels = torch.tensor([[0, 1], [0, 1]])
    starts = torch.stack([pool.start(labels, WHO, 2, seed=0, restart=restart)[..., 0] for restart in range(40)])
    assert set(starts[..., 0].flatten().tolist()) == {0, 1}
    assert set(starts[..., 1].flatten().tolist()) == {3, 4}
    again = pool.take(WHO[1:]).start(labels[1:], WHO[1:], 2, seed=0, restart=7)
    assert torch.equal(again[..., 0], starts[7, 1:])  # a victim's start does not depend on the others


def test_a_class_without_candidates_uses_all() -> None:
    start = pool_of([[0.0] * 5] * 2).start(torch.tensor([[7], [0]]), WHO, 1, seed=0, restart=0)
    torch.testing.assert_close(start[:, 0, 0], torch.tensor([2.0, 1.0]))


def plan_of(**fields: Any) -> Plan:
    defaults = {"method": "fed-cdp", "rounds": 2, "per_round": 4, "local_steps": 1, "batch_size": 1, "clip": 4.0}
    return Plan(**defaults | {"record_sampling": "partition", "learning_rate": 0.1} | fields)


@pytest.fixture(scope="module")
def images(digits: Dataset) -> Federation:
    small = Dataset(F.avg_pool2d(digits.inputs, 2), digits.targets, digits.classes)
    mine, public = torch.arange(0, 1000, 100), torch.arange(1, 1000, 2)
    return fedcdp.partition(small.take(mine), clients=10, scheme="iid", validation=small.take(public))


@pytest.mark.slow
def test_the_prior_of_a_class_beats_that_of_all_images(images: Federation) -> None:
    how: dict[str, Any] = {"model": build("cpl", (1, 14, 14), 10), "federation": images, "victims": 6}
    plan = plan_of(noise_multiplier=0.01)
    rows = {name: fedcdp.attack(plan, **how, attack=name).summary() for name in ("class-prior", "averaging")}
    assert rows["class-prior"]["label_accuracy"] == 1
    assert rows["class-prior"]["distance_median"] < 0.8 * rows["averaging"]["distance_median"]


@pytest.mark.parametrize("leak", ["type2", "type1"])
@pytest.mark.parametrize("task", ["batch", "regression"])
def test_batches_and_values_are_searched_for_as_well(images: Federation, task: str, leak: Any) -> None:
    """Each dummy has its inferred label; without classes all public examples are one group."""
    model: nn.Module = nn.Sequential(nn.Conv2d(1, 2, 5), nn.Sigmoid(), nn.Flatten(), nn.Linear(200, 10))
    federation = fedcdp.partition(images.train, clients=5, scheme="iid", validation=images.validation)
    if task == "regression":
        model = nn.Sequential(model, nn.Sigmoid(), nn.Linear(10, 1))
        train, public = (
            Dataset(each.tensor, each.tensor.mean((1, 2, 3))[:, None], 0, task="regression")
            for each in (images.train, images.validation)
            if each is not None
        )
        federation = fedcdp.partition(train, clients=5, scheme="iid", validation=public)
    row = fedcdp.attack(
        plan_of(noise_multiplier=0.01, batch_size=2), model=model, federation=federation, victims=2, leak=leak,
        attack=RECIPES["class-prior"].but(iterations=3, components=20),
    ).summary()  # fmt: skip
    assert row["examples"] == (4 if leak == "type1" else 2)
    assert row["distance_median"] < row["knowing_nothing"]["black"]["median_mse"]
