"""A deployment of two nodes ends in the simulator's model: same plan and seed, real processes, TLS, noise included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedcdp.accounting.ledger import Ledger
from fedcdp.config.experiment import Experiment
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.files.tensors import load_tensors
from fedcdp.training.rundir import RunDirectory
from tests.cli.conftest import Start
from tests.support.flower_site import CANCER, HAS_FLOWER, MNIST5K, REPRODUCIBLE, largest_difference, left_of, simulated

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]


def test_two_nodes_and_three_rounds_give_the_simulators_model(tmp_path: Path, start: Start) -> None:
    experiments = {
        name: experiment_for(2, [each, REPRODUCIBLE]) for name, each in {"cancer": CANCER, "mnist5k": MNIST5K}.items()
    }
    sites = {name: write(tmp_path / name, SiteSettings(nodes=2), each) for name, each in experiments.items()}
    # At the same time: most of it is waiting.
    running = {name: start("-m", "fedcdp", "deploy", "up", site.path, "--json") for name, site in sites.items()}
    for name, process in running.items():
        stdout, stderr = process.communicate(timeout=600)
        assert process.returncode == 0, stderr
        told = json.loads(stdout)
        assert (told["rounds"], told["ended"]) == (3, "done")
        assert told["epsilon"]
        _check(sites[name], experiments[name])


def _check(site: Site, experiment: Experiment) -> None:
    run = RunDirectory(site.run)
    deployed = load_tensors(run.model, "model-1")[0]
    assert [row["clients"] for row in run.read_metrics()] == [2, 2, 2]
    print(f"{site.path.name}: rounds of", ", ".join(f"{row['seconds']:.1f} s" for row in run.read_metrics()))
    assert largest_difference(deployed, simulated(experiment)) < 1e-5
    assert Ledger.open(run.ledger).participations().tolist() == [3, 3]
    for node in site.nodes(2):
        lines = [json.loads(line) for line in (node.state / "ledger.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines if "released" in line] == [0, 1, 2]
    assert left_of(site.path) == []
