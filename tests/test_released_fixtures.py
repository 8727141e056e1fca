"""What a released version left on disk opens and resumes: run directories, a client's ledger, deployments.

`tools/released_fixtures.py` says how the fixtures were made. They are never written anew by today's code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from fedcdp.accounting.ledger import Ledger
from fedcdp.cli.program import app
from fedcdp.config.experiment import assemble, read_toml
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.site.certificates import Authority, new_node_key
from fedcdp.deploy.site.directory import Site
from fedcdp.files.tensors import load_tensors
from fedcdp.files.tree import Tree
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import train_experiment
from tests.support.local_grid import LocalGrid
from tools.released_fixtures import NODES, nodes_of, settings_of

HERE = Path(__file__).parent
RELEASES = sorted(path for path in (HERE / "fixtures").iterdir() if path.is_dir() and (path / "records.csv").exists())
RUNS = [path for release in RELEASES for path in sorted((release / "trainings").iterdir()) if path.is_dir()]
SITES = [path for release in RELEASES for path in sorted(release.glob("site*")) if path.is_dir()]


def named(path: Path) -> str:
    return str(path.relative_to(HERE / "fixtures"))


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A copy of one fixture, in a directory that has the data beside it."""
    path: Path = request.param
    release = next(each for each in RELEASES if each in path.parents)
    shutil.copy(release / "records.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(path, tmp_path / path.name))


def model(path: Path) -> Tree:
    return load_tensors(path, "model-1")[0]


def assert_same(ours: Tree, theirs: Tree) -> None:
    """Up to rounding: another processor adds in another order."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-6)


def test_there_are_fixtures() -> None:
    assert [path.name for path in RELEASES][:1] == ["0.1.0"]
    assert len(RUNS) >= 6
    assert len(SITES) >= 2


@pytest.mark.parametrize("released", RUNS, ids=named, indirect=True)
def test_a_run_opens_and_resumes_to_its_end(released: Path, request: pytest.FixtureRequest) -> None:
    before = Ledger.open(released / "ledger.jsonl").charges
    done = RunDirectory(released).rounds_done()
    experiment = assemble(read_toml(released / "config.toml"))
    assert 0 < done < experiment.plan.rounds
    stated = CliRunner().invoke(app, ["account", "--run", str(released), "--json"])
    assert stated.exit_code == 0, stated.output
    resumed = CliRunner().invoke(app, ["train", "--resume", "--out", str(released), "--quiet"])
    assert resumed.exit_code == 0, resumed.output
    assert [row["round"] for row in RunDirectory(released).read_metrics()] == list(range(1, experiment.plan.rounds + 1))
    after = Ledger.open(released / "ledger.jsonl").charges
    assert [(each.round, each.attempt) for each in after[: len(before)]] == [(c.round, c.attempt) for c in before]
    # Under secure noise a round that was charged and not kept is released, and charged, once more.
    repeated = (len(before) - done) * experiment.plan.secure_noise
    assert len(after) == experiment.plan.rounds + repeated
    stated = CliRunner().invoke(app, ["account", "--run", str(released), "--json"])
    assert stated.exit_code == 0, stated.output
    assert json.loads(stated.stdout)["rows"]
    if not experiment.plan.secure_noise:
        path: Path = request.node.callspec.params["released"]
        assert_same(model(released / "model.safetensors"), model(path.with_suffix(".safetensors")))
        uninterrupted = train_experiment(experiment, None, quiet=True).model.state_dict()
        assert_same(model(released / "model.safetensors"), dict(uninterrupted))


@pytest.mark.parametrize("released", [release / "client" for release in RELEASES], ids=named, indirect=True)
def test_a_clients_ledger_opens_and_nothing_in_it_is_forgotten(released: Path, request: pytest.FixtureRequest) -> None:
    path: Path = request.node.callspec.params["released"]
    made = json.loads((path.parent / "client.json").read_text())
    with ClientLedger.held(released) as ledger:
        assert [[digest, len(each.releases)] for digest, each in ledger.tasks.items()] == made
        assert [each.participations for each in ledger.reservations()] == [times for _, times in made if times]
        assert [each.place for each in ledger.reservations()] == list(range(1, 6))
        # A task that it accepted may be gone on with, and that is charged.
        digest, times = made[0]
        ClientPolicy(epsilon=100.0).reserve(digest, ledger, times)
        ledger.charge(digest, times, 0, 4.0)
    with ClientLedger.held(released) as ledger:
        assert len(ledger.tasks[digest].releases) == times + 1


@pytest.mark.parametrize("released", SITES, ids=named, indirect=True)
def test_a_deployment_opens_and_its_server_goes_on(released: Path, request: pytest.FixtureRequest) -> None:
    site = Site(released)
    assert site.require().nodes == NODES
    authority = Authority.new()  # keys are no part of a fixture; those of today fit in their places
    for place in site.nodes(NODES):
        assert ClientPolicy.read(place.policy).epsilon < 100
        place.key.write_bytes(new_node_key().private)
        place.authority.write_bytes(authority.pair.public)
    experiment = assemble(read_toml(site.experiment))
    assert RunDirectory(site.run).rounds_done() == 2
    outcome = serve(LocalGrid(nodes_of(site)), experiment, site.run, settings_of(site))
    assert (outcome.ended, outcome.rounds) == ("done", experiment.plan.rounds)
    assert [row["clients"] for row in RunDirectory(site.run).read_metrics()] == [NODES] * experiment.plan.rounds
    charges = Ledger.open(site.run / "ledger.jsonl").charges
    repeated = experiment.plan.secure_noise
    assert len(charges) == experiment.plan.rounds + repeated
    counts = []
    for place in site.nodes(NODES):
        with ClientLedger.held(place.state) as ledger:
            counts.append(sum(len(each.releases) for each in ledger.tasks.values()))
    asked_twice = [True, True, False]  # the server was killed as the second of three had answered
    assert counts == [experiment.plan.rounds + (twice and repeated) for twice in asked_twice]
    stated = CliRunner().invoke(app, ["account", "--run", str(site.run), "--json"])
    assert stated.exit_code == 0, stated.output
    if not experiment.plan.secure_noise:
        path: Path = request.node.callspec.params["released"]
        assert_same(model(site.run / "model.safetensors"), model(path.with_suffix(".safetensors")))
