"""The tables that are shipped, and those of a user: what cells they have, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedcdp.config.schedules import as_schedule
from fedcdp.errors import PlanError
from fedcdp.studies.reproduce.catalogue import Place, Table, chosen, merged, read, table, tables
from fedcdp.studies.reproduce.cells import attack_command, choose_rate, command, experiment_of, rates_of
from fedcdp.studies.reproduce.layouts import LAYOUTS, sections
from fedcdp.studies.reproduce.markdown import page
from fedcdp.studies.reproduce.runner import cost

NAMES = [each.name for each in tables()]

SMALL = {
    "title": "Small",
    "layout": "accuracy",
    "every": {"preset": "cancer", "plan": {"rounds": 2}},
    "axes": {
        "method": {"fed-cdp": {"plan": {"method": "fed-cdp"}}, "nonprivate": {"plan": {"method": "nonprivate"}}},
        "clip": {"C1": {"plan": {"clip": 1.0}}, "C8": {"plan": {"clip": 8.0}}},
    },
    "variants": {"cohort": {"rows": ["fed-cdp/*"], "plan": {"noise": "cohort"}}, "plain": {"rows": ["nonprivate/C1"]}},
}


def test_every_table_and_figure_of_the_paper_is_there() -> None:
    wanted = {"epsilon", "population", "clip", "noise", "time", "attacks", "compression", "gradient-norm", "methods"}
    assert wanted | {"leakage", "tradeoff", "accuracy", "cifar10", "rounds", "rivals"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_describes_an_experiment_that_can_be_run(name: str) -> None:
    found = table(name)
    assert found.cells
    assert found.content["layout"] in LAYOUTS
    assert found.printed.keys() <= {"/".join(row) for row in found.rows}
    for cell in found.cells.values():
        cell.experiment()
        assert "," not in cell.name  # what --cells separates
        assert cost(cell) >= 0
        if cell.kind in ("training", "tradeoff", "release"):
            assert command(cell, rates_of(cell)[0]).startswith("fedcdp train")
        if cell.kind == "attack":
            experiment_of(cell, Place(Path("nowhere")))
            assert attack_command(cell).startswith("fedcdp attack")


@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_which_nothing_was_run_says_so(name: str) -> None:
    found = table(name)
    written = page(found, {}, sections(found, {}), [])
    assert "Not run yet" in written
    assert "Measured on" not in written


def test_the_population_table_has_every_cell_of_the_papers_and_its_variants() -> None:
    found = table("population")
    assert len(found.rows) == len(found.printed) == 48
    plans = {name: cell.experiment() for name, cell in found.cells.items()}
    assert len(plans) == 12 * (1 + 4 + 2 + 2)
    largest = plans["fed-cdp-decay/K10000-Kt5000/example"]
    assert (largest.data.clients, largest.plan.per_round, largest.plan.noise) == (10_000, 5000, "example")
    assert str(largest.plan.clip) == "linear(6, 2)"
    assert found.printed["fed-cdp/K1000-Kt100"] == 0.956


def test_rows_are_products_of_axes_and_cells_are_rows_in_their_variants() -> None:
    found = Table("small", SMALL)
    assert list(found.cells) == ["fed-cdp/C1/cohort", "fed-cdp/C8/cohort", "nonprivate/C1/plain"]
    cell = found.cells["fed-cdp/C8/cohort"]
    plan = cell.experiment().plan
    assert (plan.rounds, plan.noise, plan.clip_at(0), plan.record_sampling) == (2, "cohort", 8.0, "partition")


@pytest.mark.parametrize(
    ("pattern", "count"), [("fed-cdp", 2), ("fed-cdp/C1", 1), ("*/C1/*", 2), ("nonprivate/C1/plain", 1), ("*", 3)]
)
def test_cells_are_chosen_by_name_beginning_or_pattern(pattern: str, count: int) -> None:
    ((_, cells),) = chosen([Table("small", SMALL)], [pattern])
    assert len(cells) == count


def test_what_matches_no_cell_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--cells: no cell of small is called 'fed'"):
        chosen([Table("small", SMALL)], ["fed-cdp", "fed"])


def test_a_pattern_may_match_in_one_of_several_tables() -> None:
    tables_ = [Table("small", SMALL), table("epsilon")]
    assert [len(cells) for _, cells in chosen(tables_, ["nonprivate/C1", "fed-sdp/mnist"])] == [1, 2]
    with pytest.raises(PlanError, match="no cell of small or epsilon is called 'clip'"):
        chosen(tables_, ["clip"])


def test_printed_lists_are_dealt_to_the_rows_in_order_and_must_fit() -> None:
    dealt = Table("small", SMALL | {"printed": {"fed-cdp/*": [0.1, 0.2], "nonprivate/C1": {"a": 1}}}).printed
    assert dealt == {"fed-cdp/C1": 0.1, "fed-cdp/C8": 0.2, "nonprivate/C1": {"a": 1}}
    for wrong in ({"fed-cdp/*": [0.1]}, {"fed-sdp/*": 0.1}):
        with pytest.raises(PlanError, match="printed"):
            _ = Table("small", SMALL | {"printed": wrong}).printed


def test_rates_follow_the_rules_that_a_cell_names() -> None:
    def rates(plan: dict[str, object], *written: object) -> list[object]:
        every = {"preset": "adult", "plan": {"method": "fed-cdp"} | plan, "rates": list(written)}
        content = SMALL | {"every": every, "axes": {"a": {"x": {}}}, "variants": {"": {}}}
        return rates_of(Table("rates", content).cells["x"])  # type: ignore[return-value]

    assert rates({}, "found") == [0.002]
    assert rates({"noise": "cohort"}, "found") == [0.2]
    assert rates({"clip": 0.5}, "found * 4 / C") == [0.016]
    assert rates({"clip": 4.0}, "found", "found * 4 / C") == [0.002]
    assert rates({"noise_multiplier": 0.5}, "found", "found * 6 / sigma") == [0.002, 0.024]
    assert rates({}, 0.5, "cosine(0.1, 0.01)") == [0.5, "cosine(0.1, 0.01)"]


@pytest.mark.parametrize(
    ("rates", "best", "tried"),
    [
        ([0.1, 0.2, 0.4], 0.2, [0.1, 0.2, 0.4]),
        ([0.05, 0.1], 0.37, [0.05, 0.1, 0.2, 0.4, 0.8]),
        ([0.1, 0.2], 0.05, [0.1, 0.2, 0.05, 0.025]),
        ([0.1, 0.2], 1e9, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8]),
        (
            ["cosine(0.05, 0.005)", "cosine(0.1, 0.01)"],
            0.1,
            ["cosine(0.05, 0.005)", "cosine(0.1, 0.01)", "cosine(0.2, 0.02)"],
        ),
        (["found", "found * 4 / C"], 1e9, [0.1, 0.8]),
        ([0.3], 1e9, []),
    ],
)
def test_rates_are_tried_until_the_best_has_neighbours(rates: list[object], best: float, tried: list[object]) -> None:
    every = {"preset": "mnist", "plan": {"method": "fed-cdp", "noise": "cohort", "clip": 0.5}, "rates": rates}
    cell = Table("rates", SMALL | {"every": every, "axes": {"a": {"x": {}}}, "variants": {"": {}}}).cells["x"]
    rate, found = choose_rate(cell, lambda each: -abs(math.log(as_schedule(each, "rate").start / best)))
    assert list(found) == tried
    assert rate == (max(found, key=lambda each: found[each]) if found else 0.3)


def test_the_first_of_equal_rates_is_kept() -> None:
    every = {"preset": "lfw", "plan": {"method": "fed-cdp"}, "rates": [5e-4, 1e-3]}
    cell = Table("rates", SMALL | {"every": every, "axes": {"a": {"x": {}}}, "variants": {"": {}}}).cells["x"]
    assert choose_rate(cell, lambda _: 0.2) == (5e-4, {5e-4: 0.2, 1e-3: 0.2, 2.5e-4: 0.2})


def test_settings_merge_table_by_table() -> None:
    assert merged({"plan": {"a": 1, "b": 2}, "x": 1}, {"plan": {"b": 3}}) == {"plan": {"a": 1, "b": 3}, "x": 1}


@pytest.mark.parametrize("name", ["nosuch", "../clip", "", "clip.json"])
def test_an_unknown_table_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(PlanError, match="is not one of the tables accuracy"):
        table(name)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("title = ", "is not a TOML file"),
        ('title = "a"\nlayout = "accuracy"', "lacks axes"),
        ('title = "a"\nlayout = "accuracy"\naxis = 1\n[axes.a]\nx = {}', "unknown keys axis"),
    ],
)
def test_a_users_table_with_a_mistake_is_refused_in_a_sentence(tmp_path: Path, content: str, reason: str) -> None:
    own = tmp_path / "own.toml"
    own.write_text(content)
    with pytest.raises(PlanError, match=reason):
        read("own", own)
