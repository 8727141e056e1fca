"""Pages are what their templates render to, and every figure on them names its source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.pages import CALL, ROOT, page_of, render, source_of, templates, value_of

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MEASURED_TABLES = [source_of(ROOT / name) for name in ("README.md", "docs/compared.md", "docs/paper.md")]
ACCURACY = "reproduction/accuracy.json / cells / mnist/non-private/plain / accuracy"


@pytest.mark.parametrize("template", templates(), ids=lambda path: path.name)
def test_a_page_is_what_its_template_renders_to(template: Path) -> None:
    assert page_of(template).read_text() == render(template.read_text()), "render it with python -m tools.pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_has_no_html_comment(page: Path) -> None:
    assert "<!--" not in re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("template", MEASURED_TABLES, ids=lambda path: path.name)
def test_every_figure_in_a_table_names_its_source(template: Path) -> None:
    unsourced = []
    lines = template.read_text().splitlines()
    headings = {at - 1 for at, line in enumerate(lines) if line.startswith("| ---")}
    for number, line in enumerate(lines, start=1):
        if line.startswith("|") and number - 1 not in headings:
            _, _, *cells = line.split("|")  # not the first column: it names the row
            rest = [re.sub(r"`[^`]*`|\]\([^)]*\)", "", CALL.sub("", cell)) for cell in cells]
            unsourced += [f"line {number}: {cell.strip()}" for cell in rest if re.search(r"(?<![\w-])\d", cell)]
    assert not unsourced, "\n".join(unsourced)


def test_the_page_of_the_reproduction_quotes_every_accuracy_from_its_table() -> None:
    text = re.sub(r"\{\{.*?\}\}|```.*?```", "", source_of(ROOT / "docs" / "reproduction.md").read_text(), flags=re.DOTALL)
    assert re.findall(r"(?<![\w.])0?\.\d\d+\b", text) == ["0.0001", ".94"]  # a tolerance, and the paper's largest distance


def test_figures_are_rendered_as_the_pages_show_them() -> None:
    text = f'{{{{ share("{ACCURACY}") }}}} {{{{ figure("{ACCURACY}", 2) }}}} {{{{ percent("{ACCURACY}", 1) }}}} %'
    value = value_of(ACCURACY)
    assert render(text) == f"{value:.3f} {value:.2f} {100 * value:.1f} %".removeprefix("0")


def test_a_text_that_a_result_does_not_hold_is_refused() -> None:
    assert render('{{ quoted("ten_thousand_clients/README.md", "101") }} s') == "101 s"
    with pytest.raises(ValueError, match="10 is not written in results/ten_thousand_clients"):
        render('{{ quoted("ten_thousand_clients/README.md", "10") }}')


def test_a_source_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError):
        render(f'{{{{ share("{ACCURACY}s") }}}}')
