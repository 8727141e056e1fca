"""Who is not let in: a node whose key nobody registered, and a node that does not speak TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcdp.deploy.site.certificates import new_node_key
from tests.support.flower_site import CANCER, HAS_FLOWER, RunningSite, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]


def test_a_node_with_an_unknown_key_and_a_node_without_tls_are_refused(tmp_path: Path) -> None:
    with RunningSite(tmp_path / "site", CANCER) as site:
        site.start_server()
        site.register()
        stranger = site.site.node(1)
        stranger.key.write_bytes(new_node_key().private)
        unknown = site.start_node(1)
        wait_until(lambda: unknown.status is not None, "the stranger to give up")
        assert unknown.status != 0
        assert "305" in site.log("node-1") or "Failed to initialize the connection" in site.log("node-1")

        script = site.site.path / "start-node-2.sh"
        lines = [
            line for line in script.read_text().splitlines() if "--root-certificates" not in line and "--auth" not in line
        ]
        script.write_text("\n".join(lines).replace(' "${trusted[@]}"', ' "${trusted[@]}" --insecure --max-retries 2'))
        plain = site.start_node(2)
        wait_until(lambda: plain.status is not None, "the node without TLS to give up")
        assert plain.status != 0

        assert site.server is not None
        assert site.server.status is None, "the server must survive its visitors"
