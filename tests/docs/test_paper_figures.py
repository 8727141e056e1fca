"""Figures of the reproduced tables, as the pages quote them."""

from __future__ import annotations

from typing import Any

import pytest

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
    ("trained_without", (), "105"),
])  # fmt: skip
@pytest.mark.usefixtures("measured")
def test_a_figure_or_its_range_is_rendered(call: str, arguments: tuple[str, ...], shown: str) -> None:
    assert CALLS[call]("population", *arguments) == shown


@pytest.mark.parametrize("call", ["accuracy", "printed", "apart", "within"])
@pytest.mark.usefixtures("measured")
def test_a_name_that_matches_nothing_is_refused(call: str) -> None:
    with pytest.raises(ValueError, match="nothing in population is called fed-cpd"):
        CALLS[call]("population", "fed-cpd/*")
