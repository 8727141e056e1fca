"""Loggers with the real packages, offline: what MLflow and Weights & Biases stored is read back (`make integrations`)."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedcdp
from tests.support.logged import federation_of, plan_of, shown_rows

AGAINST: dict[str, Any] = {"adversary": "model", "unit": "client"}  # the row that both plans have


@pytest.fixture(params=["shown", "hidden"])
def plan(request: pytest.FixtureRequest) -> fedcdp.Plan:
    return plan_of(hides_time=request.param == "hidden")


def test_mlflow_has_the_rows_and_the_plan(tmp_path: Path, plan: fedcdp.Plan) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    logger = fedcdp.loggers.MLflowLogger(uri, experiment="hospitals", run_name="first", epsilon_every=2)
    run = fedcdp.simulate(nn.Linear(3, 2), federation_of(), plan, **AGAINST, progress=logger, most_releases=3)
    client = mlflow.MlflowClient(tracking_uri=uri)
    for rounds in (3, 5):
        finished = run if rounds == 3 else run.resume()
        assert finished.rounds == rounds
        assert logger.run_id is not None
        stored = client.get_run(logger.run_id)
        assert (stored.info.run_name, stored.info.status) == ("first", "FINISHED")
        assert stored.data.params["plan.noise_multiplier"] == str(plan.noise_multiplier)
        assert "plan.seed" not in stored.data.params
        for name, values in shown_rows(finished).items():
            history = client.get_metric_history(logger.run_id, name)
            assert {each.step: each.value for each in history} == pytest.approx(values)
        epsilons = {each.step: each.value for each in client.get_metric_history(logger.run_id, "epsilon")}
        assert epsilons.keys() == ({2} if rounds == 3 else {2, 4, 5})
        assert stored.data.metrics["final_accuracy"] == pytest.approx(finished.accuracy)
    assert epsilons[5] == pytest.approx(finished.privacy().row(**AGAINST).epsilon)
    assert bool({"clients", "seconds"} & stored.data.metrics.keys()) != finished.hides_time


def records_in(path: Path) -> Iterator[Any]:
    """The records of a small W&B file: a header of 7 bytes, then records behind a checksum, their length and a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at = path.read_bytes(), 7
    assert len(content) < 2**15  # one block
    while at < len(content):
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        assert kind == 1
        yield Record.FromString(content[at + 7 : at + 7 + length])
        at += 7 + length


def finished_records(path: Path) -> list[Any]:
    """All records. W&B's service may write the file a moment after the run has finished."""
    for _ in range(100):
        records = list(records_in(path))
        if records and records[-1].HasField("exit"):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def test_wandb_has_the_rows_and_the_plan(tmp_path: Path, plan: fedcdp.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = fedcdp.loggers.WandbLogger("hospitals", name="first", mode="offline", directory=tmp_path, epsilon_every=2)
    run = fedcdp.simulate(nn.Linear(3, 2), federation_of(), plan, **AGAINST, progress=logger)
    [path] = tmp_path.rglob("*.wandb")
    records = finished_records(path)
    rows: list[dict[str, Any]] = []
    for record in records:
        assert not record.HasField("stats")
        assert not record.HasField("output_raw")
        if record.HasField("history"):
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    for name, values in shown_rows(run).items():
        assert {row["_step"]: row[name] for row in rows if name in row} == pytest.approx(values)
    assert {row["_step"] for row in rows if "epsilon" in row} == {2, 4, 5}
    config = {item.key: item.value_json for record in records for item in record.run.config.update}
    assert json.loads(config["plan"])["noise_multiplier"] == plan.noise_multiplier
    assert "seed" not in json.loads(config["plan"])
