"""Machines that fail: a node killed in a round, and the server killed between rounds and in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcdp.config.presets import Settings
from tests.support.flower_site import (
    CANCER,
    HAS_FLOWER,
    REPRODUCIBLE,
    RunningSite,
    largest_difference,
    simulated,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]

LONG_ROUNDS: Settings = {"plan": {"local_steps": 400, "learning_rate": 0.002}}  # long enough to be killed in


def test_a_node_killed_in_a_round_is_left_out_and_the_round_completes_with_the_rest(tmp_path: Path) -> None:
    patience: dict[str, int | float] = {"round-timeout": 45.0, "min-clients": 2}
    with RunningSite(tmp_path / "site", CANCER, REPRODUCIBLE, LONG_ROUNDS, nodes=3, server=patience) as site:
        site.start_all()
        job = site.start_job()
        wait_until(lambda: (1, 0) in site.releases(3), "node 3 to be in round 2")
        site.kill(site.nodes[3])
        assert site.finish(job) == "finished:completed"
        assert site.outcome() == "done"
        assert [row["clients"] for row in site.run.read_metrics()] == [3, 2, 2]
        assert "is left out" in site.log("run")
        # The cost of what was asked for is counted, whether it came back or not.
        assert [clients for _, _, clients in site.charges()] == [[0, 1, 2]] * 3
        heard = [[0, 1, 2], [0, 1], [0, 1]]
        assert largest_difference(site.model(), simulated(site.experiment, heard)) < 1e-5


def test_a_killed_server_goes_on_with_the_same_run_and_no_ledger_counts_too_little(tmp_path: Path) -> None:
    rounds: Settings = {"plan": {"rounds": 4}}
    with RunningSite(tmp_path / "site", CANCER, LONG_ROUNDS, rounds, server={"round-timeout": 90.0}) as site:
        site.start_all()
        site.start_job()
        site.wait_for_rounds(1)
        assert site.server is not None
        site.kill(site.server)  # between rounds, or as good as: the server, and all that it started, at once

        site.start_server()
        site.start_job()
        wait_until(lambda: site.rounds() >= 2 and max(site.releases(1)) > (1, 9), "node 1 to be in round 3")
        site.kill(site.server, wholly=False)  # in a round: the server alone; what it started has to notice

        site.start_server()
        assert site.finish(site.start_job()) == "finished:completed"
        assert site.outcome() == "done"
        assert [row["round"] for row in site.run.read_metrics()] == [1, 2, 3, 4]
        charges = site.charges()
        assert {round_ for round_, _, _ in charges} == {0, 1, 2, 3}
        for number in (1, 2):
            client = site.client_of(number)
            counted = [(round_, attempt) for round_, attempt, clients in charges if client in clients]
            released = site.releases(number)
            assert released == sorted(set(released)), "a client releases each round's attempt once"
            assert set(released) <= set(counted), "the server's ledger has whatever a client released"
            assert len(released) >= 4, "the client's ledger has whatever the model contains"
        assert all(node.status is None for node in site.nodes.values()), "nodes outlive their server"
