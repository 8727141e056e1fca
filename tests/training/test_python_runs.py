"""Runs made in Python: evaluated, exported, reopened, resumed and attacked, in memory and from their directories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.config.experiment import assemble
from fedcdp.errors import PlanError, RunError
from fedcdp.training.trainer import train_experiment

PLAN = fedcdp.Plan(rounds=5, per_round=3, local_steps=2, batch_size=6, noise_multiplier=0.5, clip_mode="flat")
VARIANTS = {
    "seeded": PLAN,
    "average and quantile": PLAN.but(ema=0.3, clip=fedcdp.quantile(0.5, 2.0)),
    "scaled inputs": PLAN.but(scaling_noise=20.0),
}


def clouds(count: int, features: int = 4) -> fedcdp.Dataset:
    labels = np.arange(count) % 3
    inputs = np.random.default_rng(count).normal(size=(count, features)) / 4 + labels[:, None] / 3
    return fedcdp.Dataset(torch.tensor(inputs, dtype=torch.float32).clamp(-1, 1), torch.tensor(labels), 3)


@pytest.fixture
def federation() -> fedcdp.Federation:
    sites = {"bonn": clouds(30), "ulm": clouds(45), "jena": clouds(60), "graz": clouds(33)}
    return fedcdp.Federation.from_datasets(sites)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def weights(run: fedcdp.Run) -> Tensor:
    return torch.cat([value.flatten() for value in run.model.state_dict().values()])


# Evaluate and export ----------------------------------------------------------------------------------------------------


def test_a_run_evaluates_itself(federation: fedcdp.Federation, model: nn.Module) -> None:
    def share_of_zeros(outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
        return (outputs.argmax(1) == 0).float().mean()

    run = fedcdp.simulate(model, federation, PLAN, metrics={"zeros": share_of_zeros})
    found = run.evaluate(per_client=True)
    assert {"accuracy": found["accuracy"]} | found["metrics"] == pytest.approx(run.scores)
    assert found["clients"] == run.client_scores
    assert not run.reads_training_records("validation", per_client=True)
    assert run.evaluate("train")["examples"] == len(federation.train)
    with pytest.raises(RunError, match="split: the federation has train, validation, not 'test'"):
        run.evaluate("test")


def test_a_run_evaluates_its_own_loss(federation: fedcdp.Federation, model: nn.Module) -> None:
    def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.3)

    run = fedcdp.simulate(model, federation, PLAN, loss=smoothed)
    assert run.evaluate()["metrics"]["loss"] == pytest.approx(run.scores["loss"])


def test_evaluation_and_export_leave_no_record_in_the_model(tmp_path: Path) -> None:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            with torch.no_grad():
                self.seen = self.seen + x.mean(0)
            return self.layer(x)

    run = fedcdp.simulate(Keeper(), fedcdp.partition(clouds(60), clients=4, scheme="iid"), PLAN.but(method="nonprivate"))
    run.evaluate("train")
    run.export(tmp_path / "model.pt")
    assert not hasattr(run.model, "last")
    assert not run.model.get_buffer("seen").any()


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.torchscript", "m.csv", "board"])
def test_the_suffix_chooses_the_format(name: str, federation: fedcdp.Federation, model: nn.Module, tmp_path: Path) -> None:
    if name == "board":
        pytest.importorskip("tensorboard")
    run = fedcdp.simulate(model, federation, PLAN)
    path = run.export(tmp_path / name)
    assert path.is_dir() if name == "board" else path.stat().st_size > 100
    with pytest.raises(RunError, match="already exists; nothing was overwritten"):
        run.export(path)


def test_a_suffix_that_names_nothing_is_refused(federation: fedcdp.Federation, model: nn.Module, tmp_path: Path) -> None:
    run = fedcdp.simulate(model, federation, PLAN)
    with pytest.raises(RunError, match=r"format: the suffix of m.pickle names none; use .safetensors, .pt"):
        run.export(tmp_path / "m.pickle")
    assert run.export(tmp_path / "m.weights", format="safetensors").exists()


# Resume -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", ["memory", "directory", "reopened", "simulate"])
def test_a_stopped_run_ends_where_a_whole_one_does(
    how: str, variant: str, federation: fedcdp.Federation, model: nn.Module, tmp_path: Path
) -> None:
    plan = VARIANTS[variant]
    whole = fedcdp.simulate(model, federation, plan)
    out = None if how == "memory" else tmp_path / "run"
    limit = 2 if plan.scaling_noise is None else 3
    run = fedcdp.simulate(model, federation, plan, out=out, most_releases=limit)
    assert run.rounds == 2
    if how == "reopened":
        run = fedcdp.open_run(tmp_path / "run", model, federation)
        assert (run.rounds, run.seconds) == (2, 0.0)
    if how == "simulate":
        resumed = fedcdp.simulate(model, federation, out=out, resume=True)
    else:
        assert run.resume(rounds=1).rounds == 3
        resumed = run.resume()
    assert torch.equal(weights(resumed), weights(whole))
    assert [charge.round for charge in resumed.charges] == [charge.round for charge in whole.charges]
    assert resumed.participations.tolist() == whole.participations.tolist()
    assert resumed.privacy().as_json() == whole.privacy().as_json()
    assert [row["round"] for row in resumed.metrics] == [1, 2, 3, 4, 5]
    assert (run.rounds, run.releases, len(run.metrics)) == (2, limit, 2)  # it stays as it was


def test_whatever_is_resumed_in_memory_every_release_counts(federation: fedcdp.Federation, model: nn.Module) -> None:
    run = fedcdp.simulate(model, federation, PLAN.but(secure_noise=True), most_releases=2)
    first = run.resume(rounds=1)
    second = run.resume(rounds=1)  # not a second third round beside the first one
    assert (first.rounds, second.rounds) == (3, 4)
    assert [charge.round for charge in second.charges] == [0, 1, 2, 3]


def test_a_round_interrupted_in_memory_is_charged_again(
    federation: fedcdp.Federation, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fedcdp.simulate(model, federation, PLAN.but(secure_noise=True), most_releases=2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedcdp.training.rounds.Simulator.round", killed)
        with pytest.raises(KeyboardInterrupt):
            run.resume()
    assert [charge.round for charge in run.resume().charges] == [0, 1, 2, 2, 3, 4]


def test_the_budget_of_a_run_holds_when_it_is_resumed(federation: fedcdp.Federation, model: nn.Module) -> None:
    run = fedcdp.simulate(model, federation, PLAN, budget=lambda rounds: len(rounds) <= 3, most_releases=1)
    assert run.resume().rounds == 3
    assert run.resume(budget=lambda rounds: len(rounds) <= 4).rounds == 4


def test_a_limit_on_epsilon_holds_when_a_command_line_run_is_resumed(tmp_path: Path) -> None:
    settings = {
        "data": {"dataset": "cancer", "clients": 8, "scaling": "public"},
        "plan": {"rounds": 20, "per_round": 4, "local_steps": 1, "noise_multiplier": 0.1, "clip_mode": "flat"},
        "run": {"max_epsilon": 10.0},
    }
    train_experiment(assemble(settings), tmp_path / "run", quiet=True, most_releases=1)
    run = fedcdp.open_run(tmp_path / "run").resume()
    assert 1 < run.rounds < 20
    assert run.privacy().row("server").epsilon <= 10.0


@pytest.mark.slow
def test_a_killed_run_is_resumed_after_a_restart(tmp_path: Path) -> None:
    code = (
        "import fedcdp, os, signal\n"
        "from torch import nn\n"
        "federation = fedcdp.partition(fedcdp.load('cancer'), clients=5, scheme='iid')\n"
        "plan = fedcdp.Plan(rounds=4, per_round=2, local_steps=1)\n"
        "def killed(row):\n"
        "    row['round'] == 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "fedcdp.simulate(nn.Linear(30, 2), federation, plan, out='run', progress=killed)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=dict(os.environ), check=False)
    assert ended.returncode == -signal.SIGKILL
    federation = fedcdp.partition(fedcdp.load("cancer"), clients=5, scheme="iid")
    run = fedcdp.open_run(tmp_path / "run", nn.Linear(30, 2), federation)
    assert (run.rounds, run.scores) == (2, {})
    assert run.resume().rounds == 4


def test_a_model_older_than_the_checkpoint_is_not_taken(
    federation: fedcdp.Federation, model: nn.Module, tmp_path: Path
) -> None:
    run = fedcdp.simulate(model, federation, PLAN, out=tmp_path / "run", most_releases=1)

    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.resume(progress=stop)
    opened = fedcdp.open_run(tmp_path / "run", model, federation)
    assert opened.rounds == 3
    assert torch.equal(weights(opened), weights(fedcdp.simulate(model, federation, PLAN, most_releases=3)))


# Open -------------------------------------------------------------------------------------------------------------------


def test_a_reopened_run_is_attacked_like_the_run(federation: fedcdp.Federation, model: nn.Module, tmp_path: Path) -> None:
    run = fedcdp.simulate(model, federation, PLAN, out=tmp_path / "run")
    opened = fedcdp.open_run(tmp_path / "run", model, federation)
    found = [fedcdp.attack(each, victims=3, attack="analytic").summary() | {"seconds": 0} for each in (run, opened)]
    assert found[0] == found[1]
    assert opened.evaluate() == run.evaluate()
    assert fedcdp.report([opened], tmp_path / "report.html").exists()


def other_names(federation: fedcdp.Federation) -> fedcdp.Federation:
    names = iter("abcd")
    data = {next(names): federation.train.take(torch.tensor(federation.indices(client))) for client in range(4)}
    return fedcdp.Federation.from_datasets(data, validation_fraction=0)


OTHERS: dict[str, Callable[[fedcdp.Federation], tuple[nn.Module, fedcdp.Federation]]] = {
    r"federation: it is not that of the run in .*: it has clients 3, not 4": lambda _: (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        fedcdp.partition(clouds(60), clients=3, scheme="iid"),
    ),
    r"federation: .* it has inputs of shape \[5\], not of shape \[4\]": lambda _: (
        nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
        fedcdp.partition(clouds(60, 5), clients=4, scheme="iid"),
    ),
    r"federation: .* it has task regression, not classification": lambda _: (
        nn.Linear(4, 1),
        fedcdp.partition(fedcdp.Dataset(torch.rand(60, 4), torch.rand(60), task="regression"), clients=4, scheme="iid"),
    ),
    r"ledger.jsonl belongs to another run: its population has names = \['bonn'": lambda federation: (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        other_names(federation),
    ),
    r"holds other tensors than the network": lambda federation: (
        nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)),
        federation,
    ),
}


@pytest.mark.parametrize("sentence", OTHERS)
def test_another_model_or_federation_is_refused(
    sentence: str, federation: fedcdp.Federation, model: nn.Module, tmp_path: Path
) -> None:
    fedcdp.simulate(model, federation, PLAN, out=tmp_path / "run", most_releases=1)
    other = OTHERS[sentence](federation)
    with pytest.raises(RunError, match=sentence):
        fedcdp.open_run(tmp_path / "run", *other)
    with pytest.raises(RunError):
        fedcdp.simulate(*other, out=tmp_path / "run", resume=True)


def test_other_frozen_weights_are_refused(federation: fedcdp.Federation, tmp_path: Path) -> None:
    def frozen(value: float) -> nn.Module:
        network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        nn.init.constant_(network[0].weight, value)
        nn.init.zeros_(network[0].bias)
        network[0].requires_grad_(False)
        return network

    fedcdp.simulate(frozen(0.5), federation, PLAN, out=tmp_path / "run", most_releases=1)
    assert fedcdp.open_run(tmp_path / "run", frozen(0.5), federation).rounds == 1
    with pytest.raises(RunError, match=r"model: it is not that of the run in .*: it has other fixed tensors"):
        fedcdp.open_run(tmp_path / "run", frozen(0.6), federation)


def test_what_a_run_needs_again_is_asked_for(federation: fedcdp.Federation, model: nn.Module, tmp_path: Path) -> None:
    def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.1)

    fedcdp.simulate(model, federation, PLAN, out=tmp_path / "run", most_releases=2, loss=smoothed)
    with pytest.raises(RunError, match=r"model, federation: those of the run in .* came from Python; give them again"):
        fedcdp.open_run(tmp_path / "run")
    with pytest.raises(RunError, match=r"loss: the run in .* was trained with a loss of its own; give it again"):
        fedcdp.open_run(tmp_path / "run", model, federation)
    resumed = fedcdp.open_run(tmp_path / "run", model, federation, loss=smoothed).resume()
    assert torch.equal(weights(resumed), weights(fedcdp.simulate(model, federation, PLAN, loss=smoothed)))


def test_a_command_line_run_takes_no_model(federation: fedcdp.Federation, model: nn.Module, tmp_path: Path) -> None:
    settings = {"data": {"dataset": "cancer", "clients": 8}, "plan": {"rounds": 2, "per_round": 2, "local_steps": 1}}
    run = train_experiment(assemble(settings), tmp_path / "run", quiet=True, most_releases=1)
    with pytest.raises(RunError, match="has its own; leave them out"):
        fedcdp.open_run(tmp_path / "run", model, federation)
    opened = fedcdp.open_run(tmp_path / "run")
    assert opened.privacy().as_json() == run.privacy().as_json()
    assert opened.resume().rounds == 2


def test_without_a_ledger_nobody_knows_what_was_released(
    federation: fedcdp.Federation, model: nn.Module, tmp_path: Path
) -> None:
    fedcdp.simulate(model, federation, PLAN, out=tmp_path / "run")
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(RunError, match="has no ledger, so nobody knows what the run has released"):
        fedcdp.open_run(tmp_path / "run", model, federation)


def test_a_python_run_of_the_first_release_opens(federation: fedcdp.Federation, model: nn.Module, tmp_path: Path) -> None:
    run = fedcdp.simulate(model, federation, PLAN, out=tmp_path / "run", most_releases=2)
    config = tmp_path / "run" / "config.toml"
    plan = config.read_text().partition("[plan]")[2]
    config.write_text(f"# network and data came from Python\npython = {json.dumps(federation.describe())}\n[plan]{plan}")
    opened = fedcdp.open_run(tmp_path / "run", model, federation)
    assert (opened.rounds, opened.plan) == (2, run.plan)
    assert opened.resume().rounds == 5


def test_the_config_of_a_run_holds_no_trace_of_records(model: nn.Module, tmp_path: Path) -> None:
    """Two federations of other records with the same public facts have the same file."""
    written = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        data = fedcdp.Dataset(torch.randn(60, 4, generator=generator), torch.arange(60) % 3, 3)
        federation = fedcdp.partition(data, clients=4, scheme="iid")
        fedcdp.simulate(model, federation, PLAN, out=tmp_path / str(seed), most_releases=1)
        written.append((tmp_path / str(seed) / "config.toml").read_text())
    assert written[0] == written[1]


# Calibrate --------------------------------------------------------------------------------------------------------------


def test_a_plan_is_calibrated_with_the_smallest_noise(model: nn.Module) -> None:
    federation = fedcdp.partition(clouds(60), clients=3, scheme="iid")
    plan = fedcdp.calibrate(PLAN.but(clip_mode="layer", local_steps=1), federation, model, target_epsilon=3, delta=1e-6)
    assert (plan.delta, plan.clip_mode) == (1e-6, "layer")
    reached = plan.privacy(federation, model=model).row("server").epsilon
    weaker = plan.but(noise_multiplier=plan.noise_multiplier * 0.995)
    assert reached <= 3 < weaker.privacy(federation, model=model).row("server").epsilon


@pytest.mark.parametrize(
    ("changes", "given", "sentence"),
    [
        ({"method": "nonprivate"}, {}, "method: nonprivate has no finite ε, whatever the noise"),
        ({"noise": "batch"}, {"adversary": "example"}, "no noise multiplier gives ε = 3 against example: "),
        ({}, {"adversary": "nobody"}, "adversary: fed-cdp has no row nobody/record/zero-out; it has server/record"),
        ({}, {"unit": "house"}, "adversary: fed-cdp has no row server/house/zero-out"),
        ({"scaling_noise": 0.5}, {}, "no noise multiplier gives ε = 3 against server"),
        ({}, {"target_epsilon": -1.0}, r"epsilon: -1.0 is not allowed; it must be a positive number"),
        ({}, {"delta": 2.0}, "delta: 2.0 is not allowed"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_a_sentence(
    changes: dict[str, Any], given: dict[str, Any], sentence: str, federation: fedcdp.Federation, model: nn.Module
) -> None:
    with pytest.raises(PlanError, match=sentence) as refused:
        fedcdp.calibrate(PLAN.but(**changes), federation, model, **{"target_epsilon": 3.0} | given)
    assert "\n" not in str(refused.value)
