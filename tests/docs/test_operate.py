"""The operator's page, followed from an empty directory by its own text, with real processes behind the real nginx."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import doc_pages
from tests.support.flower_site import left_of, pids_of, source_path, wait_until
from tests.support.nginx import require_nginx
from tools.pages import ROOT, source_of

PAGE = source_of(ROOT / "docs" / "operate" / "index.md")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory, with fedcdp's and Flower's programs on the path; no process outlives the test."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, value in {"PATH": programs, "PYTHONPATH": source_path(), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    yield tmp_path / "empty"
    for number in (signal.SIGTERM, signal.SIGKILL):  # nginx ends its workers, whose command line names no place
        for pid in pids_of(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not pids_of(tmp_path), "all processes to end", 10)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_operators_first_day_works_as_written(place: Path) -> None:
    require_nginx()
    for block, printed in doc_pages.run(PAGE, place):
        assert block.printed is None or doc_pages.same(block.printed, printed), f"line {block.line} prints\n{printed}"
    wait_until(lambda: not left_of(place), "all processes to end", 60)
