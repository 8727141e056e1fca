"""A federation over real processes: a node is killed and started at once, one gets a new key, and one joins.

All of it is watched, and every ledger is right at the end.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from fedcdp.accounting.ledger import Ledger
from fedcdp.config.presets import Settings
from fedcdp.deploy.site.flower_commands import free_ports
from tests.support.flower_site import HAS_FLOWER, RunningSite, scraped, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]

PLAN: Settings = {
    "data": {"dataset": "cancer", "partition": "iid"},
    "plan": {"method": "fed-cdp", "rounds": 20, "local_steps": 2, "noise_multiplier": 1.0, "learning_rate": 0.05},
}
PATIENCE: dict[str, int | float] = {"round-timeout": 60.0, "min-clients": 2, "joining": True, "smallest-records": 10}


def test_a_federation_lives_through_a_crash_a_new_key_and_a_new_node(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    server_port, node_port, again_port = free_ports(3)
    with RunningSite(tmp_path / "site", PLAN, nodes=3, server=PATIENCE) as site:
        joining = site.site.node(3)
        site.expect_clients(2)
        (joining.path / "operate.toml").write_text('log-format = "json"\nlog-file = "node.jsonl"\n')
        site.start("superlink", "start-superlink.sh", FEDCDP_MONITOR=f"127.0.0.1:{server_port}")
        wait_until(lambda: _answers(server_port), "the server to be watched")
        wait_until(lambda: "Uvicorn running" in site.log("superlink"), "the server to listen")
        site.register()
        site.start_node(1, FEDCDP_MONITOR=f"127.0.0.1:{node_port}")
        site.start_node(2)
        job = site.start_job()
        site.wait_for_rounds(1)

        site.kill(site.nodes[1])  # and started at once: the server still counts it as connected
        site.start_node(1, FEDCDP_MONITOR=f"127.0.0.1:{again_port}")
        site.start_node(3, FEDCDP_MONITOR="")
        wait_until(lambda: "starting it again" in site.log("node-1"), "the refused node to be started again")
        wait_until(lambda: Ledger.open(site.run.ledger).members == 3, "the third node to join", 480.0)
        wait_until(lambda: scraped(again_port)["fedcdp_process_restarts_total"] > 0, "another start")
        wait_until(lambda: "SuperNode ID" in site.log("node-1").rpartition("starting it again")[2], "the node to be back")

        before = len(site.releases(2))
        site.rotate_key(2)
        assert site.finish(job) == "finished:completed"
        assert site.outcome() == "done"

        charges, figures = site.charges(), scraped(server_port)
        assert figures["fedcdp_rounds"] == figures["fedcdp_releases"] == len(charges) == 20
        assert figures["fedcdp_clients"] == 3
        assert figures['fedcdp_run_ended{how="done"}'] == 1
        assert sum(value for name, value in figures.items() if name.startswith("fedcdp_left_out_total")) > 0
        assert scraped(again_port)["fedcdp_node_releases"] == len(site.releases(1))
        for number in (1, 2, 3):
            counted = [charge[:2] for charge in charges if site.client_of(number) in charge[2]]
            assert set(site.releases(number)) <= set(counted)
            assert site.releases(number), "it took part"
        assert len(site.releases(2)) > before, "it took part under its new key"
        log = joining.path / "node.jsonl"
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert any("took part in round" in json.loads(line)["message"] for line in log.read_text().splitlines())


def _answers(port: int) -> bool:
    try:
        return scraped(port)["fedcdp_process_running"] == 1
    except OSError:
        return False
