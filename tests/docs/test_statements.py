"""Sentences about the results: each is computed again from the result files, and must stand on its page in these words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedcdp.studies.reproduce.catalogue import Table, table, tables
from fedcdp.studies.reproduce.layouts import Section, sections
from fedcdp.studies.reproduce.markdown import overview, page
from fedcdp.studies.reproduce.runner import TableResults
from tools.pages import CALL, ROOT, source_of

REPRODUCTION = ROOT / "results" / "reproduction"
PAPER, GUARANTEES, REPRODUCING = (ROOT / "docs" / name for name in ("paper.md", "guarantees.md", "reproduction.md"))
ATTACKED = re.compile(r'"reproduction/attacks\.json / cells / (.+) / (success_rate|victims)"')


def cells_of(name: str) -> dict[str, Any]:
    return json.loads((REPRODUCTION / f"{name}.json").read_text())["cells"]


def text_of(path: Path) -> str:
    """A page, each run of blanks a single one."""
    return " ".join(path.read_text().split())


def made_of(each: Table) -> tuple[dict[str, Any], list[Section]]:
    cells = TableResults(each, REPRODUCTION).cells
    return cells, sections(each, cells)


# Pages that are generated --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [each.name for each in tables() if (REPRODUCTION / f"{each.name}.json").exists()])
def test_a_page_of_the_reproduction_is_what_its_generator_writes(name: str) -> None:
    each = table(name)
    cells, made = made_of(each)
    committed = (REPRODUCTION / f"{name}.md").read_text()
    assert committed == page(each, cells, made, re.findall(r"!\[.*\]\((.*)\)", committed))
    assert json.loads((REPRODUCTION / f"{name}.json").read_text())["sections"] == json.loads(json.dumps(made))


def test_the_overview_of_the_reproduction_is_what_its_generator_writes() -> None:
    assert (REPRODUCTION / "README.md").read_text() == overview([(each, *made_of(each)) for each in tables()])


# Attacks -------------------------------------------------------------------------------------------------------------


def stated_victims(page: str) -> list[tuple[str, int]]:
    """The cells of the attack table whose success a page quotes, and of how many victims it says that each is.

    The number stands in the same cell of the page's table, or else once in the text for all.
    """
    cells = cells_of("attacks")
    everywhere = {
        cells[name]["victims"] for line in page.splitlines() if "|" not in line for name in _quoted(line, "victims")
    }
    [usual] = everywhere
    found = []
    for part in (part for line in page.splitlines() if "|" in line for part in line.split("|")):
        for each in re.split(r", or ", part):
            own = {cells[name]["victims"] for name in _quoted(each, "victims")} or {usual}
            found += [(name, *own) for name in _quoted(each, "success_rate")]
    return found


def _quoted(text: str, what: str) -> list[str]:
    """The cells whose victims or success a text quotes."""
    found = [ATTACKED.match(each["arguments"]) for each in CALL.finditer(text)]
    return [each[1] for each in found if each and each[2] == what]


def test_the_page_says_how_many_clients_were_attacked() -> None:
    stated, cells = stated_victims(source_of(PAPER).read_text()), cells_of("attacks")
    assert len(stated) == 9
    assert stated == [(name, cells[name]["victims"]) for name, _ in stated]


def test_a_page_that_says_a_hundred_where_twenty_were_attacked_is_noticed() -> None:
    wrong = re.sub(r" of \{\{ figure\(\"[^)]*smooth[^)]*\"\) \}\} clients", "", source_of(PAPER).read_text())
    assert ("mnist/type01-smooth/non-private", 100) in stated_victims(wrong)


def test_the_page_says_which_network_was_attacked() -> None:
    cells = cells_of("attacks")
    assert all("--network cpl " in cell["command"] and cell["round"] == 0 for cell in cells.values())
    assert "The attacked network is `cpl`, the network that the paper's authors attack, untrained." in text_of(PAPER)


def test_attacks_on_fed_cdp_are_told_apart_from_agreement() -> None:
    rows = [row for section in made_of(table("attacks"))[1] for row in section["rows"]]
    others = [row for row in rows if not row["method"].startswith("Fed-CDP")]
    assert all(row["agrees"] for row in rows if row["method"].startswith("Fed-CDP"))
    assert [row["agrees"] for row in others].count(False) == 4  # the page explains four rows
    assert "**Four rows of the attack table.**" in text_of(REPRODUCING)


def test_printed_epsilons_are_as_close_as_the_page_says() -> None:
    (each, *others) = made_of(table("epsilon"))[1]
    apart = [abs(row["difference"]) for section in (each, *others) for row in section["rows"]]
    assert len(apart) == 20
    assert max(apart) <= 1e-4
    assert "all 20 figures, none more than 0.0001 away" in text_of(REPRODUCING)


# Accuracy ------------------------------------------------------------------------------------------------------------


def test_how_far_cohort_noise_explains_the_printed_accuracy() -> None:
    cells, printed = cells_of("population"), table("population").printed
    rows = [row for row in printed if row.startswith("fed-cdp")]
    apart = {row: cells[f"{row}/cohort"]["accuracy"] - printed[row] for row in rows}
    many = [abs(value) for row, value in apart.items() if "/K100-" not in row]
    assert f"comes within .{1000 * max(many):03.0f} of the paper's MNIST accuracy in all {len(many)} cells" in text_of(PAPER)
    assert f"come within .{1000 * max(many):03.0f} of them on MNIST with K = 1000 and 10,000" in text_of(GUARANTEES)
    few, large = (printed[f"fed-cdp/{population}"] for population in ("K100-Kt50", "K1000-Kt50"))
    plain = [printed[f"nonprivate/{population}"] for population in ("K100-Kt50", "K1000-Kt50")]
    assert large - few > 3 * (plain[1] - plain[0])  # more than the same clients differ by without any noise
    assert f"the paper prints {few:.3f} for K = 100 and {large:.3f} for K = 1000".replace(" 0.", " .") in text_of(GUARANTEES)
    assert abs(apart["fed-cdp/K100-Kt50"]) > 0.05


# ε -------------------------------------------------------------------------------------------------------------------

HEADINGS = {
    "as the paper computes it": "computed as in the paper", "server, record": "true: server, record",
    "server, unique": "true: server, person", "example, record": "true: example, record",
    "server, client": "true: server, client", "model, client": "true: model, client",
}  # fmt: skip


def rows_under(heading: str, page: str) -> list[dict[str, str]]:
    """The table below a heading, row by row."""
    lines = page.partition(f"{heading}\n\n")[2].partition("\n\n")[0].splitlines()
    cut = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cut[0], cells, strict=True)) for cells in cut[2:]]


@pytest.mark.parametrize("method", ["Fed-CDP", "Fed-SDP"])
def test_every_column_of_epsilon_is_what_its_heading_says(method: str) -> None:
    measured = rows_under(f"## {method.lower()}", (REPRODUCTION / "epsilon.md").read_text())
    shown = rows_under(f"### {method}", GUARANTEES.read_text())
    assert len(shown) == len(measured) == 10
    for ours, theirs in zip(shown, measured, strict=True):
        assert {ours.pop(name) == theirs[name] for name in ("dataset", "L")} == {True}
        assert ours == {heading: theirs[HEADINGS[heading]] for heading in ours}
