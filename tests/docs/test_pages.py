"""Pages are what their templates render to, and every figure on them names its source."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tools.pages import CALL, ROOT, page_of, render, source_of, templates, value_of

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MEASURED_TABLES = [source_of(ROOT / name) for name in ("README.md", "docs/compared.md", "docs/paper.md")]
NO_PROSE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)  # calls, code, links
BY_HAND = re.compile(
    r"(?<![\w.,])\d*\.\d+\b(?!\.\d)(?: %)?|(?<![\w.,])\d+ %"  # decimals and percentages
    r"|\b\d[\d,]* of \d[\d,]*\b|\b\d[\d,]* (?:seconds|minutes|hours)\b"  # counts and times
)
STATED = {
    "attacks": [
        "0.1 %", "0.1 %", "0.319",  # thresholds: when a search ends, when it explains what was seen, TabLeak's tolerance
        "0.1 %", "0.1 %", "0.1 %", "1 %", "1 %", ".505",  # false-positive rates, and an AUC that follows from one
        "99 %", "676 of 784",  # the confidence of an interval, the pixels that the network sees
        ".003", ".01", ".03", ".1", ".3",  # settings: the noise of each column
        ".01", ".1", "30 %", "50 %", "50 %", "70 %",  # settings: η and σ of a training, shares that are pruned
        "0.0008", "0.155", "0.70", "0.74", "0.94", "0.94", "0.94", "30 %",  # printed in the paper
        "0.001", "0.03",  # not stored: the MSE after seven iterations, and its root
    ],
    "guarantees": [
        "0.1", "52.5", "47.5", "0.02 %", "0.0104",  # follow from a formula
        "7.520", "7.505", "8.25",  # δ by summation, as a test computes it (tests/mechanism/test_secure_sum.py)
        "3.1", "500 of 50,000", "0.1", "0.01",  # a theorem's number; settings: records of a client, sampling rates
        "95 %", "99.9 %", "99.9 %", "99.9 %",  # confidence
        "0.0845", "0.8227", "0.8227",  # printed in the paper
    ],
    "recommended": [
        ".670", ".693", ".5",  # printed in a paper; the AUC of a coin toss
        "0.03", "0.1", "0.5", "0.8", "0.9", "0.9",  # settings: clip bounds, moving averages, momentum
        "2.9", "5.9",  # the size of a file and of its network
        ".175", ".01", ".01", ".02", ".005", ".04", ".06",  # not stored: LFW's largest class, features that were left out
    ],
}  # fmt: skip
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


@pytest.mark.parametrize("page", STATED)
def test_no_measured_figure_is_written_by_hand(page: str) -> None:
    stated = by_hand(source_of(ROOT / "docs" / f"{page}.md").read_text())
    assert Counter(stated) == Counter(STATED[page]), "quote a measured figure from its result file"


def by_hand(template: str) -> list[str]:
    """The decimals, percentages, counts and times that a template states outside its calls, code and links."""
    return BY_HAND.findall(NO_PROSE.sub("", template))


def test_figures_written_by_hand_are_found() -> None:
    text = "An AUC of .83, an MSE of 0.047, 71 % exact, 2.5 % found, 95 of 1,000 faces, in 12 seconds."
    assert by_hand(text) == [".83", "0.047", "71 %", "2.5 %", "95 of 1,000", "12 seconds"]
    assert not by_hand('{{ percent("7 %") }} % `.5` [a](b.55) {% set a = 0.5 %} of version 0.1.0\n```\n.7\n```')


def test_figures_are_rendered_as_the_pages_show_them() -> None:
    text = f'{{{{ share("{ACCURACY}") }}}} {{{{ figure("{ACCURACY}", 2) }}}} {{{{ percent("{ACCURACY}", 1) }}}} %'
    value = value_of(ACCURACY)
    assert render(text) == f"{value:.3f} {value:.2f} {100 * value:.1f} %".removeprefix("0")


def test_the_range_of_several_differences_is_rendered() -> None:
    sources = ACCURACY.replace("mnist", "{mnist,cifar10,lfw}")
    values = [value_of(ACCURACY.replace("mnist", name)) for name in ("mnist", "cifar10", "lfw")]
    apart = [f"{each - values[0]:+.3f}".replace("0.", ".").replace("-", "−") for each in (min(values), max(values))]
    assert render(f'{{{{ gaps("{sources}", "{ACCURACY.replace("mnist", "{mnist,mnist,mnist}")}") }}}}') == " to ".join(apart)
    assert render(f'{{{{ gaps("{ACCURACY}", "{ACCURACY}") }}}}') == "+.000"
    with pytest.raises(ValueError, match="zip"):
        render(f'{{{{ gaps("{sources}", "{ACCURACY}") }}}}')


def test_a_step_may_be_a_position_in_a_list() -> None:
    low, high = (value_of(f"attacks.json / cells / filter/6/1 / auc_interval_99 / {at}") for at in (0, 1))
    assert low < value_of("attacks.json / cells / filter/6/1 / auc") < high


def test_a_text_that_a_result_does_not_hold_is_refused() -> None:
    assert render('{{ quoted("ten_thousand_clients/README.md", "101") }} s') == "101 s"
    with pytest.raises(ValueError, match="10 is not written in results/ten_thousand_clients"):
        render('{{ quoted("ten_thousand_clients/README.md", "10") }}')


def test_a_source_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError):
        render(f'{{{{ share("{ACCURACY}s") }}}}')
