"""Clients that read their own tables: the simulator's model for every task, and nothing trained on another meaning."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from fedcdp.cli.program import app
from fedcdp.data.table_schema import TableSchema
from fedcdp.deploy.protocol import messages, wire
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.local_round import Round, records_of
from fedcdp.deploy.protocol.roster import load_roster
from fedcdp.deploy.protocol.server import ServerSettings, serve
from fedcdp.deploy.protocol.task import Task
from fedcdp.deploy.site.directory import SiteSettings
from fedcdp.deploy.site.writer import experiment_for, plan_for, write
from fedcdp.errors import DataError, FedcdpError, TaskError
from fedcdp.files.tensors import load_tensors
from fedcdp.training.ledger_check import spent
from fedcdp.training.prepared import load_splits, network_of
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import train_experiment
from tests.support.hospital_table import SIZES, nodes_of, settings_of, write_site
from tests.support.local_grid import OPEN, LocalGrid, Node, settings
from tests.support.one_client import send
from tests.support.small_task import task as small_task

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one logit": ("binary", {}),
    "classes": ("classification", {}),
    "labels": ("multilabel", {}),
    "a value in a range": ("regression", {}),
    "weighted": ("binary", {"weighting": "records"}),
    "weighted, all records": (
        "regression",
        {"weighting": "records", "noise_slots": "held", "record_sampling": "partition", "batch_size": 64, "local_steps": 1},
    ),
    "no privacy": ("regression", {"method": "nonprivate", "weighting": "records"}),
}


@pytest.mark.parametrize(("task", "plan"), PLANS.values(), ids=PLANS.keys())
def test_tables_of_named_clients_give_the_simulators_model(task: str, plan: dict[str, Any], tmp_path: Path) -> None:
    site, wanted = write_site(tmp_path, task, **plan)
    run = train_experiment(wanted, tmp_path / "simulated", quiet=True)
    outcome = serve(LocalGrid(nodes_of(site)), wanted, tmp_path / "deployed", settings(reproducible=True))
    assert outcome.ended == "done"
    model, _ = load_tensors(tmp_path / "deployed" / "model.safetensors", "model-1")
    difference = max(float((model[name] - value).abs().max()) for name, value in run.model.state_dict().items())
    assert difference < 1e-6
    directory = RunDirectory(tmp_path / "deployed")
    assert [row["clients"] for row in directory.read_metrics()] == [4, 4, 4]
    scores, clients = directory.read_scores(3)
    assert scores == pytest.approx(run.scores)
    assert [row["client"] for row in clients] == [row["client"] for row in run.client_scores] == sorted(SIZES)
    assert [member.client for member in load_roster(tmp_path / "deployed" / "clients.json")] == sorted(SIZES)
    first = network_of(wanted, load_splits(wanted, quiet=True)).state_dict()
    assert max(float((value - first[name]).abs().max()) for name, value in model.items()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("adversary", ["server", "example"])
def test_the_recipe_runs_to_its_end_under_the_clients_own_policies(adversary: str, tmp_path: Path) -> None:
    """Noise of equal size at every client: nobody's ε depends on its size, and each policy grants what its client needs."""
    given = settings_of(tmp_path)
    given = {"data": given["data"], "plan": {"rounds": 3}, "run": {"adversary": adversary}}
    target = 8.0 if adversary == "server" else 400.0
    wanted = plan_for(None, [given], target).experiment
    assert (wanted.plan.weighting, wanted.plan.noise_slots, wanted.plan.secure_noise) == ("records", "held", True)
    site = write(tmp_path / "site", SiteSettings(nodes=4), wanted)
    outcome = serve(LocalGrid(nodes_of(site, None)), wanted, tmp_path / "run", settings())
    assert outcome.ended == "done"
    assert [row["clients"] for row in RunDirectory(tmp_path / "run").read_metrics()] == [4, 4, 4]
    assert spent(tmp_path / "run")[1].row(adversary).epsilon <= target
    told = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--per-client", "--json"])
    assert [row["client"] for row in json.loads(told.stdout)["clients"]] == sorted(SIZES)


def test_a_server_with_public_records_of_its_own_trains_the_clients(tmp_path: Path) -> None:
    """It needs no client's records: their columns are enough, and the fewest records of a client are in the settings."""
    site, wanted = write_site(tmp_path, weighting="records")
    with (tmp_path / "hospitals.csv").open() as table:
        (tmp_path / "public.csv").write_text("".join(table.readline() for _ in range(30)))
    data = replace(wanted.data, file=str(tmp_path / "public.csv"), client_column=None, partition="iid",
                   drop_columns=f"{wanted.data.drop_columns},hospital")  # fmt: skip
    config = tomllib.loads((site.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["smallest-records"] == 10
    assert config["most-records"] == 64
    told = ServerSettings.of(config | {"round-timeout": 1.0, "subscribe-timeout": 1.0})
    outcome = serve(LocalGrid(nodes_of(site)), replace(wanted, data=data), tmp_path / "run", told)
    assert outcome.ended == "done"
    assert [row["clients"] for row in RunDirectory(tmp_path / "run").read_metrics()] == [4, 4, 4]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, Path]:
    """The task of a deployment of tables, and the folder of a node."""
    base = tmp_path_factory.mktemp("tables")
    site, wanted = write_site(base, rounds=1)
    serve(LocalGrid(nodes_of(site)), wanted, base / "run", settings(reproducible=True))
    return Task.from_json((base / "run" / "task.json").read_text()), site.node(3).path


@pytest.fixture
def published(deployed: tuple[Task, Path], tmp_path: Path) -> tuple[Task, dict[str, Any], Path]:
    """The task, the node's configuration, and its table, which a test may change."""
    place = Path(shutil.copytree(deployed[1], tmp_path / "node", ignore=shutil.ignore_patterns("state")))
    config = tomllib.loads((place / "node.toml").read_text())
    paths = {name: str(place / config[name]) for name in ("data", "columns", "state-dir")}
    return deployed[0], config | paths, place / "records.csv"


def answer_of(task: Task, config: dict[str, Any]) -> Any:
    return send(Node(client_app(policy=OPEN), config), messages.publish(task), "query.subscribe").config_records["answer"]


def test_a_task_says_what_columns_mean(published: tuple[Task, dict[str, Any], Path]) -> None:
    task, config, _ = published
    assert (task.learning_task, task.classes, task.shape) == ("binary", 1, (5,))
    assert task.table == TableSchema(
        inputs=(("age", (0.0, 110.0)), ("sex", ("f", "m")), ("bmi", None)),
        labels=(("readmitted", None),),
        classes=("no", "yes"),
    )
    assert "classes" not in config  # those of the task
    said = answer_of(task, config)
    assert (said["accepts"], said["records"], said["client"]) == (True, 64, "St. Georg")


CHANGES: dict[str, tuple[dict[str, str], str]] = {
    "categories in another order": ({"categories": "sex=m|f"}, "the categories or the range of 'sex'"),
    "one category more": ({"categories": "sex=f|m|x"}, "the categories or the range of 'sex'"),
    "no range": ({"columns": "none.toml"}, "the categories or the range of 'age'"),
    "a column left out": ({"drop-columns": "patient,ward,pain,fever,days,age", "columns": "none.toml"}, "input column 1"),
    "another label": (
        {"label-column": "fever", "drop-columns": "patient,ward,pain,days,readmitted"},
        "the label readmitted",
    ),
    "a column more": ({"drop-columns": "patient,ward,pain,fever"}, "the number of input columns, 3"),
    "classes in another order": ({"classes": "yes|no"}, "the classes no|yes, in this order"),
    "another rule for missing values": ({"missing": "indicator"}, "the rule for missing values, refuse"),
}


@pytest.mark.parametrize(("changes", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_a_client_that_reads_its_table_otherwise_declines(
    changes: dict[str, str], said: str, published: tuple[Task, dict[str, Any], Path]
) -> None:
    task, config, table = published
    (table.parent / "none.toml").write_text("")
    paths = {name: str(table.parent / value) for name, value in changes.items() if name == "columns"}
    if "label-column" in changes:
        paths["classes"] = "0|1"
    found = answer_of(task, config | changes | paths)
    assert found["accepts"] is False
    assert f"the table here differs from the task's in {said}" in str(found["reason"])


def test_columns_in_another_order_are_noticed(published: tuple[Task, dict[str, Any], Path]) -> None:
    task, config, table = published
    swapped = [";".join([*cells[:2], cells[4], cells[3], cells[2], *cells[5:]]) for cells in _cells(table)]
    table.write_text("\n".join(swapped))
    assert "input column 1, 'age'" in str(answer_of(task, config)["reason"])


def _cells(table: Path) -> list[list[str]]:
    return [line.split(";") for line in table.read_text().splitlines()]


def test_a_client_with_another_task_declines(published: tuple[Task, dict[str, Any], Path]) -> None:
    task, config, _ = published
    found = answer_of(task, config | {"task": "classification", "classes": "no|yes"})
    assert found["reason"] == "labels here are for classification, not for binary"


def test_a_table_that_changes_during_a_task_is_noticed(published: tuple[Task, dict[str, Any], Path]) -> None:
    task, config, _ = published
    assert answer_of(task, config)["accepts"] is True
    weights = {name: torch.zeros(shape) for name, shape in task.tensors.items()}
    content = messages.ask(task.digest(), Round(0, 0, None), wire.dense(weights))
    changed = Node(client_app(policy=OPEN), config | {"categories": "sex=m|f"})
    assert "the data have changed" in str(send(changed, content, "train").config_records["refused"]["reason"])
    assert "update" in send(Node(client_app(policy=OPEN), config), content, "train").array_records


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "text labels without classes": ({}, "list the classes in order"),
    "a setting that is no text": ({"label-column": 3}, "label-column must be a text"),
    "another scaling": ({"scaling": "training"}, "scaling must be public"),
    "an unknown client": ({"client": "Bonn", "classes": "no|yes"}, "no rows of 'Bonn'"),
    "a column that is not there": ({"client-column": "clinic"}, "client_column: .* has no column 'clinic'"),
    "an unknown task": ({"task": "ranking"}, "task: 'ranking' is not one of"),
}


@pytest.mark.parametrize(("changes", "said"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options_are_refused_in_one_sentence(
    changes: dict[str, Any], said: str, published: tuple[Task, dict[str, Any], Path]
) -> None:
    task, config, _ = published
    with pytest.raises(FedcdpError, match=said):
        records_of(None, SimpleNamespace(node_config=config | changes), replace(task, table=None))


def test_of_a_file_with_several_clients_one_is_read(tmp_path: Path) -> None:
    """The records of a client are the simulator's, in the file's order."""
    wanted = experiment_for(None, [settings_of(tmp_path)])
    data = wanted.data
    config = {"data": data.file, "client-column": "hospital", "label-column": "readmitted", "task": "binary",
              "drop-columns": data.drop_columns, "categories": data.categories, "columns": data.columns,
              "classes": "no|yes"}  # fmt: skip
    found, _ = records_of(None, SimpleNamespace(node_config=config | {"client": "Jena"}), small_task())
    assert len(found) == SIZES["Jena"]
    splits = load_splits(wanted, quiet=True)
    assert splits.owners is not None
    ours = splits.train.tensor[torch.from_numpy(splits.owners == 1)]
    assert {tuple(row) for row in ours.tolist()} <= {tuple(row) for row in found.tensor.tolist()}
    with pytest.raises(DataError, match="names 4 clients in 'hospital'; say which one this is"):
        records_of(None, SimpleNamespace(node_config=config), small_task())


@pytest.mark.parametrize(
    ("task", "targets"),
    [("regression", [0.5, 1.5]), ("multilabel", [[0, 1], [1, 1]]), ("binary", [0, 1]), ("classification", [0, 3])],
)
def test_a_function_returns_records_for_any_task(task: str, targets: list[Any]) -> None:
    found, table = records_of(
        lambda _: (np.zeros((2, 3)), np.array(targets)), SimpleNamespace(node_config={"task": task}), small_task()
    )
    assert (found.task, found.targets.tolist(), table) == (task, targets, None)
    whole, _ = records_of(lambda _: found, SimpleNamespace(node_config={}), small_task())
    assert whole is found


def test_a_task_of_ones_own_needs_a_loss(tmp_path: Path) -> None:
    config = {"state-dir": str(tmp_path), "task": "custom"}
    node = Node(client_app(lambda _: (np.zeros((20, 3)), np.zeros(20)), policy=OPEN), config)
    said = send(node, messages.publish(replace(small_task(), learning_task="custom")), "query.subscribe")
    assert "has no loss for it" in str(said.config_records["answer"]["reason"])


# The written form ----------------------------------------------------------------------------------------------------

TABLE = TableSchema((("age", (0.0, 110.0)), ("sex", ("f", "m")), ("bmi", None)), (("days", (0.0, 30.0)),), (), "indicator")


def test_what_release_0_1_0_did_not_know_is_left_out() -> None:
    assert not {"learning_task", "table"} & set(json.loads(small_task().to_json()))
    digests = {small_task().digest(), replace(small_task(), learning_task="regression").digest(),
               replace(small_task(), table=TABLE).digest()}  # fmt: skip
    assert len(digests) == 3


@pytest.mark.parametrize("table", [TABLE, replace(TABLE, classes=("no", "yes"), missing="refuse")])
def test_a_table_is_read_back(table: TableSchema) -> None:
    task = replace(small_task(), learning_task="binary", table=table)
    found = Task.from_json(task.to_json())
    assert (found.table, found.learning_task, found.digest()) == (table, "binary", task.digest())


BAD: dict[str, dict[str, Any]] = {
    "an unknown task": {"learning_task": "ranking"},
    "the default, written": {"learning_task": "classification"},
    "no table": {"table": None},
    "another key": {"table": TABLE.written() | {"rows": 3}},
    "no inputs": {"table": TABLE.written() | {"inputs": []}},
    "a column twice": {"table": TABLE.written() | {"inputs": [["a", None], ["a", None]]}},
    "a range of whole numbers": {"table": TABLE.written() | {"inputs": [["a", [0, 1]]]}},
    "a range upside down": {"table": TABLE.written() | {"inputs": [["a", [1.0, 0.0]]]}},
    "a negative zero": {"table": TABLE.written() | {"inputs": [["a", [-0.0, 1.0]]]}},
    "one category": {"table": TABLE.written() | {"inputs": [["a", ["x"]]]}},
    "equal categories": {"table": TABLE.written() | {"inputs": [["a", ["x", "x"]]]}},
    "a label with categories": {"table": TABLE.written() | {"labels": [["y", ["a", "b"]]]}},
    "classes that are none": {"table": TABLE.written() | {"classes": None}},
    "an unknown rule": {"table": TABLE.written() | {"missing": "mean"}},
    "no object": {"table": [1]},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
def test_any_other_form_is_refused(changes: dict[str, Any]) -> None:
    written = json.loads(small_task().to_json()) | changes
    with pytest.raises(TaskError):
        Task.from_json(json.dumps(written, sort_keys=True))
