"""`fedcdp deploy init` with a table of named clients: each node gets its own rows, and reads them as the simulator does."""

from __future__ import annotations

import csv
import json
import re
import stat
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("cryptography")
pytest.importorskip("flwr")

from fedcdp.cli.program import app
from fedcdp.config.experiment import Experiment, assemble, read_toml
from fedcdp.deploy.protocol.local_round import records_of
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.writer import epsilon_of, experiment_for, write
from fedcdp.errors import DeploymentError
from fedcdp.files.tensors import load_tensors
from fedcdp.training.prepared import deal_out, load_splits
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import train_experiment
from tests.support.hospital_table import SIZES, nodes_of, settings_of, write_site
from tests.support.local_grid import LocalGrid, settings
from tests.support.small_task import task as small_task

FOLDERS = ["node-1-Charite", "node-2-Jena", "node-3-St.-Georg", "node-4-Sud-2"]


def assert_read_as_simulated(site: Site, wanted: Experiment, **changes: Any) -> None:
    federation = deal_out(wanted, load_splits(wanted, quiet=True))
    for number, node in enumerate(nodes_of(site).values()):
        found, _ = records_of(None, SimpleNamespace(node_config=node.config | changes), small_task())
        simulated = federation.train.take(torch.from_numpy(federation.indices(number)))
        assert torch.equal(found.tensor, simulated.tensor)
        assert torch.equal(found.targets, simulated.targets)
        assert found.task == simulated.task


@pytest.mark.parametrize("task", ["binary", "classification", "multilabel", "regression"])
def test_each_client_gets_its_own_rows_and_reads_them_as_simulated(task: str, tmp_path: Path) -> None:
    site, wanted = write_site(tmp_path, task)
    classes = {"binary": "no|yes", "classification": "eyes|skin|surgery"}.get(task)
    assert_read_as_simulated(site, wanted, **({"classes": classes} if classes else {}))
    assert [node.path.name for node in site.nodes(4)] == FOLDERS
    for node, name in zip(site.nodes(4), sorted(SIZES), strict=True):
        with node.records(".csv").open() as file:
            rows = list(csv.DictReader(file, delimiter=";"))
        assert {row["hospital"] for row in rows} == {name}
        assert len(rows) == round(0.8 * SIZES[name])
        assert stat.S_IMODE(node.records(".csv").stat().st_mode) == 0o600
        assert (site.path / f"start-{node.name}.sh").exists()
        assert f'folder="$here/{node.name}"' in (site.path / f"start-{node.name}.sh").read_text()


def test_the_configuration_has_the_options_of_the_table(tmp_path: Path) -> None:
    site, _ = write_site(tmp_path)
    assert tomllib.loads(site.node(3).config.read_text()) == {
        "policy": "policy.toml", "state-dir": "state", "data": "records.csv", "task": "binary", "client": "St. Georg",
        "client-column": "hospital", "label-column": "readmitted", "drop-columns": "days,fever,pain,patient,ward",
        "categories": "sex=f|m", "columns": "columns.toml", "partition-id": 2,
    }  # fmt: skip


def test_a_parquet_table_is_divided_as_well(tmp_path: Path) -> None:
    frame = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    given = settings_of(tmp_path)
    frame.read_csv(tmp_path / "hospitals.csv", sep=";").to_parquet(tmp_path / "hospitals.parquet")
    given["data"]["file"] = str(tmp_path / "hospitals.parquet")
    wanted = experiment_for(None, [given])
    site = write(tmp_path / "site", SiteSettings(nodes=4), wanted)
    assert site.node(1).records(".parquet").exists()
    assert_read_as_simulated(site, wanted, classes="no|yes")


def test_arrays_and_scaled_tables_are_divided_as_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "all.npz", x=rng.normal(size=(80, 3)), y=rng.integers(3, 5, 80), site=np.array(list("abcd") * 20))
    own = {"data": {"file": str(tmp_path / "all.npz"), "client_column": "site"}, "plan": {"rounds": 1, "batch_size": 2}}
    wanted = experiment_for(None, [own])
    site = write(tmp_path / "arrays", SiteSettings(nodes=4), wanted)
    assert_read_as_simulated(site, wanted)  # labels 3 and 4 are classes 0 and 1
    assert tomllib.loads(site.node(2).config.read_text())["client"] == "b"
    table = settings_of(tmp_path)
    table["data"]["scaling"] = "training"
    wanted = experiment_for(None, [table])
    site = write(tmp_path / "scaled", SiteSettings(nodes=4), wanted)
    assert_read_as_simulated(site, wanted)
    assert load_splits(wanted, quiet=True).table is None  # nobody could read the same inputs from it


def test_weights_by_records_get_the_public_mean(tmp_path: Path) -> None:
    _, wanted = write_site(tmp_path, weighting="records")
    assert wanted.plan.mean_records == pytest.approx(sum(round(0.8 * size) for size in SIZES.values()) / 4)


def test_each_policy_grants_what_the_plan_costs_a_client_of_its_size(tmp_path: Path) -> None:
    site, _ = write_site(tmp_path, noise_multiplier=3.0)
    granted = [tomllib.loads(node.policy.read_text())["epsilon"] for node in site.nodes(4)]
    held = [len(node.records(".csv").read_text().splitlines()) for node in site.nodes(4)]
    assert np.argsort(granted).tolist() == np.argsort(held)[::-1].tolist()


def test_another_number_of_nodes_is_refused_before_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcdp.deploy.site.writer.plan_experiment", lambda *_, **__: pytest.fail("it was planned"))
    with pytest.raises(DeploymentError, match="nodes: 3 is not 4, the number of clients that the client column names"):
        experiment_for(3, [settings_of(tmp_path)])


def test_private_scaling_ends_in_the_simulators_model(tmp_path: Path) -> None:
    given = settings_of(tmp_path)
    given["data"]["scaling"] = "private"
    with (tmp_path / "columns.toml").open("a") as file:
        file.write("[bmi]\nrange = [-5, 5]\n")
    wanted = experiment_for(None, [given, {"plan": {"secure_noise": False, "rounds": 2, "noise_multiplier": 1.0}}])
    site = write(tmp_path / "site", SiteSettings(nodes=4), wanted)
    without = replace(wanted, plan=wanted.plan.but(scaling_noise=None))
    for number, node in enumerate(site.nodes(4)):
        held = int(deal_out(wanted, load_splits(wanted, quiet=True)).sizes([number])[0])
        granted = tomllib.loads(node.policy.read_text())["epsilon"]
        assert granted > epsilon_of(wanted, 2, held) > epsilon_of(without, 2, held)
    assert serve(LocalGrid(nodes_of(site)), wanted, site.run, settings(reproducible=True)).ended == "done"
    model, _ = load_tensors(RunDirectory(site.run).model, "model-1")
    assert float((model["scaling.scale"] - 1).abs().max()) > 0.1
    for name, value in train_experiment(wanted, None, quiet=True).model.state_dict().items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=1e-5)


def test_the_command_makes_a_node_of_every_named_client(tmp_path: Path) -> None:
    data = settings_of(tmp_path)["data"]
    done = CliRunner().invoke(
        app, ["deploy", "init", str(tmp_path / "site"), "--data", data["file"], "--client-column", "hospital",
              "--label-column", "readmitted", "--task", "binary", "--drop-columns", data["drop_columns"],
              "--categories", "sex=f|m", "--columns", data["columns"], "--rounds", "3"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "a server and 4 nodes" in done.output
    site = Site(tmp_path / "site")
    assert (site.require().nodes, [node.name for node in site.nodes(4)]) == (4, FOLDERS)
    experiment = assemble(read_toml(site.experiment))
    assert (experiment.plan.weighting, experiment.plan.noise_slots) == ("records", "held")
    assert experiment.plan.mean_records == 34.5


def test_the_commands_show_the_main_metric_of_the_task(tmp_path: Path) -> None:
    site, wanted = write_site(tmp_path, "regression")
    serve(LocalGrid(nodes_of(site)), wanted, site.run, settings(reproducible=True))
    told = json.loads(CliRunner().invoke(app, ["deploy", "status", str(site.path), "--json"]).stdout)
    assert told["accuracy"] is None
    assert told["metrics"] == json.loads((site.run / "scores.json").read_text())["metrics"]
    assert {"mae", "rmse", "r2", "loss"} == told["metrics"].keys()
    shown = CliRunner().invoke(app, ["deploy", "status", str(site.path)]).output
    assert re.search(rf"validation MAE +│ {told['metrics']['mae']:.4g} ", shown)
    (site.run / "scores.json").unlink()  # before the end of a run: what its last round shows
    told = json.loads(CliRunner().invoke(app, ["deploy", "status", str(site.path), "--json"]).stdout)
    assert told["metrics"].keys() == {"mae", "loss"}
