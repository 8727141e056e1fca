"""Clients that read their own tables: the simulator's model for every task, and nothing trained on another meaning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from fedcdp.data.dataset import Dataset
from fedcdp.data.table_schema import TableSchema
from fedcdp.deploy.protocol import messages
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.local_round import records_of
from fedcdp.deploy.protocol.roster import load_roster
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.protocol.task import Task
from fedcdp.errors import DataError, FedcdpError, TaskError
from fedcdp.files.tensors import load_tensors
from fedcdp.training.prepared import deal_out, load_splits
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.simulate import train_experiment
from tests.support.hospital_table import SIZES, nodes_of, write_site
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
