"""`fedcdp report` and `fedcdp demo` as a user meets them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcdp.studies import demo

Cli = Callable[..., Any]


def said(outcome: Any) -> str:
    return " ".join((outcome.stdout + outcome.stderr).split())


def test_a_run_gets_its_page_beside_its_other_files(cli: Cli, run: Path) -> None:
    outcome = cli("report", run)
    assert outcome.status == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-1] == str(run / "report.html")
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "Fed-CDP" in text
    assert "private records" not in said(outcome)
    assert "how many of the attacked examples the adversary reconstructed" in said(outcome)
    assert cli("report", run, "--quiet").stdout.splitlines() == [str(run / "report.html")]


def test_several_runs_are_compared_on_one_page(cli: Cli, run: Path, workplace: Path) -> None:
    other = Path(shutil.copytree(run, workplace / "other"))
    outcome = cli("report", run, other, "--out", "both.html")
    assert outcome.status == 0, outcome.stderr
    text = Path("both.html").read_text(encoding="utf-8")
    assert "Fed-CDP, run" in text
    assert "Fed-CDP, other" in text


def test_a_page_with_images_of_ones_own_says_that_they_are_private_records(cli: Cli) -> None:
    random = np.random.default_rng(2)
    np.savez("faces.npz", x=random.random((60, 1, 12, 12), dtype=np.float32), y=np.arange(60) % 3)
    options = ["--method", "nonprivate", "--network", "mlp", "--attack", "cpl", "--iterations", 2, "--victims", 2]
    attacked = cli("attack", "--data", "faces.npz", *options, "--out", "leak", "--quiet")
    assert attacked.status == 0, attacked.stderr
    outcome = cli("report", "leak", "--out", "page.html")
    assert outcome.status == 0, outcome.stderr
    assert "the page contains private records" in said(outcome)
    assert "This page contains private records." in Path("page.html").read_text(encoding="utf-8")


def test_a_page_about_a_table_holds_no_record_of_it(cli: Cli, own_npz: Path) -> None:
    attacked = cli("attack", "--data", own_npz, "--method", "nonprivate", "--victims", 2, "--out", "leak", "--quiet")
    assert attacked.status == 0, attacked.stderr
    outcome = cli("report", "leak", "--out", "page.html")
    assert outcome.status == 0, outcome.stderr
    assert "2/2" in said(outcome)  # a table has no picture, and so no original on the page
    assert "private records" not in said(outcome)


def test_an_unfinished_run_is_shown_and_said_to_be_unfinished(cli: Cli, run: Path) -> None:
    (run / "model.safetensors").unlink()
    outcome = cli("report", run)
    assert outcome.status == 0
    assert "run is not finished: the page shows 3 of 3 rounds" in said(outcome)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nosuch"], "nosuch does not exist"),
        (["own.npz"], "own.npz is not a directory"),
        (["empty"], "empty is neither a run directory (no config.toml) nor an attack's (no summary.json)"),
        (["run", "--out", "empty"], "empty is a directory; name the file to write"),
        (["run", "--out", "no/such/page.html"], "there is no directory"),
        (["run", "--out", "own.npz"], "already exists and is not a page of this program"),
        (["begun"], "begun has nothing to show yet: not one round is done"),
        (["torn"], "is not what fedcdp attack writes"),
    ],
)
def test_bad_input_gets_one_line(cli: Cli, run: Path, own_npz: Path, arguments: list[str], sentence: str) -> None:
    Path("empty").mkdir()
    Path("begun").mkdir()
    shutil.copy(run / "config.toml", "begun/config.toml")
    Path("torn").mkdir()
    Path("torn/summary.json").write_text("[]")
    before = own_npz.read_bytes()
    outcome = cli("report", *arguments)
    assert (outcome.status, outcome.stdout) == (2, "")
    assert outcome.stderr.count("\n") == 1
    assert sentence in outcome.stderr
    assert own_npz.read_bytes() == before


def test_a_demo_does_not_take_a_directory_that_is_not_its_own(cli: Cli, run: Path) -> None:
    outcome = cli("demo", "--out", run)
    assert outcome.status == 2
    assert outcome.stderr.splitlines()[-1].endswith("holds something other than a demo; choose another directory")
    assert not (run / "demo.json").exists()


def test_a_demo_that_is_stopped_says_how_to_go_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train_experiment", stopped)
    outcome = cli("demo", "--out", "demo", "--quiet")
    assert outcome.status == 1
    assert "fedcdp demo --out demo resumes it" in said(outcome)
