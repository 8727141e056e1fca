"""Bringing a deployment up, with scripts that only pretend: what is told, what is refused, and that all of it ends."""

from __future__ import annotations

import importlib.util
import json
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedcdp.cli.program import main
from fedcdp.deploy.site import flower_commands
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.local_deployment import Deployment
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.errors import DeploymentError, DeploymentFailedError
from fedcdp.files.installation import install_command

CANCER = {"data": {"dataset": "cancer"}, "plan": {"rounds": 2, "local_steps": 2}}
LISTEN = f"""exec {sys.executable} -c '
import os, socket, time
server = socket.create_server(("127.0.0.1", int(os.environ["FEDCDP_PORT"])))
time.sleep(600)
'"""
SLEEP = "sleep 600 & exec sleep 600"
ROUND = '{"round": %d, "clients": 2, "learning_rate": 0.1, "accuracy": 0.%d}'
JOB = f"""
if [ "$1" = --register-only ]; then exit 0; fi
echo Successfully started run 17
mkdir -p "$here/run"
echo '{ROUND % (1, 5)}' >> "$here/run/metrics.jsonl"
sleep 0.5
echo '{ROUND % (2, 75)}' >> "$here/run/metrics.jsonl"
echo '{{"ended": "done", "rounds": 2, "sentence": "all rounds are done"}}' > "$here/run/outcome.json"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A deployment whose scripts pretend."""
    monkeypatch.setattr(flower_commands, "require_flower", lambda: None)
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment_for(2, [CANCER]))
    _pretend(site, "start-superlink.sh", LISTEN)
    _pretend(site, "run.sh", JOB)
    for number in (1, 2):
        _pretend(site, f"start-node-{number}.sh", SLEEP)
    return site


def _pretend(site: Site, script: str, what: str) -> None:
    (site.path / script).write_text(f'#!/usr/bin/env bash\nhere="{site.path}"\n{what}\n')


def _up(site: Site) -> tuple[list[int], list[str]]:
    rounds: list[int] = []
    told: list[str] = []
    Deployment(site.path).up(lambda row: rounds.append(row["round"]), told.append)
    return rounds, told


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does, no process outlives it: each inherits a mark in its environment."""
    monkeypatch.setenv("FEDCDP_TEST_MARK", str(tmp_path))
    yield
    assert [pid for pid in Path("/proc").glob("[0-9]*") if f"FEDCDP_TEST_MARK={tmp_path}\0" in _environment(pid)] == []


def _environment(process: Path) -> str:
    try:
        return (process / "environ").read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
def test_every_round_is_told_and_the_outcome_read(site: Site) -> None:
    rounds, told = _up(site)
    assert rounds == [1, 2]
    assert told == []
    outcome = Deployment(site.path).outcome(0.0)
    assert (outcome.rounds, outcome.accuracy, outcome.ended) == (2, 0.75, "done")


def test_a_server_that_ends_is_a_failure_that_names_its_log(site: Site) -> None:
    _pretend(site, "start-superlink.sh", "echo broken; exit 3")
    with pytest.raises(DeploymentFailedError, match=r"superlink\.log"):
        _up(site)
    assert "broken" in (site.logs / "superlink.log").read_text()


def test_keys_that_are_not_registered_are_a_failure(site: Site) -> None:
    _pretend(site, "run.sh", "echo no such server; exit 1")
    with pytest.raises(DeploymentFailedError, match=r"register\.log"):
        _up(site)


@pytest.mark.slow
def test_a_lost_node_is_told_and_the_job_goes_on(site: Site) -> None:
    _pretend(site, "start-node-2.sh", "exit 1")
    rounds, told = _up(site)
    assert rounds == [1, 2]
    assert len(told) == 1
    assert "node-2 ended" in told[0]


def test_without_any_node_it_is_a_failure(site: Site) -> None:
    for number in (1, 2):
        _pretend(site, f"start-node-{number}.sh", "exit 1")
    _pretend(site, "run.sh", 'if [ "$1" = --register-only ]; then exit 0; fi; exec sleep 600')
    with pytest.raises(DeploymentFailedError, match=r"all nodes ended.*node-1\.log"):
        _up(site)


def test_a_job_without_an_outcome_is_a_failure_even_after_an_earlier_end(site: Site) -> None:
    site.run.mkdir()
    (site.run / "outcome.json").write_text(json.dumps({"ended": "too-few-clients", "rounds": 0, "sentence": "earlier"}))
    _pretend(site, "run.sh", 'if [ "$1" = --register-only ]; then exit 0; fi; echo it broke')
    with pytest.raises(DeploymentFailedError, match=r"not started.*run\.log"):
        _up(site)


def test_a_model_that_learned_nothing_is_warned_of(site: Site) -> None:
    end = {"ended": "done", "rounds": 2, "sentence": "all rounds are done"}
    site.run.mkdir()
    for warning in (None, "no better than guessing"):
        (site.run / "outcome.json").write_text(json.dumps(end | {"warning": warning}))
        assert Deployment(site.path).outcome(0.0).warning == warning
    (site.run / "outcome.json").write_text(json.dumps(end))  # of version 0.1.0
    assert Deployment(site.path).outcome(0.0).warning is None


def test_a_port_in_use_is_refused(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        site.settings_file.write_text(SiteSettings(nodes=2, port=other.getsockname()[1]).to_toml())
        with pytest.raises(DeploymentError, match="cannot be used"):
            _up(site)


def test_a_deployment_is_up_once(site: Site) -> None:
    with Deployment(site.path)._locked(), pytest.raises(DeploymentError, match="already running"):
        _up(site)


def _ended(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedcdp", "deploy", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_commands_say_one_line_and_exit_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "site"
    assert _ended(monkeypatch, "init", place, "--dataset", "cancer") == 0
    capsys.readouterr()
    without_flower = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flwr" else without_flower(name))
    for arguments, said in (
        (("init", place), "is not empty"),
        (("up", place), install_command("flower")),
        (("up", place, "--resume"), "no run to resume"),
        (("up", tmp_path / "nowhere"), "is not a deployment"),
        (("init", tmp_path / "other", "--nodes", "0"), "nodes: 0"),
        (("init", tmp_path / "other", "--clients", "3"), "clients: 3"),
    ):
        assert _ended(monkeypatch, *arguments) == 2, arguments
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert said in lines[0]


def test_status_tells_how_far_a_run_is(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ended(monkeypatch, "status", site.path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["ended"] == "unfinished"
    _up(site)
    assert _ended(monkeypatch, "status", site.path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rounds"], told["accuracy"], told["ended"], told["epsilon"]) == (2, 0.75, "done", None)


@pytest.mark.parametrize("monitor", [False, True])
def test_processes_can_be_watched_only_if_asked_for(monitor: bool, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine several deployments would use the same ports."""
    monkeypatch.delenv("FEDCDP_MONITOR", raising=False)
    _pretend(site, "start-node-1.sh", f'echo "monitor=[$FEDCDP_MONITOR]"; {SLEEP}')
    Deployment(site.path).up(None, lambda _: None, monitor=monitor)
    assert f"monitor=[{'' if monitor else 'off'}]" in (site.logs / "node-1.log").read_text()
    assert stat.S_IMODE((site.logs / "node-1.log").stat().st_mode) == 0o600
