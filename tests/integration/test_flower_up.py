"""`fedcdp deploy up` in the hands of people: Ctrl-C, kill -9, once more, and no process left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fedcdp.accounting.ledger import Ledger
from fedcdp.deploy.site.directory import SiteSettings
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.files.tensors import load_tensors
from fedcdp.training.rundir import RunDirectory
from tests.cli.conftest import Start
from tests.support.flower_site import CANCER, HAS_FLOWER, REPRODUCIBLE, largest_difference, left_of, simulated, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]


def test_stopped_killed_and_started_again_it_ends_as_if_nothing_had_been(tmp_path: Path, start: Start) -> None:
    experiment = experiment_for(2, [CANCER, REPRODUCIBLE])
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment)
    run = RunDirectory(site.run)
    for rounds, number, status in ((1, signal.SIGINT, 1), (2, signal.SIGKILL, -signal.SIGKILL)):
        process = start("-m", "fedcdp", "deploy", "up", site.path)
        wait_until(
            lambda process=process, rounds=rounds: process.poll() is not None or len(run.read_metrics()) >= rounds,  # type: ignore[misc]
            f"round {rounds}",
        )
        assert process.poll() is None, process.communicate()
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == status, stderr
        if number == signal.SIGINT:
            assert "resumes after the last complete round" in stderr
            assert left_of(site.path) == []
        wait_until(lambda: not left_of(site.path), "all processes to end", 60)
    process = start("-m", "fedcdp", "deploy", "up", site.path, "--resume")
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert "ε" in stderr
    assert largest_difference(load_tensors(run.model, "model-1")[0], simulated(experiment)) < 1e-5
    assert Ledger.open(run.ledger).rounds_charged == 3, "under a published seed a repeated round is the same release"

    again = start("-m", "fedcdp", "deploy", "up", site.path)
    _, stderr = again.communicate(timeout=120)
    assert again.returncode == 0, stderr
    assert left_of(site.path) == []


def test_a_server_that_cannot_start_is_named_with_its_log(tmp_path: Path, start: Start) -> None:
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment_for(2, [CANCER]))
    (site.server / "server.pem").write_text("not a certificate")
    process = start("-m", "fedcdp", "deploy", "up", site.path)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert str(site.logs / "superlink.log") in stderr.replace("\n", "")
    assert left_of(site.path) == []
