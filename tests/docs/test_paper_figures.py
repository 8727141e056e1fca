"""Figures of the reproduced tables, as the pages quote them."""

from __future__ import annotations

from typing import Any

import pytest

from fedcdp.studies.reproduce.catalogue import table
from tools import paper_figures
from tools.paper_figures import CALLS


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cells: dict[str, Any] = {
        "fed-cdp/K100-Kt5/cohort": {"accuracy": 0.5604, "epsilon": {"server/record": 27.68}},
        "fed-cdp/K100-Kt10/cohort": {"accuracy": 0.8414, "epsilon": {"server/record": 123456.7}},
        "fed-cdp-decay/K100-Kt5/cohort": {"accuracy": 0.5704, "epsilon": {"server/record": "inf"}},
    }
    monkeypatch.setattr(paper_figures, "_results", lambda _: cells)


@pytest.mark.parametrize(("call", "arguments", "shown"), [
    ("accuracy", ("fed-cdp/K100-Kt5/cohort",), ".560"),
    ("accuracy", ("fed-cdp/*",), ".560 to .841"),
    ("apart", ("fed-cdp/*",), "−.255 to +.010"),
    ("within", ("fed-cdp/K100-Kt10/*", "fed-cdp-decay/*"), ".263"),
    ("gain", ("fed-cdp-decay/K100-Kt5/cohort", "fed-cdp/K100-Kt5/cohort"), "+.010"),
    ("true_epsilon", ("fed-cdp/*", "server/record"), "27.7 to 123,000"),
    ("true_epsilon", ("fed-cdp-decay/*", "server/record"), "∞"),
    ("printed", ("fed-cdp/K100-Kt5",), ".815"),
    ("printed", ("fed-cdp/K100-*",), ".815 to .903"),
    ("progress", (), "been run for 3 of 108 cells"),
    ("finished", (), False),
])  # fmt: skip
@pytest.mark.usefixtures("measured")
def test_a_figure_or_its_range_is_rendered(call: str, arguments: tuple[str, ...], shown: str | bool) -> None:
    assert CALLS[call]("population", *arguments) == shown


@pytest.mark.parametrize("call", ["accuracy", "printed", "apart", "within"])
@pytest.mark.usefixtures("measured")
def test_a_name_that_matches_nothing_is_refused(call: str) -> None:
    with pytest.raises(ValueError, match="nothing in population is called fed-cpd"):
        CALLS[call]("population", "fed-cpd/*")


def as_printed(name: str, off: float = 0.0) -> dict[str, Any]:
    """All cells of a table, each as printed; those whose name ends in `cohort` are off."""
    found = table(name)
    values = {cell.name: found.printed[cell.row] + off * cell.name.endswith("cohort") for cell in found.cells.values()}
    return {cell: {"accuracy": value, "curves": {"accuracy": [[1, 0.1], [2, value]]}} for cell, value in values.items()}


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    found: dict[str, Any] = {}
    monkeypatch.setattr(paper_figures, "_results", lambda _: found)
    paper_figures.sections_of.cache_clear()
    yield found
    paper_figures.sections_of.cache_clear()


def test_the_explanation_with_the_smallest_error_is_named_and_what_it_leaves(cells: dict[str, Any]) -> None:
    cells |= as_printed("rivals", off=0.02)
    assert CALLS["finished"]("rivals") is True
    assert CALLS["totals"]().startswith(
        "0.00 for *paper*, 0.00 for *release*, 0.32 for *fewer rounds (2)*, 0.48 for *cohort*"
    )
    assert "*paper* fits best, with a mean error of .000. That is as close as two seeds" in CALLS["verdict_on_rivals"]()
    for name in [name for name in cells if name.endswith(("/paper", "/release"))]:
        cells[name]["accuracy"] -= 0.1
    paper_figures.sections_of.cache_clear()
    verdict = CALLS["verdict_on_rivals"]()
    assert verdict.startswith("*fewer rounds (2)* fits best")
    assert "None explains all of them: it is off by .100 in one cell." in verdict


def test_a_number_of_rounds_that_does_not_fit_is_said_not_to(cells: dict[str, Any]) -> None:
    cells |= as_printed("rounds")
    told = CALLS["fit_of_rounds"]()
    assert told.startswith("2 at rate 0.05 (off by .000 at most; Fed-CDP by .000 on average), 2 at rate 0.1")
    assert told.endswith("One number of rounds explains all four.")
    for name in [name for name in cells if "nonprivate/K100-Kt5/" in name]:
        cells[name]["curves"]["accuracy"][1][1] += 0.05
    paper_figures.sections_of.cache_clear()
    assert "(off by .050 at most" in CALLS["fit_of_rounds"]()
    assert CALLS["fit_of_rounds"]().endswith("No number of rounds explains all four.")


def test_networks_are_told_with_what_each_change_adds(cells: dict[str, Any]) -> None:
    cells |= as_printed("cifar10")
    cells["iid/biases/non-private/plain"]["accuracy"] = 0.7
    told = CALLS["by_change"]("iid")
    assert told.startswith(".674 as described, .674 standardised (+.000), ")
    assert ".700 biases (+.026), .674 padding (−.026)" in told
