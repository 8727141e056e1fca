"""A server that is killed anywhere goes on with the same run, and no ledger counts too little."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedcdp.accounting.ledger import Ledger
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.server import serve
from fedcdp.errors import RunError
from fedcdp.files.tensors import load_tensors
from fedcdp.files.tree import Tree
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import train_experiment
from tests.support.local_grid import CLIENTS, Killed, LocalGrid, experiment, make_nodes, settings
from tests.support.pairs import pairs_first

MESSAGES = CLIENTS + 3 * 3  # to subscribe, and three rounds of three clients


def times(base: Path, number: int) -> int:
    with ClientLedger.held(base / f"client-{number}") as ledger:
        return sum(len(each.releases) for each in ledger.tasks.values())


def replies(grid: LocalGrid) -> list[int]:
    """How many updates have left each client."""
    return [
        sum("update" in reply.content.array_records for reply in grid.nodes[100 + number].answered)
        for number in range(CLIENTS)
    ]


@pytest.fixture(scope="module")
def simulated() -> Tree:
    """The simulator's model of the same experiment."""
    return train_experiment(experiment(), None, quiet=True).model.state_dict()


@pytest.mark.parametrize(
    ("place", "when", "reproducible"),
    pairs_first(place=range(0, MESSAGES, 3), when=["before", "after"], reproducible=[True, False])
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in product((place for place in range(MESSAGES) if place % 3), ["before", "after"], [True, False])
    ],
)
def test_killed_at_any_message(place: int, when: str, reproducible: bool, tmp_path: Path, simulated: Tree) -> None:
    wanted, how = experiment(), settings(reproducible=reproducible)
    killed = LocalGrid(make_nodes(tmp_path), fail_at=(place, when))
    with pytest.raises(Killed):
        serve(killed, wanted, tmp_path / "run", how)
    resumed = LocalGrid(make_nodes(tmp_path))
    assert serve(resumed, wanted, tmp_path / "run", how).ended == "done"
    ledger = Ledger.open(tmp_path / "run" / "ledger.jsonl")
    left = [one + other for one, other in zip(replies(killed), replies(resumed), strict=True)]
    for number, charged in enumerate(ledger.participations().tolist()):
        assert times(tmp_path, number) <= charged
        if reproducible:  # an update that is sent again is the same release
            assert times(tmp_path, number) == charged
        else:
            assert times(tmp_path, number) >= left[number]
    rows = RunDirectory(tmp_path / "run").read_metrics()
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["clients"] for row in rows] == [3, 3, 3]
    if reproducible:
        model = load_tensors(tmp_path / "run" / "model.safetensors", "model-1")[0]
        for name, value in simulated.items():
            torch.testing.assert_close(model[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_an_optimiser_goes_on_to_the_bit_where_the_server_was_killed(optimizer: str, tmp_path: Path) -> None:
    wanted, how = experiment(server_optimizer=optimizer, server_learning_rate=0.1), settings(reproducible=True)
    models = []
    for name, fail_at in (("whole", None), ("killed", (CLIENTS + 7, "after"))):
        grid = LocalGrid(make_nodes(tmp_path / name), fail_at=fail_at)
        if fail_at is not None:
            with pytest.raises(Killed):
                serve(grid, wanted, tmp_path / name / "run", how)
            assert RunDirectory(tmp_path / name / "run").rounds_done() == 2
            grid = LocalGrid(make_nodes(tmp_path / name))
        assert serve(grid, wanted, tmp_path / name / "run", how).ended == "done"
        models.append(load_tensors(tmp_path / name / "run" / "checkpoint.safetensors", "checkpoint-1")[0])
    assert models[0].keys() == models[1].keys()
    assert any(name.startswith("momentum/") for name in models[0])
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_a_checkpoint_without_its_optimisers_state_is_refused(tmp_path: Path) -> None:
    wanted, how = experiment(server_optimizer="adam", server_learning_rate=0.1), settings(reproducible=True)
    with pytest.raises(Killed):
        serve(LocalGrid(make_nodes(tmp_path), fail_at=(CLIENTS + 7, "after")), wanted, tmp_path / "run", how)
    directory = RunDirectory(tmp_path / "run")
    stored = directory.load_state()
    assert stored is not None
    directory.save_state(replace(stored, optimizer=None), wanted.plan.digest())
    with pytest.raises(RunError, match="does not hold the state of the server optimiser adam"):
        serve(LocalGrid(make_nodes(tmp_path)), wanted, tmp_path / "run", how)


@pytest.mark.parametrize("at", ["metrics", "checkpoint", "roster", "ledger"])
def test_killed_while_it_writes(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A charge without a round, a line of metrics without a checkpoint, a roster without a ledger."""
    from fedcdp.deploy.protocol import server

    def kill(*args: object, **kwargs: object) -> None:  # noqa: ARG001
        raise Killed

    wanted, how = experiment(), settings(reproducible=True)
    with monkeypatch.context() as patch:
        if at in ("metrics", "checkpoint"):
            load = server._Server._load_state
            patch.setattr(server._Server, "_load_state", lambda self: (load(self), _arm(patch, at, kill))[0])
        elif at == "roster":
            patch.setattr(server, "save_roster", kill)
        else:
            patch.setattr(server._Server, "_ledger", kill)
        with pytest.raises(Killed):
            serve(LocalGrid(make_nodes(tmp_path)), wanted, tmp_path / "run", how)
    assert serve(LocalGrid(make_nodes(tmp_path)), wanted, tmp_path / "run", how).ended == "done"
    rows = RunDirectory(tmp_path / "run").read_metrics()
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").rounds_charged == 3


def _arm(patch: pytest.MonkeyPatch, at: str, kill: object) -> None:
    patch.setattr(RunDirectory, {"metrics": "append_metrics", "checkpoint": "save_state"}[at], kill)


def test_a_client_is_found_again_under_another_node(tmp_path: Path) -> None:
    grid = LocalGrid(make_nodes(tmp_path), fail_at=(CLIENTS + 4, "before"))
    with pytest.raises(Killed):
        serve(grid, experiment(), tmp_path / "run", settings(reproducible=True))
    renamed = {node + 500: each for node, each in make_nodes(tmp_path).items()}
    assert serve(LocalGrid(renamed), experiment(), tmp_path / "run", settings(reproducible=True)).ended == "done"
    assert [row["clients"] for row in RunDirectory(tmp_path / "run").read_metrics()] == [3, 3, 3]


def test_a_client_that_lost_its_ledger_is_not_taken_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = LocalGrid(make_nodes(tmp_path), fail_at=(CLIENTS + 4, "before"))
    with pytest.raises(Killed):
        serve(grid, experiment(), tmp_path / "run", settings(min_clients=3))
    (tmp_path / "client-1" / "ledger.jsonl").unlink()
    outcome = serve(LocalGrid(make_nodes(tmp_path)), experiment(), tmp_path / "run", settings(min_clients=3))
    assert outcome.ended == "done"
    assert "has lost its ledger" in caplog.text


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    serve(LocalGrid(make_nodes(tmp_path)), experiment(), tmp_path / "run", settings())
    grid = LocalGrid(make_nodes(tmp_path))
    assert serve(grid, experiment(), tmp_path / "run", settings()).ended == "done"
    assert not grid.sent


def test_another_experiment_does_not_go_on_in_a_runs_directory(tmp_path: Path) -> None:
    serve(LocalGrid(make_nodes(tmp_path)), experiment(), tmp_path / "run", settings())
    for wanted, how, sentence in (
        (experiment(noise_multiplier=0.1), settings(), "noise_multiplier: the run"),
        (experiment(), settings(reproducible=True), "reproducible"),
        (experiment(), settings(min_cohort=2), "min-cohort"),
    ):
        with pytest.raises(RunError, match=sentence):
            serve(LocalGrid(make_nodes(tmp_path)), wanted, tmp_path / "run", how)


def test_a_lost_roster_or_ledger_is_noticed(tmp_path: Path) -> None:
    grid = LocalGrid(make_nodes(tmp_path), fail_at=(CLIENTS + 7, "before"))
    with pytest.raises(Killed):
        serve(grid, experiment(), tmp_path / "run", settings())
    roster = (tmp_path / "run" / "clients.json").read_bytes()
    (tmp_path / "run" / "clients.json").unlink()
    with pytest.raises(RunError, match=r"clients.json is missing"):
        serve(LocalGrid(make_nodes(tmp_path)), experiment(), tmp_path / "run", settings())
    (tmp_path / "run" / "clients.json").write_bytes(roster)
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(RunError, match="they do not match"):
        serve(LocalGrid(make_nodes(tmp_path)), experiment(), tmp_path / "run", settings())


def test_a_model_that_learned_nothing_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing_but_noise = experiment(noise_multiplier=1e4)
    outcome = serve(LocalGrid(make_nodes(tmp_path)), nothing_but_noise, tmp_path / "run", settings(reproducible=True))
    assert outcome.warning is not None
    assert "no better than always predicting the most frequent class" in outcome.warning
    assert outcome.warning in caplog.text
