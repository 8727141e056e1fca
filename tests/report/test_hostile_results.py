"""Results of an attack that somebody else may have written: a page about them, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcdp
from fedcdp.errors import RunError

SUMMARY = {"method": "fed-cdp", "leak": "type2", "attack": "cpl", "dataset": "mnist5k", "examples": 2, "steps": 1,
           "recognisable_rate": 0.5, "success_rate": 0.0}  # fmt: skip
IMAGE = np.zeros((1, 2, 1, 4, 4), np.float32)
ARRAYS: dict[str, Any] = {
    "seed": IMAGE, "reconstruction": IMAGE, "iterations": np.array([9]), "value_range": np.array([0.0, 1.0]),
    "snapshot_at": np.array([1]), "snapshot": IMAGE[None],
}  # fmt: skip


def page_of(place: Path, summary: dict[str, Any], arrays: dict[str, Any]) -> str:
    place.mkdir()
    (place / "summary.json").write_text(json.dumps(summary))
    np.savez_compressed(place / "reconstructions.npz", **arrays)
    return fedcdp.report(place, place / "page.html").read_text(encoding="utf-8")


def test_sound_results_are_shown(tmp_path: Path) -> None:
    assert "Fed-CDP" in page_of(tmp_path / "leak", SUMMARY, ARRAYS)


@pytest.mark.parametrize("changed", [
    {"method": 3}, {"dataset": ["mnist"]}, {"examples": 10**400}, {"examples": 1e300}, {"steps": "many"},
    {"recognisable_rate": -1}, {"success_rate": {}},
], ids=str)  # fmt: skip
def test_figures_that_no_attack_writes_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"summary\.json is not what fedcdp attack writes"):
        page_of(tmp_path / "leak", SUMMARY | changed, ARRAYS)


@pytest.mark.parametrize(("name", "array"), [
    ("seed", IMAGE[0]), ("snapshot", IMAGE), ("snapshot_at", np.array([np.inf])), ("iterations", np.array([])),
    ("value_range", np.array(["a", "b"])), ("reconstruction", IMAGE.astype("c8")),
], ids=["seed", "snapshot", "endless", "no iterations", "text", "complex"])  # fmt: skip
def test_arrays_that_no_attack_writes_are_refused(name: str, array: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"reconstructions\.npz is damaged, or not what fedcdp attack writes"):
        page_of(tmp_path / "leak", SUMMARY, ARRAYS | {name: array})


@pytest.mark.slow
def test_arrays_are_not_unpacked_beyond_a_bound(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="unpacks to"):
        page_of(tmp_path / "leak", SUMMARY, ARRAYS | {"seed": np.zeros((1, 2, 1, 2**13, 2**13), np.float32)})


def test_a_text_that_no_file_can_hold_is_shown_without_what_cannot_be_written(tmp_path: Path) -> None:
    text = page_of(tmp_path / "leak", SUMMARY | {"attack": "\ud800<script>evil"}, ARRAYS)
    assert "?&lt;script&gt;evil" in text
    assert "<script>evil" not in text
