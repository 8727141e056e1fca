"""The tutorials, run as a reader would paste them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support import doc_pages
from tools.pages import ROOT, source_of

QUICK = ("README", "privacy-table")  # the other pages train for seconds
TUTORIALS = [source_of(page) for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


def _name(page: Path) -> str:
    return page.name.partition(".")[0]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if _name(page) in QUICK else pytest.mark.slow)
        for page in [*TUTORIALS, source_of(ROOT / "docs" / "sequences.md"), source_of(ROOT / "README.md")]
    ],
    ids=_name,
)
def test_a_page_does_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))
    for block, printed in doc_pages.run(page, tmp_path):
        assert block.printed is None or doc_pages.same(block.printed, printed), (
            f"{page.name}, line {block.line} prints\n{printed}"
        )


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
def test_the_tutorial_of_flower_runs_with_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))
    [page] = [page for page in TUTORIALS if _name(page) == "flower"]
    for block, printed in doc_pages.run(page, tmp_path, integration=True):
        assert block.printed is None or doc_pages.same(block.printed, printed), (
            f"{page.name}, line {block.line} prints\n{printed}"
        )


def test_each_tutorial_shows_something_that_is_run_and_compared() -> None:
    assert TUTORIALS
    for page in TUTORIALS:
        assert any(block.printed is not None and block.mark != "not run" for block in doc_pages.blocks(page)), page.name


def test_a_page_whose_output_changed_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    [(block, printed)] = doc_pages.run(page, tmp_path)
    assert not doc_pages.same(block.printed or "", printed)


def test_a_shell_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nfalse\n```\n")
    with pytest.raises(AssertionError, match="exit status 1"):
        list(doc_pages.run(page, tmp_path))
