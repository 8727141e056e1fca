"""Pruned updates are smaller on the wire: bytes counted between a node and the server, TLS and all."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcdp.config.presets import Settings
from fedcdp.models.networks import build
from tests.support.counting_proxy import CountingProxy
from tests.support.flower_site import HAS_FLOWER, MNIST5K, RunningSite

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]


def _bytes_sent(place: Path, compression: float) -> int:
    plan: Settings = {"plan": {"rounds": 2, "local_steps": 2, "compression": compression}}
    with RunningSite(place, MNIST5K, plan, nodes=1) as site, CountingProxy(site.port) as proxy:
        site.start_server()
        site.register()
        site.start_node(1, FEDCDP_SERVER=f"127.0.0.1:{proxy.port}")
        assert site.finish(site.start_job()) == "finished:completed"
        assert site.outcome() == "done"
        return proxy.sent


def test_pruned_updates_are_smaller_on_the_wire(tmp_path: Path) -> None:
    weights = sum(p.numel() for p in build("cnn", (1, 28, 28), 10).parameters())
    whole, pruned = _bytes_sent(tmp_path / "whole", 0.0), _bytes_sent(tmp_path / "pruned", 0.9)
    print(f"{weights} weights, 2 rounds: a node sent {whole} bytes; with 90 % pruned, {pruned}")
    assert whole > 2 * 4 * weights
    # What is left: a tenth of the values, a bit for each place, and what Flower says besides.
    assert whole - pruned > 0.8 * 2 * 4 * weights
