"""A deployment of a table with named, unequal clients ends in the simulator's model: real processes, TLS, one logit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedcdp.files.tensors import load_tensors
from fedcdp.training.rundir import RunDirectory
from tests.cli.conftest import Start
from tests.support.flower_site import HAS_FLOWER, largest_difference, left_of, simulated
from tests.support.hospital_table import SIZES, write_site

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]


def test_nodes_that_read_their_own_tables_give_the_simulators_model(tmp_path: Path, start: Start) -> None:
    """Private scaling included: the noised moments are exchanged before the first round."""
    site, wanted = write_site(tmp_path, rounds=2, weighting="records", scaling_noise=5.0)
    running = start("-m", "fedcdp", "deploy", "up", site.path, "--json")
    stdout, stderr = running.communicate(timeout=600)
    assert running.returncode == 0, stderr
    told = json.loads(stdout)
    assert (told["rounds"], told["ended"]) == (2, "done")
    assert {"auroc", "balanced_accuracy", "f1"} < told["metrics"].keys()
    run = RunDirectory(site.run)
    assert largest_difference(load_tensors(run.model, "model-1")[0], simulated(wanted)) < 1e-6
    assert [row["clients"] for row in run.read_metrics()] == [4, 4]
    assert [row["client"] for row in run.read_scores(2)[1]] == sorted(SIZES)
    assert [each["client"] for each in json.loads((run.path / "clients.json").read_text())["clients"]] == sorted(SIZES)
    assert {path.name for path in site.logs.glob("node-*.log")} == {f"{node.name}.log" for node in site.nodes(4)}
    assert left_of(site.path) == []
