"""The page in a real browser: the slider by mouse and keyboard, dark mode, a phone, paper, and no script at all.

Without Chromium these are skipped; where FEDCDP_REQUIRE_BROWSER is set, they fail instead.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import opened_browser, resize

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    """A headless Chromium that records its console."""
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def shown(browser: Chrome, page: Path) -> Chrome:
    """The page, freshly loaded in a wide and bright window."""
    emulate(browser)
    resize(browser, 1200)
    browser.get(page.as_uri())
    return browser


def emulate(browser: Chrome, media: str = "", scheme: str = "light") -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def one(browser: Chrome, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def visible(browser: Chrome, selector: str) -> list[Any]:
    return [each for each in browser.find_elements("css selector", selector) if each.is_displayed()]


def pictures(browser: Chrome) -> list[str]:
    return [each.get_attribute("src") for each in visible(browser, ".player li img")]


def brightness(browser: Chrome, selector: str, style: str) -> float:
    colour = one(browser, selector).value_of_css_property(style)
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_the_page_tells_its_story_without_an_error_or_a_request(shown: Chrome) -> None:
    assert "Fed-CDP" in one(shown, "h1").text
    assert len(visible(shown, "p.headline")) == 1
    assert [each.text for each in visible(shown, ".short h2")] == ["What leaks", "What stops it", "What it costs"]
    assert len(visible(shown, "#glance ~ table tbody tr")) == 4
    assert len(visible(shown, "svg.chart")) >= 3
    sizes = [shown.execute_script("return arguments[0].naturalWidth", each) for each in visible(shown, "img")]
    assert len(sizes) > 40
    assert all(each == 28 for each in sizes)
    assert shown.get_log("browser") == []
    told = [json.loads(each["message"])["message"] for each in shown.get_log("performance")]
    asked = {each["params"]["request"]["url"][:5] for each in told if each["method"] == "Network.requestWillBeSent"}
    assert asked == {"file:", "data:"}  # the page itself, and what is in it


def test_the_keyboard_moves_the_slider_and_changes_the_pictures(shown: Chrome) -> None:
    slider = one(shown, "#iteration")
    last = pictures(shown)
    assert slider.get_attribute("aria-valuetext") == "result of the attack"
    slider.send_keys("\ue011")  # Home
    first = pictures(shown)
    assert slider.get_attribute("aria-valuetext") == one(shown, "#iteration-shown").text == "start: random pixels"
    slider.send_keys("\ue014")  # arrow right
    second = pictures(shown)
    assert slider.get_attribute("aria-valuetext") == "after 1 iteration"
    assert len(first) == len(second) == len(last) == 3 * 5  # three readers, an original and four methods each
    assert first != second != last
    originals = slice(None, None, 5)
    assert first[originals] == second[originals] == last[originals]
    slider.send_keys("\ue010")  # End
    assert pictures(shown) == last


def test_the_mouse_moves_the_slider_too(shown: Chrome) -> None:
    from selenium.webdriver import ActionChains

    slider = one(shown, "#iteration")
    before = pictures(shown)
    ActionChains(shown).move_to_element_with_offset(slider, -slider.size["width"] // 2 + 8, 0).click().perform()
    assert slider.get_attribute("value") == "0"
    assert pictures(shown) != before


def test_what_has_the_focus_can_be_seen(shown: Chrome) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(shown).send_keys("\ue004").perform()  # Tab
    focused = shown.switch_to.active_element
    assert focused.text == "Skip to the results"
    assert focused.is_displayed()
    assert focused.location["x"] >= 0
    assert focused.value_of_css_property("outline-style") == "solid"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_screen_needs_no_sideways_scrolling(shown: Chrome, width: int) -> None:
    resize(shown, width)
    assert shown.execute_script("return document.documentElement.scrollWidth") <= width
    assert shown.execute_script("return window.innerWidth") == width


def test_dark_mode_is_dark_and_bright_mode_bright(shown: Chrome) -> None:
    assert brightness(shown, "body", "background-color") > 230
    assert brightness(shown, "body", "color") < 60
    emulate(shown, scheme="dark")
    assert brightness(shown, "body", "background-color") < 40
    assert brightness(shown, "body", "color") > 200


_CONTRASTS = """
const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
  .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (node) => { for (; node; node = node.parentElement) { const colour = getComputedStyle(node).backgroundColor;
  if (!/, 0\\)$|transparent/.test(colour)) return colour; } return "rgb(255, 255, 255)"; };
const texts = "p, th, td, li, dt, dd, h1, h2, h3, caption, summary, figcaption, .badge, .soft, label";
return [...document.querySelectorAll(texts)]
  .filter((node) => node.offsetParent && node.textContent.trim())
  .map((node) => { const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.textContent.trim().slice(0, 40)]; })
  .filter(([ratio]) => ratio < 4.5);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_background(shown: Chrome, scheme: str) -> None:
    emulate(shown, scheme=scheme)
    assert shown.execute_script(_CONTRASTS) == []


def test_on_paper_the_iterations_stand_side_by_side(shown: Chrome) -> None:
    on_screen = len(pictures(shown))
    emulate(shown, media="print", scheme="dark")
    assert not one(shown, "#iteration").is_displayed()
    assert len(pictures(shown)) > 2 * on_screen
    assert brightness(shown, "body", "background-color") == 255
    printed = base64.b64decode(shown.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")
    assert 10_000 < len(printed) < 3_000_000


def statements(browser: Chrome) -> list[Any]:
    """The privacy tables that are unfolded."""
    tables = browser.find_elements("css selector", ".statement table")
    return [each for each in tables if browser.execute_script("return arguments[0].checkVisibility()", each)]


def test_privacy_tables_unfold_by_keyboard(shown: Chrome) -> None:
    assert statements(shown) == []
    summary = one(shown, ".statement summary")
    summary.send_keys("\ue007")  # Enter
    assert len(statements(shown)) == 1


def test_on_paper_everything_is_unfolded(shown: Chrome) -> None:
    emulate(shown, media="print")
    assert len(statements(shown)) == 4
    emulate(shown)
    assert statements(shown) == []


def test_without_a_script_privacy_tables_unfold_too(shown: Chrome, page: Path) -> None:
    shown.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        shown.get(page.as_uri())
        one(shown, ".statement summary").send_keys("\ue007")  # Enter
        assert len(statements(shown)) == 1
    finally:
        shown.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_without_a_script_everything_is_there_but_the_slider(shown: Chrome, page: Path) -> None:
    on_screen = len(pictures(shown))
    shown.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        shown.get(page.as_uri())
        text = page.read_text(encoding="utf-8")
        assert 'class="control"' in text
        assert not one(shown, "#iteration").is_displayed()
        assert len(pictures(shown)) > 2 * on_screen
        assert len(visible(shown, "svg.chart")) >= 3
    finally:
        shown.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
