"""The site that `make docs` builds: navigation, reference, search, and a phone's width."""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fedcdp
from tests.support.browser import opened_browser, resize
from tests.support.made_once import made_once
from tools.pages import ROOT

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

PHONE = 390
_ENTRY = re.compile(r"^ +- \"?(?P<title>[^\n]+?)\"?: (?P<page>\S+\.md)$", re.MULTILINE)
_TOO_WIDE = """
const scrolls = each => ["auto", "scroll"].includes(getComputedStyle(each).overflowX)
const inside = each => each.matches(".md-content") ? false : scrolls(each) || inside(each.parentElement)
return [...document.querySelectorAll(".md-content *")]
  .filter(each => each.getBoundingClientRect().right > arguments[0] + 1 && !inside(each))
  .map(each => each.outerHTML.slice(0, 100))
"""


def navigation() -> str:
    return (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built; a warning is an error."""
    pytest.importorskip("mkdocs")

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return made_once(tmp_path_factory, "site", build)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with opened_browser() as driver:
        yield driver


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a local server for a folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def found_by(browser: Chrome, start: str, query: str) -> list[str]:
    """The pages that the search of the site finds from a page."""
    from selenium.webdriver.support.wait import WebDriverWait

    resize(browser, 1200)
    browser.get(start)
    WebDriverWait(browser, 20).until(lambda _: browser.find_element("css selector", "input.md-search__input").is_displayed())
    browser.find_element("css selector", "input.md-search__input").send_keys(query)
    WebDriverWait(browser, 20).until(lambda _: browser.find_elements("css selector", "a.md-search-result__link"))
    links = browser.find_elements("css selector", "a.md-search-result__link")
    return [str(link.get_attribute("href")) for link in links]


# The navigation ------------------------------------------------------------------------------------------------------


def test_no_page_and_no_title_is_in_the_navigation_twice() -> None:
    entries = _ENTRY.findall(navigation())
    assert len(entries) > 40
    for column in (0, 1):
        repeated = [name for name, count in Counter(entry[column] for entry in entries).items() if count > 1]
        assert not repeated


def test_tutorials_come_first_and_results_are_one_section() -> None:
    sections = re.findall(r"^  - (\w+):", navigation(), re.MULTILINE)
    assert sections == ["Start", "Tutorials", "Notebooks", "Guides", "Operate", "Reference", "Results", "Project"]
    before, _, results = navigation().partition("  - Results:\n")
    assert "results/" not in before
    assert "results/" not in results.partition("  - Project:\n")[2]
    assert "navigation.sections" not in (ROOT / "mkdocs.yml").read_text(), "sections would not be folded"


# The reference -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_public_name_is_in_the_reference_once(site: Path) -> None:
    anchors = Counter(
        anchor for page in (site / "reference").glob("*.html") for anchor in re.findall(r'id="([^"]+)"', page.read_text())
        if anchor.startswith("fedcdp.")
    )  # fmt: skip
    assert not [anchor for anchor, count in anchors.items() if count > 1]
    expected = {f"fedcdp.{name}" for name in fedcdp.__all__} - {"fedcdp.__version__", "fedcdp.report", "fedcdp.loggers"}
    expected |= {f"fedcdp.loggers.{name}" for name in fedcdp.loggers.__all__}
    assert expected | {"fedcdp.report.api.report"} <= anchors.keys()  # a package has the name of the function


@pytest.mark.slow
def test_the_reference_of_a_plan_is_a_table_of_its_fields(site: Path) -> None:
    page = (site / "reference" / "plan.html").read_text()
    rows = re.findall(r'<span id="fedcdp\.Plan\.(\w+)"></span>(.*?)</tr>', page, re.DOTALL)
    assert [name for name, _ in rows] == [field.name for field in fields(fedcdp.Plan)]
    for (_, row), field in zip(rows, fields(fedcdp.Plan), strict=True):
        plain = " ".join(html.unescape(re.sub(r"<[^>]+>", "", row)).split())
        assert field.metadata["help"].partition(" Default: ")[0].replace("`", "") in plain
        assert field.default is None or str(field.default) in plain


@pytest.mark.slow
def test_attack_lists_each_parameter(site: Path) -> None:
    page = (site / "reference" / "attacks.html").read_text()
    section = page.partition('id="fedcdp.attack"')[2].partition("Returns:")[0]
    assert len(re.findall(r'<li class="doc-section-item', section)) == 21


# Search and width ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_search_index_holds_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {each["location"].partition("#")[0] for each in index}
    pages = {
        page.removesuffix(".md").removesuffix("/README").removesuffix("/index") for _, page in _ENTRY.findall(navigation())
    }
    found = {place.removesuffix(".html").removesuffix("/index") for place in places}
    assert pages <= found | {"index"}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "server"])
def test_search_finds_a_field_of_the_plan(site: Path, browser: Chrome, where: str) -> None:
    with served(site) as address:
        start = (site / "index.html").as_uri() if where == "disk" else f"{address}/index.html"
        found = found_by(browser, start, "noise_multiplier")
    assert any("reference/plan.html" in link for link in found)


@pytest.mark.slow
def test_no_page_is_wider_than_a_phone(site: Path, browser: Chrome) -> None:
    resize(browser, PHONE)
    too_wide = {}
    for page in sorted(site.rglob("*.html")):
        if page.name != "404.html" and "assets" not in page.parts:
            browser.get(page.as_uri())
            if found := browser.execute_script(_TOO_WIDE, PHONE):
                too_wide[page.relative_to(site).as_posix()] = found[:3]
    assert not too_wide


@pytest.mark.slow
def test_what_is_wider_than_a_phone_is_noticed(site: Path, browser: Chrome) -> None:
    resize(browser, PHONE)
    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelector('.md-content h1').innerHTML = '<div style=width:500px>wide</div>'")
    assert len(browser.execute_script(_TOO_WIDE, PHONE)) == 1
