"""The demo: real runs and attacks, gone on with after any stop, and nothing destroyed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedcdp.errors import RunError
from fedcdp.studies.demo import ATTACKS, Demo
from fedcdp.training.saved_run import Trained
from tests.support.small_demo import FEWER, SILENT, SMALLER


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_demo_leaves_ordinary_runs_with_their_attacks(demo_directory: Path) -> None:
    told = json.loads((demo_directory / "demo.json").read_text())
    assert told["finished"] is True
    assert [row["method"] for row in told["table"]] == ["nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay"]
    for row in told["table"]:
        run = demo_directory / row["method"]
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] == row["accuracy"]
        assert {path.name for path in (run / "attacks").iterdir()} == {"type2-clip-aware", "type1-batch", "type0-batch"}
    assert Trained.load(run).evaluate()["accuracy"] == row["accuracy"]


def test_all_methods_are_attacked_on_the_same_examples(demo_directory: Path) -> None:
    originals = []
    for path in sorted(demo_directory.glob("*/attacks/type2-clip-aware/reconstructions.npz")):
        with np.load(path) as stored:
            originals.append(stored["original"])
    assert len(originals) == 4
    assert all(np.array_equal(originals[0], each) for each in originals)


def test_a_finished_demo_is_shown_again_and_not_computed_again(demo_directory: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(demo_directory, tmp_path / "demo"))
    before = times(out)
    Demo(out, SMALLER, FEWER).run(SILENT)
    after = times(out)
    assert {name for name in after if after[name] != before.get(name)} == {"demo.json"}
    assert (out / "demo.json").read_text() == (demo_directory / "demo.json").read_text()


@pytest.mark.slow
def test_a_demo_that_was_killed_anywhere_goes_on_to_the_same_end(demo_directory: Path, tmp_path: Path) -> None:
    """One run half trained, another's attack torn, a third not begun."""
    out = Path(shutil.copytree(demo_directory, tmp_path / "demo"))
    shutil.rmtree(out / "fed-cdp-decay")
    shutil.rmtree(out / "fed-cdp" / "attacks")
    (out / "fed-cdp" / "model.safetensors").unlink()
    (out / "nonprivate" / "attacks" / "type0-batch" / "summary.json").unlink()
    (out / "demo.json").write_text('{"finished": false}')
    assert not Demo(out, SMALLER, FEWER).finished
    Demo(out, SMALLER, FEWER).run(SILENT)
    assert (out / "demo.json").read_text() == (demo_directory / "demo.json").read_text()


@pytest.mark.parametrize("content", ["config.toml", "letter.txt"])
def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / content).write_text("mine")
    with pytest.raises(RunError, match="holds something other than a demo"):
        Demo(tmp_path, SMALLER, FEWER).run(SILENT)
    assert {path.name for path in tmp_path.iterdir()} == {content}


def test_a_demo_of_other_settings_is_left_alone(demo_directory: Path) -> None:
    before = times(demo_directory)
    with pytest.raises(RunError, match="a demo with other settings"):
        Demo(demo_directory, SMALLER | {"plan": SMALLER["plan"] | {"rounds": 4}}, FEWER).run(SILENT)
    assert times(demo_directory) == before


def test_every_reader_attacks_in_the_whole_demo() -> None:
    for noised_only in (False, True):
        assert [each.leak for each in ATTACKS if each.noised_only == noised_only] == ["type2", "type1", "type0"]


def test_what_type_1_and_type_0_read_alike_is_attacked_once_and_told_of_both(demo_directory: Path) -> None:
    for method in ("nonprivate", "fed-cdp"):
        found = [json.loads((demo_directory / method / "attacks" / f"{leak}-batch" / "summary.json").read_text())
                 for leak in ("type1", "type0")]  # fmt: skip
        assert [each["leak"] for each in found] == ["type1", "type0"]
        assert found[0]["distance_mean"] == found[1]["distance_mean"]
