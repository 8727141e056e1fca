"""The benchmark of transformers and ResNet-18, with small networks of the same layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import sequences
from benchmarks.sequence_networks import Transformer, resnet18


@pytest.mark.slow
def test_every_way_of_fedcdp_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["sequences", "--size", "tiny", "--turns", "1", "--commit", "abc", "--out", str(out)])
    sequences.main()
    found = json.loads(out.read_text())
    assert found["commit"] == "abc"
    assert len(found["networks"]) == 3
    for network in found["networks"].values():
        for name, way in network["ways"].items():
            assert ("missing" in way) <= name.startswith("Opacus"), way  # Opacus need not be installed
            assert "missing" in way or way["ms_a_client_step"]["median"] > 0


def test_the_networks_have_the_sizes_of_their_names() -> None:
    def size(network: torch.nn.Module, trained: bool) -> int:
        return sum(p.numel() for p in network.parameters() if p.requires_grad is trained)

    base = {"layers": 2, "width": 768, "heads": 12, "words": 10, "tokens": 4}
    block = 12 * 768**2 + 13 * 768  # of GPT-2 and BERT
    adapted = Transformer(**base, rank=8)
    assert size(adapted, trained=True) == 2 * 8 * (768 + 3 * 768)
    assert size(adapted, trained=False) == 2 * block + 2 * 10 * 768
    assert size(Transformer(**base, bottleneck=64, classes=2), trained=True) == 4 * (2 * 64 * 768 + 64 + 768) + 2 * 769
    assert size(resnet18(), trained=True) == pytest.approx(11.17e6, rel=2e-3)
