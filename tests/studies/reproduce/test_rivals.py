"""The layouts that compare explanations of the printed accuracies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedcdp.errors import PlanError
from fedcdp.studies.reproduce.catalogue import Table, read, table
from fedcdp.studies.reproduce.layouts import sections

ROUNDS = Table("small", {
    "title": "Small", "layout": "rounds", "axes": {"method": {"plain": {}, "noisy": {}}, "population": {"A": {}, "B": {}}},
    "variants": {"slow": {}, "fast": {}}, "printed": {"plain/*": [0.5, 0.7], "noisy/*": [0.4, 0.6]},
})  # fmt: skip


def course(*accuracies: float) -> dict[str, Any]:
    return {"curves": {"accuracy": [[5 * (number + 1), value] for number, value in enumerate(accuracies)]}}


def test_the_number_of_rounds_that_fits_the_first_method_is_found() -> None:
    cells = {"plain/A/slow": course(0.3, 0.5, 0.9), "plain/B/slow": course(0.4, 0.8, 0.9),
             "noisy/A/slow": course(0.1, 0.2, 0.3), "noisy/B/slow": course(0.1, 0.4, 0.6)}  # fmt: skip
    (found,) = sections(ROUNDS, cells)  # not all cells of the other variant were measured
    assert found["title"] == "slow"
    rows = {row["rounds"]: row for row in found["rows"]}
    assert list(rows) == [5, "10, the best fit of plain", 15, "printed"]
    best = rows["10, the best fit of plain"]
    assert best["plain error"] == pytest.approx(0.05)
    assert best["noisy error"] == pytest.approx(0.2)
    assert (best["plain/A"], best["noisy/B"]) == (0.5, 0.4)
    assert rows["printed"]["noisy/A"] == 0.4


SMALL: dict[str, Any] = {
    "title": "Small", "layout": "rivals",
    "axes": {"method": {"plain": {}, "noisy": {}}, "population": {"K1-a": {}, "K2-b": {}}},
    "variants": {
        "paper": {}, "other": {"rows": ["noisy/*"], "otherwise": "paper"}, "partial": {"rows": ["*/K1-*"]},
        "fewer": {"rows": ["*/K1-*"], "otherwise": "other", "curves": ["accuracy"]},
    },
    "printed": {"plain/*": [0.5, 0.7], "noisy/*": [0.4, 0.6]},
}  # fmt: skip


def test_explanations_are_compared_over_the_cells_that_all_have() -> None:
    cells = {name: {"accuracy": value} for name, value in {
        "plain/K1-a/paper": 0.6, "plain/K2-b/paper": 0.7, "noisy/K1-a/paper": 0.1, "noisy/K2-b/paper": 0.2,
        "noisy/K1-a/other": 0.0, "plain/K1-a/partial": 0.5, "noisy/K1-a/partial": 0.5,
    }.items()}  # fmt: skip
    cells |= {"plain/K1-a/fewer": course(0.1, 0.55, 0.8), "noisy/K1-a/fewer": course(0.0, 0.1, 0.4)}
    total, every = sections(Table("small", SMALL), cells)
    paper, other, partial, fewer = total["rows"]
    assert paper["cells"] == other["cells"] == fewer["cells"] == 3  # one cell was not measured under `other`
    assert paper["total"] == pytest.approx(0.1 + 0.0 + 0.3)
    assert (other["total"], other["most"], other["K2"]) == (pytest.approx(0.1 + 0.4), pytest.approx(0.4), 0.0)
    assert fewer["explanation"] == "fewer (10)"
    assert fewer["total"] == pytest.approx(0.05 + 0.0 + 0.3)
    assert partial["total"] is partial["K2"] is None  # it does not explain every cell
    assert partial["K1"] == pytest.approx((0.0 + 0.1) / 2)
    assert [row["other"] for row in every["rows"]] == [0.6, 0.7, 0.0, None]  # without noise of its own: as on paper
    assert [row["fewer"] for row in every["rows"]] == [0.55, 0.7, 0.1, None]
    assert [row["partial"] for row in every["rows"]] == [0.5, None, 0.5, None]


def test_an_explanation_without_cells_has_no_error() -> None:
    total, every = sections(Table("small", SMALL), {})
    assert not total["measured"]
    assert not every["measured"]
    assert [row["explanation"] for row in total["rows"]] == ["paper", "other", "partial", "fewer"]


def test_only_a_variant_above_may_stand_for_another(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    start = 'title = "t"\nlayout = "rivals"\naxes.a.b = {}\n'
    own.write_text(start + '[variants]\nx = {}\ny = { otherwise = "x" }\n')
    assert read("own", own).variants_of("b") == ["x", "y"]
    own.write_text(start + '[variants]\nx = { otherwise = "y" }\ny = {}\n')
    with pytest.raises(PlanError, match="otherwise is not the name of a variant above"):
        read("own", own)


def test_the_shipped_tables_know_their_axes() -> None:
    fitting = {name: {"accuracy": value} | course(0.1, value) for name, value in _as_printed(table("rivals")).items()}
    errors = {row["explanation"]: row for row in sections(table("rivals"), fitting)[0]["rows"]}
    assert list(errors) == ["paper", "cohort", "fewer rounds (10)", "release", "release; divided by K_t"]
    assert [row["total"] for row in errors.values()] == [0, 0, 0, 0, None]
    assert {row["cells"] for row in errors.values()} == {36, None}
    curves = {name: course(0.1, value) for name, value in _as_printed(table("rounds")).items()}
    found = sections(table("rounds"), curves)
    assert len(found) == 3
    assert found[0]["rows"][1]["nonprivate error"] == 0


def _as_printed(found: Table) -> dict[str, float]:
    return {cell.name: found.printed[cell.row] for cell in found.cells.values()}
