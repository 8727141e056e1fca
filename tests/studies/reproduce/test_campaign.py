"""In which order and next to which others cells are measured, and which are not measured because their training is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedcdp.studies.reproduce import runner
from fedcdp.studies.reproduce.catalogue import Place, Table
from fedcdp.studies.reproduce.runner import Campaign, CellTask, TableResults, Trainings

SMALL: dict[str, Any] = {
    "title": "Small", "layout": "accuracy",
    "every": {"data": {"dataset": "cancer", "clients": 5000}, "plan": {"method": "nonprivate"}, "rates": [0.1]},
    "axes": {"per_round": {"2000": {"plan": {"per_round": 2000}}, "4000": {"plan": {"per_round": 4000}}}},
}  # fmt: skip


def results(tmp_path: Path, name: str, **changes: Any) -> TableResults:
    return TableResults(Table(name, SMALL | changes), tmp_path)


def tasks(tmp_path: Path, name: str = "small", **changes: Any) -> list[CellTask]:
    found = results(tmp_path, name, **changes)
    return [CellTask(found, cell) for cell in found.table.cells.values()]


def campaign(tmp_path: Path, tasks_: list[CellTask], device: str = "cpu") -> tuple[Campaign, list[str]]:
    told: list[str] = []
    place = Place(tmp_path, run={"device": device})
    return Campaign(tasks_, place, Trainings([]), lambda task, _: told.append(task.name)), told


def test_a_full_gpu_gets_no_further_training(tmp_path: Path) -> None:
    small, large = tasks(tmp_path)
    on_gpu, _ = campaign(tmp_path, [], "cuda")
    on_cpu, _ = campaign(tmp_path, [])
    assert on_gpu._may_join(large, [])
    assert on_gpu._may_join(large, [small])  # 2,000 do not fill it
    assert not on_gpu._may_join(small, [large])
    assert on_cpu._may_join(small, [large])
    (attack, *_) = tasks(tmp_path, every=SMALL["every"] | {"kind": "attack"})
    assert on_gpu._may_join(attack, [large])


def test_the_same_training_is_not_run_twice_at_a_time(tmp_path: Path) -> None:
    first, other = tasks(tmp_path)
    (same, *_) = tasks(tmp_path, "other")
    ready, _ = campaign(tmp_path, [])
    assert not ready._may_join(same, [first])
    assert ready._may_join(other, [first])
    (followed, *_) = tasks(tmp_path, every=SMALL["every"] | {"curves": ["accuracy"]})
    assert ready._may_join(followed, [first])  # it needs more than the result


def test_the_row_of_a_training_serves_whoever_asks_for_its_accuracy(tmp_path: Path) -> None:
    (followed, *_) = tasks(tmp_path, "followed", every=SMALL["every"] | {"curves": ["accuracy"]})
    (plain, other) = tasks(tmp_path)
    (choosing, *_) = tasks(tmp_path, every=SMALL["every"] | {"rates": [0.1, 0.2]})
    known = Trainings([])
    known.add(followed, {"accuracy": 0.5, "rate": 0.1, "curves": {"accuracy": []}})
    name = "followed: 2000"
    assert known.row_of(plain) == {"taken_from": name, "accuracy": 0.5, "rate": 0.1, "settings": plain.cell.settings}
    assert known.row_of(followed) is None  # its curves are not in the row of another
    assert known.row_of(other) is None
    assert known.row_of(choosing) is None
    known.add(choosing, {"accuracy": 0.6, "rate": 0.2})
    assert (known.row_of(choosing) or {})["accuracy"] == 0.6


def test_cells_on_older_code_serve_nobody_who_measures_again(tmp_path: Path) -> None:
    (plain, *_) = tasks(tmp_path)
    plain.results.keep(plain.cell, {"accuracy": 0.5, "rate": 0.1, "code": "old", "settings": plain.cell.settings})
    assert Trainings([plain.results]).row_of(plain) is not None
    assert Trainings([plain.results], again=True).row_of(plain) is None


@pytest.mark.parametrize(("seconds", "left"), [(60.0, 0), (0.0, 4)])
def test_what_must_be_alone_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, left: int) -> None:
    monkeypatch.setattr(runner, "measure", lambda *_: {"accuracy": 0.5, "rate": 0.1})
    several = [*tasks(tmp_path), *tasks(tmp_path, "timed", alone=True, every=SMALL["every"] | {"kind": "time"})]
    ready, told = campaign(tmp_path, several)
    ready.run(workers=1, seconds=seconds)
    assert len(ready.left) == left
    assert told == [] if left else told == ["timed: 2000", "timed: 4000", "small: 2000", "small: 4000"]


def test_a_failure_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr(runner, "measure", fail)
    ready, told = campaign(tmp_path, tasks(tmp_path))
    ready.run(workers=1, seconds=60)
    assert ready.failed == dict.fromkeys(told, "RuntimeError: no memory")
    assert len(told) == 2
