"""A sample of the sabotage study: each broken mechanism is caught by an audit, and the honest one by none."""

from __future__ import annotations

import copy

import pytest

from benchmarks.audit_sabotages import SABOTAGES, as_they_must, study


@pytest.mark.slow
def test_each_sabotage_is_caught_and_the_honest_mechanism_is_not() -> None:
    said: list[str] = []
    told = study(seeds=2, trials=200_000, say=said.append)
    assert as_they_must(told)
    assert len(said) == 4
    caught = {name: each["caught_by"] for name, each in told["sabotages"].items()}
    assert list(caught) == list(SABOTAGES)
    for name in ("no noise on one layer", "no clipping under momentum"):
        assert {"update", "server"} <= set(caught[name]["one-run"])
    assert "example" in caught["σ halved"]["repeated"]
    for change in ("missed", "accused"):  # the verdict can be the other one
        other = copy.deepcopy(told)
        if change == "missed":
            other["sabotages"]["σ halved"]["caught_by"] = {"one-run": [], "repeated": []}
        else:
            other["honest"]["exceeded"] = 1
        assert not as_they_must(other)
