"""The benchmark of memory, with short sequences."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import sequence_memory


def test_peaks_are_measured_beside_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["sequence_memory", "--tokens", "16", "--commit", "abc", "--out", str(out)])
    sequence_memory.main()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6
    for row in rows:
        assert 0.05 < row["share"] <= 1, row
    one, four, parts = (row["peak_mb"] for row in rows[:3])
    assert one < parts < four  # eight examples in parts of two
