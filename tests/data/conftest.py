"""Every test has its own empty cache, no data directory and no network; `full_data` is the one way to real files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import pytest

from fedcdp.data import fetch

# Read before the fixture below hides it from the tests.
FULL_DATA = os.environ.get("FEDCDP_DATA")


@pytest.fixture
def full_data() -> Path:
    """The directory with the full datasets, for tests marked `full`."""
    if not FULL_DATA:
        pytest.skip("FEDCDP_DATA does not name a directory with the full datasets")
    return Path(FULL_DATA)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing in the environment or on the network to fall back on."""

    def offline(url: str) -> IO[bytes]:
        raise OSError(f"the network is down for {url}")

    folder = tmp_path / "cache"
    monkeypatch.delenv("FEDCDP_DATA", raising=False)
    monkeypatch.setenv("FEDCDP_CACHE", str(folder))
    monkeypatch.setattr(fetch, "open_https", offline)
    return folder
