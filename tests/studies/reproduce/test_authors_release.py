"""Training as the authors' released program does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedcdp
from fedcdp.errors import PlanError
from fedcdp.studies.reproduce import authors_release
from fedcdp.studies.reproduce.catalogue import Cell, Place
from fedcdp.studies.reproduce.runner import measure
from fedcdp.training.rundir import State

SETTINGS: dict[str, Any] = {
    "kind": "release",
    "data": {"dataset": "mnist5k", "clients": 10, "records": 400},
    "model": {"network": "small"},
    "plan": {"method": "nonprivate", "per_round": 2, "rounds": 8, "local_steps": 20},
    "rates": [0.05],
}


def accuracy(**changes: Any) -> float:
    row = measure("table", Cell("small", "small", "", SETTINGS | changes), Place(Path("nowhere")))
    assert row["command"] == "fedcdp reproduce table --cells small"
    return float(row["accuracy"])


def test_all_weights_grow_when_one_client_fewer_is_divided_by() -> None:
    state = authors_release.grown(State(3, {"w": torch.tensor([1.0, -2.0])}, None), per_round=5)
    assert state.weights["w"].tolist() == [1.25, -2.5]
    assert state.round == 3


def test_ranges_cut_the_records_in_the_order_of_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authors_release, "RANGE", 350)  # of 4,000 digits, about 400 of each class
    splits = fedcdp.load("mnist5k")
    found = authors_release.federation(splits, clients=10, records=400, seed=0)
    place = torch.empty(4000, dtype=torch.int64)
    place[splits.train.targets.argsort(stable=True)] = torch.arange(4000)
    held = [torch.from_numpy(found.indices(client)) for client in range(10)]
    assert sorted(torch.cat(held).tolist()) == list(range(4000))
    assert all(len((place[each] // 350).unique()) <= 3 for each in held)  # two, where the ranges have whole shares
    assert max(len(splits.train.targets[each].unique()) for each in held) > 2
    assert torch.equal(found.train.targets, splits.train.targets)


def test_the_growth_changes_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authors_release, "RANGE", 400)
    assert accuracy(growth=False) != accuracy()


def test_a_single_client_is_refused() -> None:
    with pytest.raises(PlanError, match="two clients"):
        accuracy(plan=SETTINGS["plan"] | {"per_round": 1})
