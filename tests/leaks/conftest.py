"""What the tests of leaks share: neighbouring data, and two runs on them under watch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_output import Seen, hold_the_release, stop_the_clocks, watched


@pytest.fixture
def run_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Seen]]:
    """Runs an action on each of several inputs, each in a fresh directory of the same looks; gives what each let out."""

    def twice(action: Callable[[Any], object], inputs: list[Any], hold: bool = True) -> list[Seen]:
        seen = []
        for number, given in enumerate(inputs):
            place = tmp_path / "place"  # the same for all: a configuration names the file of its data
            (place / "tmp").mkdir(parents=True)
            with monkeypatch.context() as patch:
                patch.chdir(place)
                patch.setenv("FEDCDP_CACHE", "cache")
                patch.setattr(tempfile, "tempdir", str(place / "tmp"))
                stop_the_clocks(patch)
                if hold:
                    hold_the_release(patch)
                with watched(place, capfd.readouterr) as found:
                    action(given)
            found.place = place.rename(tmp_path / f"{number}")
            seen.append(found)
        return seen

    return twice
