"""A deployment ends in the simulator's model: the same functions run in both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("flwr")

from fedcdp.accounting.ledger import Ledger
from fedcdp.config.experiment import ModelSettings
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.protocol.task import hides_participation
from fedcdp.files.tensors import load_tensors
from fedcdp.training.prepared import deal_out, load_splits, network_of
from fedcdp.training.simulate import simulate
from fedcdp.training.trainer import train_experiment
from tests.support.local_grid import OPEN, LocalGrid, experiment, make_nodes, settings

PLANS: dict[str, dict[str, Any]] = {
    "nonprivate": {"method": "nonprivate"},
    "nonprivate, whole models": {"method": "nonprivate", "aggregation": "fedaveraging"},
    "dssgd": {"method": "dssgd", "share_fraction": 0.1},
    "fed-cdp": {},
    "fed-cdp, noise on the batch": {"noise": "batch"},
    "fed-cdp, noise shared by the cohort": {"noise": "cohort"},
    "fed-cdp, flat": {"clip_mode": "flat"},
    "fed-cdp-decay": {"method": "fed-cdp-decay", "noise_follows_clip": False},
    "fed-cdp, fixed order": {"record_sampling": "partition"},
    "fed-cdp, fixed size": {"record_sampling": "fixed"},
    "fed-cdp, Poisson clients": {"client_sampling": "poisson"},
    "fed-cdp, pruned": {"compression": 0.7},
    "fed-cdp, momentum and average": {"momentum": 0.5, "ema": 0.9, "server_learning_rate": 0.7},
    "fed-cdp, quantile": {"clip": "quantile(0.5, 1)"},
    "fed-cdp, adam and proximal": {
        "server_optimizer": "adam", "server_learning_rate": "linear(0.1, 0.02)", "proximal": 0.5, "ema": 0.5,
    },
    "fed-cdp, trimmed mean": {"aggregator": "trimmed-mean", "trim": 0.3},
    "fed-cdp, median of means, Poisson clients": {
        "aggregator": "median-of-means", "median_groups": 2, "client_sampling": "poisson", "ema": 0.5,
    },
    "fed-cdp, server momentum": {"server_optimizer": "momentum", "server_momentum": 0.7, "client_sampling": "poisson"},
    "fed-sdp at the server, yogi": {"method": "fed-sdp", "server_optimizer": "yogi", "server_learning_rate": 0.1},
    "dssgd, adam": {"method": "dssgd", "server_optimizer": "adam", "server_learning_rate": 0.1, "server_epsilon": 0.1},
    "fed-sdp at the server": {"method": "fed-sdp"},
    "fed-sdp at the server, Poisson clients, quantile": {
        "method": "fed-sdp", "client_sampling": "poisson", "clip": "quantile(0.5, 0.1)", "ema": 0.5,
    },
    "fed-sdp at the client": {"method": "fed-sdp", "noise_at": "client"},
    "fed-sdp at the client, quantile": {"method": "fed-sdp", "noise_at": "client", "clip": "quantile(0.5, 0.1)"},
}  # fmt: skip


@pytest.fixture
def grid(tmp_path: Path) -> LocalGrid:
    return LocalGrid(make_nodes(tmp_path))


QUICK = {
    "nonprivate",
    "fed-cdp",
    "fed-cdp, Poisson clients",
    "fed-cdp, quantile",
    "fed-cdp, adam and proximal",
    "fed-cdp, trimmed mean",
    "fed-sdp at the server",
    "fed-sdp at the client",
}


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, plan in PLANS.items()],
)
def test_three_rounds_end_in_the_simulators_model(plan: dict[str, Any], grid: LocalGrid, tmp_path: Path) -> None:
    wanted = experiment(**plan)
    run = train_experiment(wanted, tmp_path / "simulated", quiet=True)
    outcome = serve(grid, wanted, tmp_path / "deployed", settings(reproducible=True))
    assert outcome.ended == "done"
    model, about = load_tensors(tmp_path / "deployed" / "model.safetensors", "model-1")
    assert about["round"] == 3
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=1e-5)
    first = network_of(wanted, load_splits(wanted, quiet=True)).state_dict()
    moved = max(float((value - first[name]).abs().max()) for name, value in model.items())
    assert moved > 1e-3
    rows = [json.loads(line) for line in (tmp_path / "deployed" / "metrics.jsonl").read_text().splitlines()]
    hidden = hides_participation(wanted.plan)
    assert [row.get("clients") for row in rows] == [None if hidden else row["clients"] for row in run.metrics]
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in run.metrics]
    assert [row.get("clip") for row in rows] == pytest.approx([row.get("clip") for row in run.metrics])


def test_a_network_of_fixed_features_ends_in_the_simulators_model_too(grid: LocalGrid, tmp_path: Path) -> None:
    wanted = replace(experiment(), model=ModelSettings(network="linear"))
    run = train_experiment(wanted, tmp_path / "simulated", quiet=True)
    assert serve(grid, wanted, tmp_path / "deployed", settings(reproducible=True)).ended == "done"
    model, _ = load_tensors(tmp_path / "deployed" / "model.safetensors", "model-1")
    assert model.keys() == run.model.state_dict().keys()
    assert float(model["2.weight"].abs().max()) > 1e-3
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=1e-5)


def test_a_single_output_is_scored_as_in_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "single_output.py").write_text("from torch import nn\n\n\ndef network():\n    return nn.Linear(30, 1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = replace(experiment(method="nonprivate"), model=ModelSettings(network="single_output:network"))
    policy = replace(OPEN, allow_custom_network=True)
    nodes = make_nodes(tmp_path, policy, loss=F.binary_cross_entropy_with_logits)
    serve(LocalGrid(nodes), wanted, tmp_path / "run", settings(reproducible=True), F.binary_cross_entropy_with_logits)
    splits = load_splits(wanted, quiet=True)
    run = simulate(
        network_of(wanted, splits), deal_out(wanted, splits), wanted.plan, loss=F.binary_cross_entropy_with_logits
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in run.metrics]
    assert rows[-1]["accuracy"] > 0.8  # the commoner class is .63 of them


def test_the_ledgers_of_server_and_clients_agree_with_the_simulators(grid: LocalGrid, tmp_path: Path) -> None:
    wanted = experiment()
    train_experiment(wanted, tmp_path / "simulated", quiet=True)
    serve(grid, wanted, tmp_path / "deployed", settings(reproducible=True))
    ours, theirs = (Ledger.open(tmp_path / name / "ledger.jsonl") for name in ("deployed", "simulated"))
    # A server does not believe how many records its clients say they hold: any number from the fewest on.
    assert ours.population == theirs.population | {"sizes": None}
    assert [charge.clients.tolist() for charge in ours.charges] == [charge.clients.tolist() for charge in theirs.charges]
    for number, times in enumerate(ours.participations().tolist()):
        with ClientLedger.held(tmp_path / f"client-{number}") as ledger:
            assert [len(each.releases) for each in ledger.tasks.values()] == [times]


def test_without_reproducibility_no_two_runs_are_alike_and_no_seed_is_published(grid: LocalGrid, tmp_path: Path) -> None:
    models = []
    for name in ("first", "second"):
        serve(grid, experiment(), tmp_path / name, settings())
        models.append(load_tensors(tmp_path / name / "model.safetensors", "model-1")[0])
        assert Ledger.open(tmp_path / name / "ledger.jsonl").noise == "secure"
        task = json.loads((tmp_path / name / "task.json").read_text())
        assert "seed" not in task["plan"]
        assert task["plan"]["secure_noise"] is True
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])
