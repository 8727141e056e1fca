"""The recommended recipe: when it applies, what it consists of, and what overrides it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedcdp.config.default_recipe import (
    FIXED_FEATURES,
    describe_recipe,
    for_sizes,
    learning_rate,
    on_fixed_features,
    plan_settings,
    recipe_applies,
    recipe_settings,
)
from fedcdp.config.experiment import Experiment, assemble, read_assignment, read_toml
from fedcdp.config.plan import Plan
from fedcdp.config.presets import RECOMMENDED, Settings, preset
from fedcdp.errors import PlanError
from fedcdp.models.image_features import IMAGE_FEATURES
from fedcdp.models.networks import build
from fedcdp.training.planning import trains_fixed_features

OWN = {
    "data": {"clients": 5, "partition": "iid", "records": 9, "dataset": "cancer", "split_seed": 3},
    "model": {"network": "mlp", "activation": "tanh"},
    "run": {"device": "cpu", "adversary": "model", "unit": "client", "max_epsilon": 3.0},
    "plan": {
        "method": "fed-cdp",
        "rounds": 7,
        "per_round": 3,
        "clip": "linear(2, 1)",
        "clip_mode": "layer",
        "record_sampling": "poisson",
        "client_sampling": "poisson",
        "learning_rate": 2.0,
        "ema": 0.0,
        "delta": 1e-6,
        "seed": 4,
        "secure_noise": True,
    },
}


def used(*layers: Settings) -> Experiment:
    assert recipe_applies(layers)
    return assemble(recipe_settings(layers), *layers)


def test_it_applies_where_nothing_is_given() -> None:
    assert recipe_applies([])
    assert recipe_applies([{}])
    assert recipe_applies([{"data": {"file": "records.csv"}}])


@pytest.mark.parametrize(("section", "name"), [(section, name) for section, given in OWN.items() for name in given])
def test_settings_that_choose_no_plan_leave_it_on(section: str, name: str) -> None:
    given = {section: {name: OWN[section][name]}}
    assert recipe_applies([given])
    assert vars(getattr(used(given), section))[name] == vars(getattr(assemble(given), section))[name]


@pytest.mark.parametrize(
    "plan",
    [
        {"noise": "example"},
        {"noise_multiplier": 6.0},
        {"local_steps": 1},
        {"batch_size": 5},
        {"slots": 15},
        *({"method": method} for method in ("nonprivate", "fed-sdp", "fed-cdp-decay", "dssgd")),
    ],
    ids=str,
)
def test_every_setting_that_chooses_a_plan_switches_it_off(plan: dict[str, Any]) -> None:
    assert not recipe_applies([{"plan": plan}])
    assert not recipe_applies([{"plan": plan}, {"data": {"clients": 3}}])
    [(name, value)] = plan.items()
    assert not recipe_applies([read_assignment(f"{name}={value}"), {}])


@pytest.mark.parametrize("name", ["mnist", "demo", "cancer-eps8"])
def test_a_preset_switches_it_off(name: str) -> None:
    assert not recipe_applies([preset(name), {}])


def test_a_configuration_file_switches_it_off_even_without_a_plan(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[data]\ndataset = "mnist"\n')
    assert not recipe_applies([read_toml(tmp_path / "own.toml"), {}])


def test_it_is_the_mechanism_of_the_recommended_presets() -> None:
    plan = used().plan
    for name in (name for name in RECOMMENDED if "-sum-" not in name):
        recommended = assemble(preset(name)).plan
        for field in ("method", "local_steps", "record_sampling", "noise", "client_sampling"):
            assert getattr(plan, field) == getattr(recommended, field)
    assert plan.clip_mode == "flat"
    assert plan.per_round == used().data.clients == 100


SUMMED: Settings = {"plan": {"secure_aggregation": True}}


def test_with_secure_aggregation_it_is_that_of_the_presets_for_sums() -> None:
    plan = used(SUMMED).plan
    for name in (name for name in RECOMMENDED if "-sum-" in name):
        recommended = assemble(preset(name)).plan
        for field in ("method", "local_steps", "record_sampling", "noise", "client_sampling", "secure_aggregation",
                      "colluders", "server_optimizer", "server_momentum", "ema"):  # fmt: skip
            assert getattr(plan, field) == getattr(recommended, field)
    assert (plan.rounds, plan.clip_mode, plan.per_round) == (100, "flat", 100)


def test_settings_for_sums_give_way_to_what_is_given() -> None:
    plan = used(SUMMED, {"plan": {"rounds": 7, "colluders": 3, "server_optimizer": "sgd"}}).plan
    assert (plan.rounds, plan.colluders, plan.server_optimizer, plan.ema) == (7, 3, "sgd", 0.5)
    assert used(SUMMED, {"data": {"clients": 2}}).plan.colluders == 0
    assert used(SUMMED, {"plan": {"per_round": 2}}).plan.colluders == 0
    assert used({"plan": {"secure_aggregation": False}}).plan == used().plan


@pytest.mark.parametrize("dataset", ["mnist5k", "mnist", "cifar10", "lfw", "adult", "cancer"])
def test_a_dataset_is_dealt_out_disjointly(dataset: str) -> None:
    from fedcdp.training.prepared import population_of

    experiment = used({"data": {"dataset": dataset}})
    assert population_of(experiment).copies == 1
    assert experiment.plan.per_round == experiment.data.clients
    if dataset in ("adult", "cancer"):
        assert experiment.data.scaling == "public"


def test_fewer_clients_take_part_in_every_round_and_hold_more() -> None:
    experiment = used({"data": {"clients": 8}})
    assert (experiment.plan.per_round, experiment.data.records) == (8, None)
    assert used({"data": {"clients": 8}, "plan": {"per_round": 2}}).plan.per_round == 2


@pytest.mark.parametrize(
    "wrong", [{"dataset": [1]}, {"dataset": 3}, {"clients": "many"}, {"dataset": "mnist", "file": "x.csv"}]
)
def test_wrong_settings_are_refused_by_the_experiment_as_ever(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as without:
        assemble({"data": wrong})
    with pytest.raises(PlanError) as with_recipe:
        used({"data": wrong})
    assert str(with_recipe.value) == str(without.value)


def test_an_activation_is_for_the_papers_network() -> None:
    assert used({"model": {"activation": "tanh"}}).model.network == "auto"
    assert used().model.network == "best-features"


# The learning rate ----------------------------------------------------------------------------------------------------


def calibrated(*, sums: bool = False, **changes: Any) -> Plan:
    return Plan(**(plan_settings(10, sums=sums) | {"batch_size": 50, "noise_multiplier": 1.0} | changes))


def test_the_noise_of_all_rounds_moves_a_weight_by_two() -> None:
    plan = calibrated()
    rate = learning_rate(plan, [50] * 10, on_fixed_features=True)
    each_round = rate * plan.noise_multiplier * 0.1 * math.sqrt(50) / 50 / math.sqrt(10)
    assert each_round * math.sqrt(plan.rounds) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("rounds", [5, 100])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_with_momentum_it_does_so_as_well(rounds: int, kept: float) -> None:
    plan = calibrated(sums=True, rounds=rounds, noise_multiplier=200.0, server_momentum=kept)
    rate = learning_rate(plan, [50] * 10, on_fixed_features=True)
    on_mean = rate * plan.noise_multiplier * 0.1 * math.sqrt(10 / 9) / 500  # nine of the ten shares are the plan's noise
    squares = 0.0
    for first in range(rounds):  # how far the noise of one round moves the last model
        squares += (on_mean * sum(kept**power for power in range(rounds - first))) ** 2
    assert math.sqrt(squares) == pytest.approx(2.0, rel=0.01)


def test_with_momentum_the_step_is_bounded_where_it_ends_up() -> None:
    quiet = calibrated(sums=True, noise_multiplier=1e-3)
    assert learning_rate(quiet, [50] * 10, True) == 80  # times the clip bound 0.1, over 1 − 0.9: as far as without it
    assert learning_rate(quiet.but(rounds=10), [50] * 10, True) == 80


def test_for_sums_all_records_weigh_the_same_already() -> None:
    plan = for_sizes(calibrated(sums=True), [20, 80])
    assert (plan.batch_size, plan.weighting, plan.noise_slots) == (80, "equal", "all")
    plan = plan.but(noise_multiplier=20.0)
    assert learning_rate(plan, [20, 80], True) == learning_rate(plan, [50, 50], True)
    assert learning_rate(plan.but(mean_records=25.0), [20, 80], True) == learning_rate(plan, [25, 25], True)


def test_other_networks_move_a_tenth_as_far() -> None:
    sizes = [50] * 10
    assert learning_rate(calibrated(), sizes, False) == pytest.approx(
        learning_rate(calibrated(), sizes, True) / 10, rel=0.01
    )


def test_without_much_noise_a_step_is_bounded_and_shorter_in_fewer_rounds() -> None:
    rates = [learning_rate(calibrated(noise_multiplier=1e-3, rounds=rounds), [50] * 10, True) for rounds in (10, 40, 80)]
    assert rates == [200, 800, 800]
    assert learning_rate(calibrated(noise_multiplier=1e-3, clip=1.0), [50] * 10, True) == 80


def test_small_clients_count_with_the_noise_that_they_bring() -> None:
    equal = learning_rate(calibrated(), [50] * 10, True)
    assert learning_rate(calibrated(), [50] * 9 + [5], True) < equal / 2
    assert learning_rate(calibrated(), [5000] * 10, True) == equal  # more than a step takes do not count


@pytest.mark.parametrize("network", [*FIXED_FEATURES, "+".join(IMAGE_FEATURES)])
@pytest.mark.parametrize("shape", [(1, 28, 28), (30,)])
def test_the_names_and_the_networks_agree_on_what_has_fixed_features(network: str, shape: tuple[int, ...]) -> None:
    assert on_fixed_features(network)
    if len(shape) == 3 or set(network.split("+")).isdisjoint(IMAGE_FEATURES):
        assert trains_fixed_features(build(network, shape, 3))


@pytest.mark.parametrize("network", ["cnn", "small", "mlp"])
def test_other_networks_have_none(network: str) -> None:
    assert not on_fixed_features(network)
    assert not trains_fixed_features(build(network, (30,) if network == "mlp" else (1, 28, 28), 3))


# The line ---------------------------------------------------------------------------------------------------------------


def test_the_line_says_what_is_used() -> None:
    said = describe_recipe(calibrated(learning_rate=40), [50], 8.0, "server", "record")
    assert said == (
        "No plan given: using the recommended recipe for ε = 8 against the server (1 local step on all 50 records, "
        "flat clip 0.1, noise multiplier 1, learning rate 40, 40 rounds)"
    )


@pytest.mark.parametrize(("colluders", "said"), [(0, "no colluders"), (1, "at most 1 colluder"), (2, "at most 2 colluders")])
def test_the_line_says_whose_noise_counts(colluders: int, said: str) -> None:
    plan = calibrated(sums=True, colluders=colluders, learning_rate=40)
    assert describe_recipe(plan, [50], 8.0, "server", "record").endswith(
        f"noise multiplier 1 on the sum of all clients, {said}, learning rate 40, server momentum 0.9, 100 rounds)"
    )


def test_the_line_names_another_adversary_and_the_largest_client() -> None:
    said = describe_recipe(calibrated(), [3, 50], 0.5, "model", "client")
    assert "ε = 0.5 against model (client) (1 local step on all 3 to 50 records of a client," in said
