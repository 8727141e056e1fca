"""The figures that the README and the pages quote are those of the result files, or of the command that is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_figures import MARKED, ROOT, figures_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Here every figure in a table must say where it comes from.
MEASURED_TABLES = [ROOT / "README.md", ROOT / "docs" / "compared.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_marked_figure_is_that_of_its_source(page: Path) -> None:
    wrong = [f"line {each.line}: {each.shown} is not {each.source}" for each in figures_of(page) if not each.holds]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", MEASURED_TABLES, ids=lambda page: page.name)
def test_every_figure_in_a_table_says_where_it_comes_from(page: Path) -> None:
    unmarked = []
    lines = page.read_text().splitlines()
    headings = {at - 1 for at, line in enumerate(lines) if line.startswith("| ---")}
    for number, line in enumerate(lines, start=1):
        if line.startswith("|") and number - 1 not in headings:
            _, _, *cells = line.split("|")  # not the first column: it names the row
            rest = [re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", MARKED.sub("", cell)) for cell in cells]
            unmarked += [f"line {number}: {cell.strip()}" for cell in rest if re.search(r"(?<![\w-])\d", cell)]
    assert not unmarked, "\n".join(unmarked)


def test_the_readme_quotes_figures() -> None:
    assert len(list(figures_of(MEASURED_TABLES[0]))) >= 20


def test_a_figure_that_is_not_that_of_its_source_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    source = "reproduction/accuracy.json / cells / mnist/non-private/plain / accuracy"
    page.write_text(f"| a | .985<!-- = {source} --> | 98.5 %<!-- = {source} --> | .984<!-- = {source} --> |\n")
    assert [each.holds for each in figures_of(page)] == [True, True, False]


def test_a_text_that_a_result_does_not_hold_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    source = "text ten_thousand_clients/README.md"
    page.write_text(f"101<!-- = {source} --> s, 10<!-- = {source} --> s\n")
    assert [each.holds for each in figures_of(page)] == [True, False]
