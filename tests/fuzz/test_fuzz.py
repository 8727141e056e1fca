"""A short campaign of hostile input, the same cases every time; the long one is `make fuzz`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")
if not sys.platform.startswith("linux"):
    pytest.skip("what a case takes is read from /proc", allow_module_level=True)

from tools.fuzz import campaign
from tools.fuzz.watch import Watch

CASES = 25


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Watch]]:
    """The only place that a case may write to, and who watches."""
    place = tmp_path_factory.mktemp("fuzz").resolve()
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))  # --model adds the current directory
        campaign.prepare(place)
        yield place, Watch(place)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.parametrize("target", campaign.TARGETS)
def test_hostile_input_is_refused_in_a_sentence_and_does_nothing_else(target: str, watched: tuple[Path, Watch]) -> None:
    outcome = campaign.campaign(target, CASES, *watched)
    assert outcome.findings == {}


def test_the_watch_sees_what_no_input_may_do(watched: tuple[Path, Watch], tmp_path_factory: pytest.TempPathFactory) -> None:
    from random import Random

    place, watch = watched
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    harmful = {
        "outside its place": lambda *_: (elsewhere / "x").write_text("x"),
        "runs os.system": lambda *_: os.system("true"),
        "control characters": lambda *_: print("\x1b[2J"),
        "KeyError": lambda *_: {}["x"],
        "took": lambda *_: bytearray(os.urandom(1)) * (1500 * 2**20),
        "imports tools.fuzz.canary": lambda *_: __import__("tools.fuzz.canary"),
    }
    for named, attempt in harmful.items():
        assert named in (watch.run(attempt, Random(0)) or ""), named
    assert watch.run(lambda *_: (place / "x").write_text("x"), Random(0)) is None
