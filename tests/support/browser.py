"""A headless Chromium for tests of pages. Without one they are skipped, or fail where FEDCDP_REQUIRE_BROWSER is set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@contextmanager
def opened_browser() -> Iterator[Chrome]:
    """The browser, closed at the end."""
    if CHROMIUM is None or DRIVER is None:
        message = "no chromium and chromedriver here"
        pytest.fail(message) if os.environ.get("FEDCDP_REQUIRE_BROWSER") else pytest.skip(message)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})  # the console, and every request
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def resize(browser: Chrome, width: int) -> None:
    """Make the window this wide; below 600 pixels it is a phone's."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
