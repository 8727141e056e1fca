"""Presets are the paper's settings: Table "Benchmark datasets and parameters", K = 1000, K_t = 100, σ = 6, C = 4."""

from __future__ import annotations

from typing import Any

import pytest

from fedcdp.config.experiment import assemble
from fedcdp.config.presets import BENCHMARKS, learning_rate, population, preset
from fedcdp.config.schedules import linear
from fedcdp.data import DATASETS
from fedcdp.errors import PlanError

# dataset: scheme, N_i (None: the full copy), L, B, T
PAPER = {
    "mnist": ("shards", 500, 100, 5, 100),
    "cifar10": ("shards", 400, 100, 4, 100),
    "lfw": ("shards", 300, 100, 3, 60),
    "adult": ("iid", 300, 100, 3, 10),
    "cancer": ("full", None, 100, 4, 3),
}


@pytest.mark.parametrize("name", PAPER)
def test_a_preset_is_the_papers_setting(name: str) -> None:
    experiment = assemble(preset(name))
    data, plan = experiment.data, experiment.plan
    assert (data.dataset, data.clients, plan.per_round) == (name, 1000, 100)
    assert (data.partition, data.records, plan.local_steps, plan.batch_size, plan.rounds) == PAPER[name]
    assert (plan.method, plan.record_sampling, plan.noise, plan.noise_multiplier) == (
        "fed-cdp",
        "partition",
        "example",
        6,
    )
    assert [plan.clip_at(round_) for round_ in (0, plan.rounds - 1)] == [4, 4]
    assert plan.slots == plan.batch_size


@pytest.mark.parametrize("name", PAPER)
def test_under_decay_the_bound_goes_from_six_to_two_over_the_run(name: str) -> None:
    plan = assemble(preset(name), {"plan": {"method": "fed-cdp-decay"}}).plan
    assert plan.clip == linear(6, 2)
    assert [plan.clip_at(round_) for round_ in (0, plan.rounds - 1)] == [6, 2]


@pytest.mark.parametrize("name", ["nosuch", "mnist5k", "", "MNIST"])
def test_a_preset_that_the_paper_does_not_have_is_refused_with_those_it_has(name: str) -> None:
    with pytest.raises(PlanError, match=r"is not one of mnist, cifar10, lfw, adult, cancer, demo, mnist-eps1, "):
        preset(name)


def test_every_dataset_has_a_population() -> None:
    assert BENCHMARKS.keys() == DATASETS.keys()


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_alone_is_trained_under_sampling_that_can_be_accounted(name: str) -> None:
    plan = assemble({"data": {"dataset": name}}).plan
    assert plan.record_sampling == "poisson"
    assert plan.slots == 3 * plan.batch_size
    assert plan.per_round <= assemble({"data": {"dataset": name}}).data.clients


def test_presets_are_not_shared_between_those_who_ask() -> None:
    asked: Any = preset("mnist")
    asked["plan"]["rounds"] = 1
    asked["data"]["clients"] = 1
    assert preset("mnist")["plan"]["rounds"] == 100
    assert population("mnist")["data"]["clients"] == 1000


def test_noise_on_examples_asks_for_a_smaller_learning_rate() -> None:
    assert learning_rate("mnist", {}) == learning_rate("mnist", {"method": "fed-cdp-decay"}) == 0.001
    assert learning_rate("mnist", {"method": "fed-sdp"}) == learning_rate("mnist", {"noise": "cohort"}) == 0.1
    assert learning_rate(None, {}) is None
    assert learning_rate("nosuch", {}) is None


def test_the_demo_is_a_preset_that_cannot_be_changed_from_outside() -> None:
    preset("demo")["plan"]["rounds"] = 1
    plan = assemble(preset("demo")).plan
    assert (plan.rounds, plan.method, plan.noise) == (120, "fed-cdp", "example")
