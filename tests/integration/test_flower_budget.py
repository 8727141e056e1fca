"""A client at its budget declines, whatever the server asks; with too few left the run ends, cleanly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedcdp.deploy.site.directory import SiteSettings
from fedcdp.deploy.site.writer import epsilon_of, experiment_for, write
from fedcdp.training.rundir import RunDirectory
from tests.cli.conftest import Start
from tests.support.flower_site import CANCER, HAS_FLOWER, left_of

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]


def test_clients_stop_at_their_budget_and_the_run_ends_cleanly(tmp_path: Path, start: Start) -> None:
    experiment = experiment_for(2, [CANCER, {"plan": {"rounds": 5}}])
    enough_for_two = (epsilon_of(experiment, 2) + epsilon_of(experiment, 3)) / 2
    site = write(tmp_path / "site", SiteSettings(), experiment, enough_for_two, {"subscribe-timeout": 30.0})
    for _ in range(2):  # the second time they decline from the start
        process = start("-m", "fedcdp", "deploy", "up", site.path, "--json")
        stdout, stderr = process.communicate(timeout=600)
        assert process.returncode == 0, stderr
        assert json.loads(stdout)["ended"] == "too-few-clients"
        for node in site.nodes(2):
            lines = [json.loads(line) for line in (node.state / "ledger.jsonl").read_text().splitlines()]
            assert [line["round"] for line in lines if "released" in line] == [0, 1]
        assert [row["clients"] for row in RunDirectory(site.run).read_metrics()][:3] == [2, 2, 0]
        assert left_of(site.path) == []
    assert "declines" in (site.logs / "run.log").read_text()
