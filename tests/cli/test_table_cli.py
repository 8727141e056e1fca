"""Commands on a table with named clients: made-up sites of unequal size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcdp.accounting.ledger import Ledger
from fedcdp.config.experiment import assemble, read_toml
from fedcdp.errors import PlanError
from fedcdp.training.prepared import deal_out, load_splits, prepare_experiment, with_clients_of_file

Cli = Callable[..., Any]

SITES = {"Ulm": 10, "Jena": 60, "Bad Aibling": 30}
TABLE = ("--data", "made_up.csv", "--client-column", "site", "--label-column", "sick", "--task", "binary")
READ = (*TABLE, "--drop-columns", "id", "--columns", "columns.toml", "--missing", "indicator")
PLAN = ("--rounds", "2", "--local-steps", "1", "--batch-size", "5")


@pytest.fixture(autouse=True)
def table(workplace: Path) -> Path:
    """Made-up patients: semicolons, quoted text, a category and missing values."""
    rng = np.random.default_rng(0)
    lines = ['id;site;"age; years";sex;sick']
    for site, size in SITES.items():
        for _ in range(size):
            age = rng.integers(20, 90)
            cells = [str(len(lines)), f'"{site}"', "NA" if rng.random() < 0.05 else str(age), rng.choice(["f", "m", "d"])]
            lines.append(";".join([*cells, "yes" if age > 55 else "no"]))
    (workplace / "columns.toml").write_text('["age; years"]\nrange = [0, 110]\n[sex]\ncategories = ["f", "m"]\n')
    (workplace / "made_up.csv").write_text("\n".join(lines))
    return workplace / "made_up.csv"


def test_a_table_is_trained_evaluated_and_accounted(cli: Cli) -> None:
    trained = cli("train", *READ, "--scaling", "public", *PLAN, "--out", "run", "--json")
    assert trained.status == 0, trained.stderr
    assert "3 clients (by site)" in trained.stderr
    assert "K_t = 3" in trained.stderr
    stored = read_toml("run/config.toml")
    assert stored["data"] | {"clients": 3, "partition": "natural", "task": "binary", "scaling": "public"} == stored["data"]
    assert Path(stored["data"]["columns"]).is_absolute()
    assert Ledger.open(Path("run/ledger.jsonl")).population["sizes"] == [8, 24, 48]
    evaluated = json.loads(cli("evaluate", "run", "--json").stdout)
    assert evaluated["examples"] == 20
    assert evaluated["accuracy"] == json.loads(trained.stdout)["accuracy"]
    accounted = cli("account", *READ, "--scaling", "public", *PLAN, "--json")
    assert json.loads(accounted.stdout)["rows"][0]["epsilon"] == json.loads(trained.stdout)["epsilon"][0]["epsilon"]


def test_a_run_over_named_clients_is_resumed(cli: Cli) -> None:
    assert cli("train", *READ, *PLAN, "--per-round", 2, "--out", "run", "--quiet").status == 0
    again = cli("train", "--resume", *TABLE, "--out", "run", "--quiet")
    assert again.status == 0, again.stderr
    other = cli("train", "--resume", "--label-column", "id", "--out", "run")
    assert "label_column: the run in run was started with sick, not id" in other.stderr


def test_the_recipe_takes_all_clients_of_the_table(cli: Cli) -> None:
    found = cli("calibrate", *READ, "--target-epsilon", 8, "--json")
    assert found.status == 0, found.stderr
    assert "1 local step on all 8 to 48 records of a client, clients weighted by records" in found.stderr
    assert 7.9 < json.loads(found.stdout)["epsilon"] <= 8


def test_an_attack_reads_the_table(cli: Cli) -> None:
    plan = (*PLAN, "--task", "classification", "--leak", "type0", "--attack", "analytic", "--victims", 1, "--json")
    outcome = cli("attack", *READ, *plan)
    assert outcome.status == 0, outcome.stderr
    assert json.loads(outcome.stdout)["coordinates"] == 6
    assert "clients: 2 is not allowed; site names 3" in cli("attack", *READ, *plan, "--clients", 2).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TABLE, "line 2, column 'sex': there is no finite number; if the column is text, list its values with --categories"),
        ((*TABLE, "--categories", "sex=f|m"), "column 'age; years': the value is missing; --missing indicator reads"),
        ((*READ, "--clients", "7"), "clients: 7 is not allowed; site names 3"),
        ((*READ, "--partition", "iid"), "partition: iid is not allowed with a client column"),
        ((*READ, "--per-round", "4"), "per_round: 4 clients a round cannot be chosen from 3"),
        ((*READ, "--task", "ranking"), "task: 'ranking' is not one of classification, binary, multilabel, regression"),
        ((*READ, "--missing", "mean"), "missing: 'mean' is not one of refuse, indicator"),
        ((*READ, "--delimiter", "|"), "delimiter: '|' is not one of comma, semicolon, tab"),
        ((*READ, "--columns", "none.toml"), "none.toml cannot be read"),
    ],
)
def test_a_table_that_cannot_be_read_gets_a_sentence(cli: Cli, options: tuple[str, ...], message: str) -> None:
    outcome = cli("train", *options, *PLAN, "--out", "run")
    assert outcome.status == 2
    assert message in outcome.stderr
    assert not Path("run").exists()


def test_notes_say_what_has_no_effect_and_what_no_epsilon_covers(cli: Cli) -> None:
    outcome = cli("train", *READ, *PLAN, "--scaling", "training", "--records", 5, "--out", "run")
    assert "--records has no effect here: it is for data without a client column" in outcome.stderr
    assert "scaled by statistics of the training records, which no ε covers" in " ".join(outcome.stderr.split())
    assert "--task has no effect here" in cli("account", "--task", "binary").stderr


def test_a_file_is_read_again_only_if_it_changed(table: Path) -> None:
    data = {"file": str(table), "label_column": "sick", "drop_columns": "site,id,sex", "missing": "indicator"}
    experiment = assemble({"data": data})
    first = load_splits(experiment)
    assert load_splits(experiment) is first
    table.write_text(table.read_text() + "\n999;Ulm;50;f;no")
    assert len(load_splits(experiment).train) == len(first.train) + 1


def test_settings_without_a_client_column_stay_as_they_are(table: Path) -> None:
    given = [{"data": {"file": str(table)}}, {"plan": {"slots": "auto"}}]
    assert with_clients_of_file(given) == given


def test_names_reach_the_federation(table: Path) -> None:
    data = {"file": str(table), "client_column": "site", "label_column": "sick", "drop_columns": "id,sex",
            "missing": "indicator", "task": "binary"}  # fmt: skip
    experiment = assemble(*with_clients_of_file([{"data": data}]))
    federation = prepare_experiment(experiment).federation
    assert federation.names == ("Bad Aibling", "Jena", "Ulm")
    assert federation.validation_clients is not None
    assert np.bincount(federation.validation_clients).tolist() == [6, 12, 2]
    with pytest.raises(PlanError, match="clients: 10 is not allowed; site names 3"):
        deal_out(assemble({"data": data}), load_splits(experiment))


def test_private_scaling_of_a_table_is_part_of_its_epsilon(cli: Cli, workplace: Path) -> None:
    done = cli("train", *READ, "--scaling", "private", "--target-epsilon", "4", "--out", "scaled", "--json")
    assert done.status == 0, done.stderr
    found = json.loads(done.stdout)
    assert 3.8 < found["epsilon"][0]["epsilon"] <= 4
    assert {each["client"]: each["records"] for each in found["clients"]} == {"Ulm": 8, "Bad Aibling": 24, "Jena": 48}
    assert (workplace / "scaled" / "scaling.safetensors").exists()
    assert '"round":-1' in (workplace / "scaled" / "ledger.jsonl").read_text()
