"""Commands without a plan: the recommended recipe, said in one line, at the ε that the accountant states."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sklearn import datasets

from fedcdp.accounting.statement import state
from fedcdp.config.experiment import assemble, read_toml
from fedcdp.training.prepared import population_of

Cli = Callable[..., Any]
RECIPE = "No plan given: using the recommended recipe for ε = "
FEW = ["--dataset", "cancer", "--rounds", 3]


def answer(outcome: Any) -> dict[str, Any]:
    assert outcome.status == 0, outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def epsilon(found: dict[str, Any], adversary: str = "server", unit: str = "record", rows: str = "rows") -> float:
    return next(r["epsilon"] for r in found[rows] if (r["adversary"], r["unit"]) == (adversary, unit))


def written(name: str) -> Path:
    """A table of scikit-learn as a CSV file, its columns as they are."""
    inputs, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    with Path(f"{name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*(f"column {number}" for number in range(inputs.shape[1])), "label"])
        table.writerows([*map(float, record), int(label)] for record, label in zip(inputs, labels, strict=True))
    return Path(f"{name}.csv")


# What is used, and at which ε ---------------------------------------------------------------------------------------------


def test_train_says_in_one_line_what_it_uses(cli: Cli) -> None:
    outcome = cli("train", *FEW, "--out", "run", "--json")
    found = answer(outcome)
    first, *others = outcome.stderr.splitlines()
    assert first.startswith(
        f"{RECIPE}8 against the server (1 local step on all 42 records, flat clip 0.1, noise multiplier "
    )
    assert not [line for line in others if line.startswith(("setting", "note: noise multiplier"))]
    assert 7.9 < epsilon(found, rows="epsilon") <= 8
    plan = assemble(read_toml("run/config.toml")).plan
    assert (plan.local_steps, plan.batch_size, plan.per_round, plan.rounds) == (1, 42, 10, 3)
    assert epsilon(answer(cli("account", "--run", "run", "--json"))) == epsilon(found, rows="epsilon")


def test_a_run_of_the_recipe_is_resumed_evaluated_and_attacked(cli: Cli) -> None:
    assert cli("train", *FEW, "--out", "run", "--quiet").status == 0
    before = Path("run/config.toml").read_bytes()
    assert cli("train", "--resume", "--out", "run", "--quiet").status == 0
    assert Path("run/config.toml").read_bytes() == before
    assert answer(cli("evaluate", "run", "--json"))["examples"] == 143
    assert answer(cli("attack", "--run", "run", "--victims", 2, "--json"))["network"] == "periodic"


@pytest.mark.parametrize("command", [["account"], ["audit", "--trials", 100], ["calibrate", "--target-epsilon", 8]])
def test_commands_agree_on_the_plan(cli: Cli, command: list[object]) -> None:
    assert cli("train", *FEW, "--out", "run").status == 0
    [said] = [line for line in cli("train", *FEW, "--out", "other").stderr.splitlines() if line.startswith(RECIPE)]
    outcome = cli(*command, *FEW)
    assert outcome.status == 0, outcome.stderr
    assert [line for line in outcome.stderr.splitlines() if line.startswith(RECIPE)] == [said]


@pytest.mark.parametrize(("target", "adversary"), [(2, "server"), (8, "example")])
def test_account_shows_the_table_of_the_calibrated_plan(cli: Cli, target: float, adversary: str) -> None:
    outcome = cli("account", "--dataset", "mnist", "--target-epsilon", target, "--adversary", adversary, "--json")
    assert 0.98 * target < epsilon(answer(outcome), adversary) <= target
    assert outcome.stderr.startswith(f"{RECIPE}{target} against ")


def test_account_of_a_file_counts_its_records(cli: Cli, own_npz: Path) -> None:
    outcome = cli("account", "--data", own_npz, "--json")
    assert 7.9 < epsilon(answer(outcome)) <= 8
    assert "all 9 records" in outcome.stderr


def test_a_target_is_for_account_of_a_plan_too_but_not_of_a_run(cli: Cli) -> None:
    outcome = cli("account", "--preset", "cancer", "--target-epsilon", 3, "--json")
    assert epsilon(answer(outcome)) <= 3
    assert RECIPE not in outcome.stderr
    refused = cli("account", "--run", "run", "--target-epsilon", 3)
    assert (refused.status, refused.stderr.count("\n")) == (2, 1)


def test_calibrate_says_how_to_keep_the_recipe(cli: Cli) -> None:
    outcome = cli("calibrate", "--target-epsilon", 2)
    assert "To use the recipe, give --target-epsilon 2 instead of --noise-multiplier" in outcome.stdout
    assert "To use" not in cli("calibrate", "--preset", "mnist-eps1", "--target-epsilon", 2).stdout


@pytest.mark.slow
def test_an_audit_of_the_recipe_stays_below_its_guarantee(cli: Cli) -> None:
    found = answer(cli("audit", "--trials", 2000, "--participations", 40, "--json", "--quiet"))
    assert found["epsilon_lower"] <= found["epsilon_guaranteed"] <= 8
    assert found["epsilon_guaranteed"] > 7.9


def test_a_deployment_without_a_plan_has_the_calibrated_one(cli: Cli, own_npz: Path) -> None:
    outcome = cli("deploy", "init", "site", "--nodes", 3, "--data", own_npz, "--target-epsilon", 4)
    assert outcome.status == 0, outcome.stderr
    assert outcome.stderr.startswith(f"{RECIPE}4 against the server (1 local step on all 32 records")
    experiment = assemble(read_toml("site/experiment.toml"))
    plan = experiment.plan
    assert (plan.per_round, plan.batch_size, plan.local_steps, plan.secure_noise) == (3, 32, 1, True)
    assert 3.9 < state(plan, population_of(experiment)).row("server", "record").epsilon <= 4
    assert cli("deploy", "init", "site", "--nodes", 3).status == 2


def test_a_deployment_from_a_configuration_file_finds_its_data_again(cli: Cli, own_npz: Path) -> None:
    Path("my.toml").write_text(f'[data]\nfile = "{own_npz.name}"\n[plan]\nrounds = 2\n')
    outcome = cli("deploy", "init", "site", "--nodes", 3, "--config", "my.toml")
    assert outcome.status == 0, outcome.stderr
    assert assemble(read_toml("site/experiment.toml")).data.file == str(own_npz.absolute())


# What keeps its defaults, and names them ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--preset", "cancer"],
        ["--noise-multiplier", 6],
        ["--set", "local_steps=100"],
        ["--batch-size", 4],
        ["--noise", "batch"],
        ["--method", "fed-sdp"],
        ["--mode", "paper"],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_whoever_chooses_keeps_todays_defaults(cli: Cli, options: list[object]) -> None:
    outcome = cli("account", "--dataset", "cancer", *options)
    assert outcome.status == 0, outcome.stderr
    assert outcome.stderr.startswith("setting: cancer, 1000 clients")


def test_a_configuration_file_keeps_the_papers_plan(cli: Cli) -> None:
    Path("own.toml").write_text('[data]\ndataset = "cancer"\n')
    assert cli("account", "--config", "own.toml").stderr.startswith("setting: cancer, 1000 clients")


def test_train_by_another_method_names_its_setting(cli: Cli) -> None:
    options = ["--dataset", "cancer", "--method", "nonprivate", "--clients", 4, "--rounds", 1, "--local-steps", 1]
    outcome = cli("train", *options, "--out", "run")
    assert outcome.stderr.startswith("setting: cancer, 4 clients × 426 records, nonprivate, 1 rounds")


# What goes wrong -----------------------------------------------------------------------------------------------------------


def test_a_model_that_learned_nothing_is_noted(cli: Cli) -> None:
    options = [
        "--dataset",
        "cancer",
        "--clients",
        4,
        "--rounds",
        1,
        "--local-steps",
        1,
        "--lr",
        "1e-20",
        "--model",
        "linear",
    ]
    said = " ".join(cli("train", *options, "--noise-multiplier", 1, "--out", "run").stderr.split())
    assert "is no better than always predicting the most frequent class (0.629): the model learned nothing useful" in said
    assert cli("train", *options, "--out", "quiet", "--quiet").stderr == ""


def test_a_recipe_that_learned_is_not_noted(cli: Cli) -> None:
    assert "no better" not in cli("train", "--dataset", "cancer", "--out", "run").stderr


def test_without_dp_accounting_a_plan_is_asked_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcdp.training.planning.accounting_is_installed", lambda: False)
    refused = cli("train", *FEW, "--out", "run")
    assert (refused.status, refused.stderr.count("\n")) == (2, 1)
    assert "needs dp-accounting, which is not installed; give --noise-multiplier or --preset" in refused.stderr
    assert cli("train", *FEW, "--noise-multiplier", 1, "--clients", 3, "--quiet", "--out", "run").status == 0


# What it reaches -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_embedded_digits_are_learned(cli: Cli) -> None:
    found = answer(cli("train", "--out", "run", "--json"))
    assert found["accuracy"] >= 0.93
    assert epsilon(found, rows="epsilon") <= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "largest", "least"), [("breast_cancer", 0.63, 0.87), ("wine", 0.40, 0.85), ("digits", 0.10, 0.85)]
)
def test_a_table_beats_its_largest_class_clearly(cli: Cli, name: str, largest: float, least: float) -> None:
    found = answer(cli("train", "--data", written(name), "--out", "run", "--json"))
    assert found["accuracy"] >= least > largest + 0.2
    assert epsilon(found, rows="epsilon") <= 8
