"""Secure sums over real processes and TLS: nodes that give the simulator's model, and one that is killed in a round."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedcdp.config.presets import Settings
from tests.support.flower_site import (
    HAS_FLOWER,
    REPRODUCIBLE,
    RunningSite,
    largest_difference,
    simulated,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]

SUM: Settings = {
    "data": {"dataset": "cancer", "partition": "iid"},
    "plan": {"rounds": 8, "secure_aggregation": True, "noise_multiplier": 1.0, "learning_rate": 0.05, "batch_size": 40},
}
_REFUSED_SECONDS = 65.0  # Flower considers a killed node connected for a minute


def test_under_a_published_seed_nodes_give_the_simulators_model(tmp_path: Path) -> None:
    with RunningSite(tmp_path / "site", SUM, REPRODUCIBLE, {"plan": {"rounds": 3}}, nodes=3) as site:
        site.start_all()
        assert site.finish(site.start_job()) == "finished:completed"
        wanted = site.experiment
        alone = replace(wanted, run=replace(wanted.run, chunk=1))  # the shapes of a client's own matrix products
        assert largest_difference(site.model(), simulated(alone)) == 0


def test_a_node_that_dies_in_a_round_costs_an_attempt_and_comes_back(tmp_path: Path) -> None:
    patience: dict[str, int | float] = {"round-timeout": 60.0, "min-clients": 3}
    with RunningSite(tmp_path / "site", SUM, nodes=5, server=patience) as site:
        site.start_all()
        job = site.start_job()
        wait_until(lambda: site.supervisor.reap() or site.rounds() >= 1, "round 1", 480.0)
        site.kill(site.nodes[5])
        killed = time.monotonic()
        away = site.client_of(5)
        wait_until(lambda: any(attempt for _, attempt, _ in site.charges()), "an attempt without the node")
        time.sleep(max(0.0, killed + _REFUSED_SECONDS - time.monotonic()))
        site.start_node(5)
        assert site.finish(job) == "finished:completed"
        assert site.outcome() == "done"
        charges = site.charges()
        again = next(place for place, (_, attempt, _) in enumerate(charges) if attempt)
        assert charges[again - 1][2] == [0, 1, 2, 3, 4]
        assert charges[again][2] == [number for number in range(5) if number != away]
        assert charges[-1][2] == [0, 1, 2, 3, 4], "the node is back"
        rows = site.run.read_metrics()
        assert [row["round"] for row in rows] == list(range(1, 9))
        assert all(row["clients"] >= 4 for row in rows)
        for number in range(1, 6):
            counted = [charge[:2] for charge in charges if site.client_of(number) in charge[2]]
            released = site.releases(number)
            assert released == sorted(set(released))
            assert set(released) <= set(counted)
            lines = [json.loads(each) for each in (site.site.node(number).state / "ledger.jsonl").read_text().splitlines()]
            assert {line["members"] for line in lines if "summed" in line} == ({5} if number == 5 else {4, 5})
            assert not list(site.site.node(number).state.glob("sum-*")), "run keys are deleted at the end"
