"""A run from Python on the command line: evaluated, exported, attacked, resumed, reported and accounted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import fedcdp

Cli = Callable[..., Any]
FACTORY = """
import torch
from torch import nn


def make(input_shape, classes):
    return nn.Sequential(nn.Linear(input_shape[0], 5), nn.Tanh(), nn.Linear(5, classes))


def other(input_shape, classes):
    return nn.Sequential(nn.Linear(input_shape[0], 6), nn.Tanh(), nn.Linear(6, classes))
"""
PLAN = fedcdp.Plan(rounds=4, per_round=2, local_steps=2, batch_size=5, noise_multiplier=0.7, seed=3)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.fixture(scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, and a run from Python on it that was stopped after two rounds."""
    place = tmp_path_factory.mktemp("python")
    generator = np.random.default_rng(0)
    rows = [f"{'ABC'[i % 3]},{generator.random():.3f},{generator.random():.3f},{i % 2}" for i in range(90)]
    (place / "wards.csv").write_text("\n".join(["ward,age,dose,readmitted", *rows]) + "\n")
    fedcdp.simulate(network(), federation(place), PLAN, out=place / "run", most_releases=2)
    return place


def federation(place: Path) -> fedcdp.Federation:
    return fedcdp.partition(fedcdp.load_file(place / "wards.csv", client="ward", label="readmitted"), seed=PLAN.seed)


@pytest.fixture
def place(_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = Path(shutil.copytree(_place, tmp_path / "wards"))
    (copy / "wards_network.py").write_text(FACTORY)
    monkeypatch.chdir(copy)
    monkeypatch.syspath_prepend(copy)
    return copy


NAMED = ["--model", "wards_network:make", "--data", "wards.csv", "--client-column", "ward", "--label-column", "readmitted"]


def test_it_is_evaluated_as_in_python(cli: Cli, place: Path) -> None:
    outcome = cli("evaluate", "run", *NAMED, "--per-client", "--json")
    assert outcome.status == 0, outcome.stderr
    run = fedcdp.open_run(place / "run", network(), federation(place))
    assert json.loads(outcome.stdout) == run.evaluate(per_client=True)


def test_it_is_exported_as_in_python(cli: Cli, place: Path) -> None:
    outcome = cli("export", "run", *NAMED, "--to", "model.safetensors")
    assert outcome.status == 0, outcome.stderr
    run = fedcdp.open_run(place / "run", network(), federation(place))
    stored = load_file(place / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in run.model.state_dict().items())
    assert cli("export", "run", *NAMED, "--to", "rounds.csv").status == 0
    assert (place / "rounds.csv").read_text().startswith("round,")


def test_it_is_attacked_and_keeps_the_result(cli: Cli, place: Path) -> None:
    outcome = cli("attack", "--run", "run", *NAMED, "--attack", "analytic", "--victims", 3, "--json")
    assert outcome.status == 0, outcome.stderr
    assert json.loads(outcome.stdout)["network"] == "wards_network:make"
    assert (place / "run" / "attacks" / "type2-analytic" / "summary.json").exists()


def test_it_is_resumed_as_in_python(cli: Cli, place: Path) -> None:
    shutil.copytree(place / "run", place / "same")
    outcome = cli("train", "--resume", "--out", "run", *NAMED, "--json", "--quiet")
    assert outcome.status == 0, outcome.stderr
    assert json.loads(outcome.stdout)["rounds"] == 4
    resumed = fedcdp.open_run(place / "same", network(), federation(place)).resume()
    opened = fedcdp.open_run(place / "run", network(), federation(place))
    assert all(torch.equal(opened.model.state_dict()[name], value) for name, value in resumed.model.state_dict().items())
    assert opened.privacy().as_json() == resumed.privacy().as_json()


def test_it_is_reported_and_accounted_without_its_network(cli: Cli, place: Path) -> None:
    assert cli("report", "run", "--quiet").status == 0
    outcome = cli("account", "--run", "run", "--json")
    assert outcome.status == 0, outcome.stderr
    spent = [row["epsilon_used"] for row in json.loads(outcome.stdout)["rows"] if row["adversary"] == "server"]
    run = fedcdp.open_run(place / "run", network(), federation(place))
    assert spent[0] == pytest.approx(run.privacy().row("server").epsilon_used)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "name them with --model and --data, or open the run from Python with fedcdp.open_run"),
        (NAMED[:2], "name them with --model and --data"),
        (["--model", "wards_network:other", *NAMED[2:]], "holds other tensors than the network"),
        (
            [*NAMED[:4], "--label-column", "readmitted", "--drop-columns", "ward"],
            "federation: it is not that of the run in run: it has clients",
        ),
        ([*NAMED, "--drop-columns", "dose"], "it has inputs of shape [1], not of shape [2]"),
        ([*NAMED, "--clip", "3"], "clip: the run in run was started with 4, not 3"),
    ],
)
def test_what_does_not_belong_to_it_is_refused(cli: Cli, place: Path, given: list[str], sentence: str) -> None:
    before = (place / "run" / "ledger.jsonl").read_bytes()
    commands = [["evaluate", "run"], ["export", "run", "--to", "m.pt"], ["attack", "--run", "run"],
                ["train", "--resume", "--out", "run"]]  # fmt: skip
    for command in commands:
        outcome = cli(*command, *given)
        assert (outcome.status, outcome.stdout) == (2, ""), command
        assert sentence in " ".join(outcome.stderr.split()), command
    assert (place / "run" / "ledger.jsonl").read_bytes() == before


def test_a_loss_of_its_own_needs_python(cli: Cli, place: Path) -> None:
    def smoothed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.1)

    fedcdp.simulate(network(), federation(place), PLAN, out=place / "own", most_releases=1, loss=smoothed)
    for command in (["train", "--resume", "--out", "own"], ["attack", "--run", "own"]):
        outcome = cli(*command, *NAMED)
        assert outcome.status == 2
        assert "a run from Python with a loss of its own" in " ".join(outcome.stderr.split())
    assert cli("evaluate", "own", *NAMED, "--json").status == 0


def test_code_named_in_its_config_is_not_run(cli: Cli, place: Path) -> None:
    config = place / "run" / "config.toml"
    (place / "evil.py").write_text("open('ran', 'w')\n")
    config.write_text(config.read_text() + '\n[model]\nnetwork = "evil:make"\n')
    assert cli("evaluate", "run").status == 2
    assert cli("evaluate", "run", *NAMED).status == 0
    assert not (place / "ran").exists()
