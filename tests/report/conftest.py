"""A small demo, made once: four real runs, each attacked by three readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcdp.report import report
from fedcdp.studies.demo import Demo
from tests.support.small_demo import FEWER, SILENT, SMALLER


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished small demo; not to be changed."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    Demo(out, SMALLER, FEWER).run(SILENT)
    return out


@pytest.fixture(scope="session")
def page(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about it."""
    return report(demo_directory, tmp_path_factory.mktemp("page") / "report.html")
