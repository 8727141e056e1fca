"""A hostile client changes nothing but the log: NaN, a wrong shape, a huge update, an old round again, a breakdown."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcdp.config.presets import Settings
from tests.support.flower_site import CANCER, HAS_FLOWER, REPRODUCIBLE, RunningSite, largest_difference, simulated

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]

SAID = ("not finite", "has the shape", "too large", "stale", "failed with Flower's error")


def test_a_hostile_client_changes_nothing_but_the_log(tmp_path: Path) -> None:
    rounds: Settings = {"plan": {"rounds": len(SAID)}}
    with RunningSite(tmp_path / "site", CANCER, REPRODUCIBLE, rounds, nodes=3, server={"round-timeout": 120.0}) as site:
        site.use_client("tests.support.hostile_client:client")
        site.start_all(node_3={"FEDCDP_TEST_HOSTILE": "yes"})
        assert site.finish(site.start_job()) == "finished:completed"
        assert site.outcome() == "done"
        lines = [line for line in site.log("run").splitlines() if "is left out" in line]
        for number, (line, said) in enumerate(zip(lines, SAID, strict=True), start=1):
            assert f"round {number}: client 2 " in line
            assert said in line
        heard = [[0, 1]] * len(SAID)
        assert [row["clients"] for row in site.run.read_metrics()] == [2] * len(SAID)
        assert largest_difference(site.model(), simulated(site.experiment, heard)) < 1e-5
