"""`fedcdp deploy status --watch`: a line per change, an end with the run or with Ctrl-C."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("cryptography")

from fedcdp.cli import terminal, watch
from fedcdp.cli.deploy import app
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.local_deployment import Deployment
from fedcdp.deploy.site.writer import experiment_for, write


@pytest.fixture
def site(tmp_path: Path) -> Site:
    given = [{"data": {"dataset": "cancer"}, "plan": {"method": "fed-cdp", "rounds": 2, "noise_multiplier": 1.0}}]
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment_for(2, given))
    site.run.mkdir()
    return site


def finish_round(site: Site, number: int) -> None:
    with (site.run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": number, "clients": 2, "learning_rate": 0.1, "accuracy": 0.5}) + "\n")


def end(site: Site) -> None:
    (site.run / "outcome.json").write_text('{"ended": "done", "rounds": 2, "sentence": "all rounds are done"}')


def shown(site: Site, *, is_terminal: bool, **given: Any) -> str:
    """What is printed while rounds are finished, one after the other."""

    def work() -> None:
        for number in (1, 2):
            time.sleep(0.2)
            finish_round(site, number)
        time.sleep(0.2)
        end(site)

    worker = threading.Thread(target=work)
    worker.start()
    console, terminal.stdout = terminal.stdout, Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    try:
        watch.watch(Deployment(site.path), seconds=0.02, **given)
        printed = terminal.stdout.file
        assert isinstance(printed, io.StringIO)
        return printed.getvalue()
    finally:
        terminal.stdout = console
        worker.join()


def test_without_a_terminal_every_change_is_a_line(site: Site) -> None:
    lines = shown(site, is_terminal=False, as_json=False).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["round 0/2", "round 1/2", "round 2/2", "round 2/2"]
    assert lines[1].startswith("round 1/2  validation accuracy 0.5")
    assert lines[-1].endswith("done: all rounds are done")


def test_as_json_every_change_is_an_object(site: Site) -> None:
    lines = [json.loads(line) for line in shown(site, is_terminal=False, as_json=True).splitlines()]
    assert [line["round"] for line in lines] == ["0/2", "1/2", "2/2", "2/2"]


def test_on_a_terminal_a_table_is_refreshed(site: Site) -> None:
    text = shown(site, is_terminal=True, as_json=False)
    assert "Ctrl-C ends this view, not the run" in text
    assert "2/2" in text


def test_ctrl_c_ends_it_with_status_0(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", pressed)
    told = CliRunner().invoke(app, ["status", str(site.path), "--watch"])
    assert told.exit_code == 0
    assert told.output.startswith("round 0/2")
