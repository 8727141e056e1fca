"""Links between the pages of the repository lead to files and headings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("*.md")])
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def links(page: Path) -> Iterator[str]:
    for found in _LINK.finditer(_CODE.sub("", page.read_text())):
        yield found[1] or found[2]


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    headings = _HEADING.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leads out of the repository"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: no such heading"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix().removeprefix("docs/")
        assert page == ROOT / "README.md" or re.search(rf": {re.escape(name)}$", navigation, re.MULTILINE), name


def test_pages_name_no_place_of_a_single_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|tmp|root|home)/", page.read_text()), page.name
