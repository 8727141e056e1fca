"""The choice of engine and chunk: what may be chosen, what is fastest, and a cache that is trusted if it makes sense."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcdp.engine import BatchedEngine, FunctionalEngine
from fedcdp.engine.batched import engines_for
from fedcdp.errors import PlanError
from fedcdp.training.autotune import Choice, chunks_up_to, fastest, machine, remembered

KNOWN = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
UNKNOWN = nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))


def test_a_known_network_may_use_either_engine_and_the_batched_one_comes_first():
    engines = engines_for(KNOWN, F.cross_entropy)
    assert [type(engine) for engine in engines.values()] == [BatchedEngine, FunctionalEngine]
    assert list(engines_for(KNOWN, F.cross_entropy, "batched")) == ["batched"]
    assert list(engines_for(KNOWN, F.cross_entropy, "compiled")) == ["batched"]
    assert list(engines_for(KNOWN, F.cross_entropy, "kernel")) == ["batched"]
    assert list(engines_for(KNOWN, F.cross_entropy, "functional")) == ["functional"]


@pytest.mark.parametrize(("name", "level"), [("auto", logging.INFO), ("batched", logging.WARNING)])
def test_an_unknown_layer_is_left_to_the_reference_and_one_line_names_it(caplog, name, level):
    with caplog.at_level(logging.INFO, logger="fedcdp"):
        engines = engines_for(UNKNOWN, F.cross_entropy, name)
    assert list(engines) == ["functional"]
    assert [record.levelno for record in caplog.records] == [level]
    assert "layer 1 is PReLU" in caplog.text


def test_another_name_is_refused():
    with pytest.raises(
        PlanError, match="engine: 'nosuch' is not one of auto, kernel, compiled, batched, recorded, functional"
    ):
        engines_for(KNOWN, F.cross_entropy, "nosuch")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "best", [Choice("batched", 4), Choice("batched", 16), Choice("batched", 256), Choice("functional", 64)]
)
def test_the_fastest_is_found(best):
    def seconds(engine: str, chunk: int) -> float:
        return (2.0 if engine != best.engine else 1.0) * (1 + abs(best.chunk - chunk) / 100)

    assert fastest(["batched", "functional"], chunks_up_to(1000, torch.device("cpu")), seconds) == best


def test_a_search_ends_where_it_gets_slower():
    asked: list[int] = []

    def seconds(_: str, chunk: int) -> float:
        asked.append(chunk)
        return float(chunk)

    assert fastest(["batched"], [16, 4, 64, 256], seconds) == Choice("batched", 4)
    assert asked == [16, 64, 4]


@pytest.mark.parametrize("most", [1, 3, 10, 100, 10**6])
def test_no_chunk_is_larger_than_what_fits(most):
    chunks = chunks_up_to(most, torch.device("cpu"))
    assert max(chunks) <= most
    assert len(set(chunks)) == len(chunks) > 0


def test_a_measurement_is_made_once():
    what = machine(torch.device("cpu")) | {"network": "a"}
    assert remembered(what, lambda: Choice("batched", 7)) == Choice("batched", 7)
    assert remembered(what, lambda: pytest.fail("measured again")) == Choice("batched", 7)
    assert remembered(what | {"network": "b"}, lambda: Choice("functional", 3)) == Choice("functional", 3)


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"{}", b'{"engine": "nosuch", "chunk": 4}', b'{"engine": "batched", "chunk": 0}',
                b'{"engine": "batched", "chunk": "4"}', b'{"engine": [], "chunk": 4}', b'{"engine": "batched", "chunk": 4}',
                b'{"engine": "batched", "chunk": 4, "seconds": NaN}'],
)  # fmt: skip
def test_what_cannot_be_read_is_measured_again(tmp_path: Path, content: bytes):
    remembered({"network": "a"}, lambda: Choice("batched", 7))
    (file,) = (tmp_path / "cache" / "engines").iterdir()
    file.write_bytes(content)
    assert remembered({"network": "a"}, lambda: Choice("batched", 8)) == Choice("batched", 8)
    assert json.loads(file.read_bytes())["chunk"] == 8


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "file"))
    assert remembered({"network": "a"}, lambda: Choice("batched", 7)) == Choice("batched", 7)
