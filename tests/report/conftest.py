"""The page about the small demo, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcdp.report.api import report
from tests.support.made_once import made_once


@pytest.fixture(scope="session")
def page(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about the small demo."""
    return made_once(tmp_path_factory, "report.html", lambda out: report(demo_directory, out))
