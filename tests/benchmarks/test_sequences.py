"""The benchmark of transformers and ResNet-18, with small networks of the same layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def test_what_fails_is_stored_and_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large() -> torch.nn.Module:
        raise torch.OutOfMemoryError("out of memory")

    turns = 0

    def dies(*_: Any) -> Any:
        def step() -> None:
            nonlocal turns
            turns += 1
            if turns > sequences._WARM_UPS + 1:
                raise torch.OutOfMemoryError("out of memory, later")

        return step

    subject = sequences.Subject(lambda: Transformer(1, 8, 1, words=9, tokens=4, rank=1), sequences.next_words, 1, 1, (4,), 9)
    broken = sequences.Subject(too_large, sequences.next_words, 1, 1, (4,), 9)
    ways = {
        "without privacy": sequences.WAYS["without privacy"],
        "Fed-CDP, recorded": dies,
        "Opacus": lambda *_: lambda: None,
    }
    monkeypatch.setattr(sequences, "WAYS", ways)
    monkeypatch.setattr(sequences, "subjects", lambda size: {"broken": broken, "works": subject})  # noqa: ARG005
    monkeypatch.setattr(sys, "argv", ["sequences", "--turns", "3", "--commit", "abc", "--out", str(tmp_path / "found.json")])
    sequences.main()
    found = json.loads((tmp_path / "found.json").read_text())["networks"]
    assert "out of memory" in found["broken"]["missing"]
    assert found["works"]["ways"]["Fed-CDP, recorded"] == {"missing": "OutOfMemoryError: out of memory, later"}
    assert found["works"]["ways"]["without privacy"]["ms_a_client_step"]["median"] > 0
    assert "time_times_nonprivate" not in found["works"]["compared"]


def test_ways_are_compared_by_the_fastest_of_each_kind() -> None:
    seconds = {"without privacy": [2.0, 2.0], "without privacy, functional": [1.0, 1.0], "Fed-CDP, recorded": [1.5, 1.5],
               "Opacus, ghost": [3.0, 3.0], "Opacus, hooks": [9.0, 9.0]}  # fmt: skip
    peaks = {"without privacy": 7, "without privacy, functional": 10, "Fed-CDP, recorded": 12}
    found = sequences.compared(seconds, peaks)
    assert found["time_times_nonprivate"]["median"] == 1.5
    assert found["memory_times_nonprivate"] == 1.2
    assert found["opacus_times_ours"]["median"] == 2


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
