"""Training without a plan: the recommended recipe, calibrated by the ordinary accountant."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.accounting.budget import privacy_of_plan
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import state
from fedcdp.config.experiment import Experiment
from fedcdp.config.plan import Plan
from fedcdp.config.presets import preset
from fedcdp.data.dataset import Dataset
from fedcdp.errors import PlanError
from fedcdp.training import planning
from fedcdp.training.planning import plan_experiment, recommended_plan
from fedcdp.training.prepared import population_of


def clouds(count: int, seed: int) -> Dataset:
    labels = torch.arange(count) % 3
    noise = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return Dataset(noise + 2 * torch.nn.functional.one_hot(labels, 4), labels, 3)


@pytest.fixture
def federation() -> fedcdp.Federation:
    return fedcdp.partition(clouds(600, 1), clients=10, scheme="iid", validation=clouds(90, 2))


@pytest.fixture
def unequal() -> fedcdp.Federation:
    """Clients with 3 to 200 records."""
    ends = np.cumsum([0, 3, 40, 80, 150, 127, 200])
    lists = [np.arange(first, last) for first, last in pairwise(ends.tolist())]
    return fedcdp.partition(clouds(600, 1), indices=lists, validation=clouds(90, 2))


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


# In Python --------------------------------------------------------------------------------------------------------------


def test_a_model_learns_without_a_plan_at_an_honest_epsilon(
    model: nn.Module, federation: fedcdp.Federation, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fedcdp"):
        run = fedcdp.simulate(model, federation)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert said[0].startswith(
        "No plan given: using the recommended recipe for ε = 8 against the server (1 local step on all 60"
    )
    assert run.accuracy is not None
    assert run.accuracy > 0.7
    assert run.warning is None
    assert 7.9 < run.privacy().row("server", "record").epsilon <= 8
    assert str(run.model) == str(model)


def test_the_target_and_the_adversary_are_those_given(model: nn.Module, federation: fedcdp.Federation) -> None:
    run = fedcdp.simulate(model, federation, target_epsilon=2, adversary="example", rounds=3, per_round=4)
    assert (run.rounds, run.plan.per_round) == (3, 4)
    assert run.privacy().row("example", "record").epsilon_worst > 1.9
    assert privacy_of_plan(run.plan, federation, model=model).row("example", "record").epsilon <= 2


@pytest.mark.parametrize(
    ("adversary", "unit", "scaling"),
    [("server", "record", 40.0), ("example", "record", 40.0), ("server", "record", None), ("server", "client", None)],
)
def test_the_noise_of_a_plan_is_calibrated_to_the_target(
    model: nn.Module, federation: fedcdp.Federation, adversary: str, unit: str, scaling: float | None
) -> None:
    plan = Plan(per_round=5, rounds=2, local_steps=1, noise_multiplier=0.3, scaling_noise=scaling)
    run = fedcdp.simulate(model, federation, plan, target_epsilon=3.0, adversary=adversary, unit=unit)
    assert run.plan.but(noise_multiplier=0.3) == plan
    assert 2.9 < privacy_of_plan(run.plan, federation, model=model).row(adversary, unit).epsilon <= 3.0


def test_a_row_that_the_plan_does_not_have_is_refused(model: nn.Module, federation: fedcdp.Federation) -> None:
    with pytest.raises(PlanError, match="adversary: fed-cdp has no row nobody/record/zero-out; it has server/record"):
        fedcdp.simulate(model, federation, Plan(per_round=5), adversary="nobody")


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_a_target_must_be_a_positive_number(model: nn.Module, federation: fedcdp.Federation, epsilon: float) -> None:
    with pytest.raises(PlanError, match="epsilon"):
        fedcdp.simulate(model, federation, target_epsilon=epsilon)


def test_more_clients_than_there_are_is_refused(model: nn.Module, federation: fedcdp.Federation) -> None:
    with pytest.raises(PlanError, match="per_round"):
        fedcdp.simulate(model, federation, per_round=11)


def test_a_step_takes_all_records_of_the_largest_client(model: nn.Module, unequal: fedcdp.Federation) -> None:
    plan, said = recommended_plan(model, unequal)
    assert (plan.batch_size, plan.slots, plan.local_steps) == (200, 200, 1)
    assert "1 local step on all 3 to 200 records of a client, clients weighted by records" in said
    assert (plan.weighting, plan.noise_slots) == ("records", "held")
    rows = privacy_of_plan(plan, unequal, model=model)
    assert 7.9 < rows.row("server", "record").epsilon <= 8
    run = fedcdp.simulate(model, unequal)
    assert run.plan == plan
    assert run.privacy().row("server", "record").epsilon == rows.row("server", "record").epsilon


def test_every_size_of_a_client_has_the_epsilon_that_is_stated(model: nn.Module, unequal: fedcdp.Federation) -> None:
    plan, _ = recommended_plan(model, unequal)
    stated = privacy_of_plan(plan, unequal, model=model).row("server", "record").epsilon
    for records in (3, 40, 200):
        alone = state(plan, Population(unequal.clients, records, 1, 1)).row("server", "record").epsilon
        assert alone == pytest.approx(stated)


def test_a_record_kept_by_several_clients_has_a_row_of_its_own(model: nn.Module) -> None:
    shared = fedcdp.partition(clouds(300, 1), clients=20, scheme="iid", records=60, validation=clouds(90, 2))
    plan, _ = recommended_plan(model, shared)
    privacy = privacy_of_plan(plan, shared, model=model)
    assert privacy.row("server", "record").epsilon <= 8 < privacy.row("server", "unique").epsilon


def test_a_run_without_a_plan_is_resumed_without_one(
    model: nn.Module, federation: fedcdp.Federation, tmp_path: Path
) -> None:
    whole = fedcdp.simulate(model, federation, out=tmp_path / "whole", rounds=4)
    fedcdp.simulate(model, federation, out=tmp_path / "run", rounds=4, most_releases=2)
    resumed = fedcdp.simulate(model, federation, out=tmp_path / "run", rounds=4, resume=True)
    assert resumed.accuracy == whole.accuracy


def test_where_nothing_can_be_accounted_a_plan_is_asked_for(
    model: nn.Module, federation: fedcdp.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "accounting_is_installed", lambda: False)
    with pytest.raises(PlanError, match=r"needs dp-accounting, which is not installed; give a plan"):
        fedcdp.simulate(model, federation)
    fedcdp.simulate(model, federation, Plan(rounds=1, per_round=2, local_steps=1))


def test_a_model_that_learned_nothing_is_warned_of(federation: fedcdp.Federation, caplog: pytest.LogCaptureFixture) -> None:
    always_the_same = nn.Linear(4, 3)
    nn.init.zeros_(always_the_same.weight)
    plan = Plan(method="nonprivate", rounds=1, per_round=2, local_steps=1, learning_rate=1e-20)
    run = fedcdp.simulate(always_the_same, federation, plan)
    assert run.warning is not None
    assert "no better than always predicting the most frequent class (0.333)" in run.warning
    assert run.warning in caplog.messages


# Settings ---------------------------------------------------------------------------------------------------------------


def nobody_asks(experiment: Experiment) -> Population:
    raise AssertionError(f"nothing is calibrated for {experiment}")


def test_what_chooses_a_plan_is_taken_as_it_is() -> None:
    for given in ([preset("cancer")], [{"plan": {"noise_multiplier": 6.0}}], [{"plan": {"method": "fed-sdp"}}]):
        planned = plan_experiment(given, nobody_asks)
        assert (planned.epsilon, planned.recipe) == (None, None)


def test_paper_mode_keeps_the_papers_defaults() -> None:
    planned = plan_experiment([], nobody_asks, mode="paper")
    assert (planned.experiment.plan.noise_multiplier, planned.recipe) == (6.0, None)
    with pytest.raises(PlanError, match="paper mode is no guarantee"):
        plan_experiment([], nobody_asks, mode="paper", target_epsilon=8)


@pytest.mark.parametrize(("adversary", "unit"), [("server", "record"), ("example", "record"), ("server", "client")])
@pytest.mark.parametrize("mode", ["tight", "rdp"])
def test_the_epsilon_reached_is_the_tables_and_within_the_target(adversary: str, unit: str, mode: Any) -> None:
    given = [{"data": {"dataset": "adult"}, "run": {"adversary": adversary, "unit": unit}}]
    planned = plan_experiment(given, population_of, mode=mode, target_epsilon=5)
    experiment = planned.experiment
    stated = state(experiment.plan, population_of(experiment), mode=mode).row(adversary, unit).epsilon
    assert planned.epsilon == stated
    assert 4.9 < stated <= 5


def test_the_default_target_is_eight_or_what_is_allowed_if_less() -> None:
    for most, target in ((None, 8), (3.0, 3), (20.0, 8)):
        planned = plan_experiment([{"run": {} if most is None else {"max_epsilon": most}}], population_of)
        assert planned.epsilon is not None
        assert 0.98 * target < planned.epsilon <= target
        assert f"ε = {target} against the server" in (planned.recipe or "")


def test_given_settings_override_the_recipe_and_are_accounted() -> None:
    own = {"rounds": 7, "per_round": 50, "clip": 0.5, "learning_rate": 3.0, "client_sampling": "poisson", "delta": 1e-6}
    planned = plan_experiment([{"plan": own}], population_of)
    written = planned.experiment.plan.written()
    assert {name: written[name] for name in own} == own | {"clip": "0.5", "learning_rate": "3"}
    assert state(planned.experiment.plan, population_of(planned.experiment)).row("server", "record").epsilon <= 8


@pytest.mark.slow
def test_a_target_with_a_plan_of_ones_own_calibrates_that() -> None:
    planned = plan_experiment([{"plan": {"local_steps": 10, "batch_size": 5}}], population_of, target_epsilon=2)
    assert (planned.experiment.plan.local_steps, planned.recipe) == (10, None)
    assert planned.epsilon is not None
    assert planned.epsilon <= 2


def test_the_plan_is_the_same_every_time() -> None:
    first, second = (plan_experiment([], population_of).experiment.plan.digest() for _ in range(2))
    assert first == second
