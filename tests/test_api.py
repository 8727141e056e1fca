"""The Python surface, as a person with a model and data of their own uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedcdp


def clouds(count: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % 3
    return np.random.default_rng(count).normal(size=(count, 4)) + 3.0 * labels[:, None], labels


def test_every_public_name_is_there() -> None:
    for name in fedcdp.__all__:
        assert getattr(fedcdp, name) is not None
    assert len(fedcdp.__all__) == len(set(fedcdp.__all__))


@pytest.mark.parametrize("error", ["DataError", "ModelError", "PlanError", "RunError"])
def test_every_error_of_a_user_is_caught_as_one(error: str) -> None:
    assert issubclass(getattr(fedcdp, error), fedcdp.FedcdpError)


def test_ones_own_model_is_trained_on_ones_own_arrays() -> None:
    federation = fedcdp.partition(clouds(300), clients=20, scheme="shards", classes_per_client=2)
    plan = fedcdp.Plan(method="fed-cdp", clip=fedcdp.linear(6, 2), noise_multiplier=0.1, local_steps=20, batch_size=5)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    run = fedcdp.simulate(model, federation, plan, rounds=10, per_round=20)
    assert isinstance(run, fedcdp.Run)
    assert run.rounds == 10
    inputs, labels = clouds(90)
    with torch.no_grad():
        answers = run.model(torch.tensor(inputs, dtype=torch.float32)).argmax(-1).numpy()
    assert (answers == labels).mean() > 0.6


def test_ones_own_file_is_trained_and_validated(tmp_path: Path) -> None:
    inputs, labels = clouds(120)
    np.savez(tmp_path / "own.npz", x=inputs, y=labels)
    splits = fedcdp.load_file(tmp_path / "own.npz")
    federation = fedcdp.partition(splits, clients=5, scheme="dirichlet", alpha=1.0)
    plan = fedcdp.Plan(method="fed-sdp", noise_multiplier=0.01, clip=1)
    run = fedcdp.simulate(nn.Linear(4, 3), federation, plan, rounds=3, per_round=5)
    assert run.accuracy == run.metrics[-1]["accuracy"]
    assert run.accuracy > 0.4


def test_a_benchmark_is_trained_in_five_lines() -> None:
    splits = fedcdp.load("cancer")
    federation = fedcdp.partition(splits, clients=10, scheme="iid")
    plan = fedcdp.Plan(method="nonprivate", rounds=5, per_round=10, local_steps=10, learning_rate=0.1)
    run = fedcdp.simulate(nn.Linear(30, 2), federation, plan)
    assert run.accuracy is not None
    assert run.accuracy > 0.9


def test_the_schedules_are_values_that_a_plan_takes() -> None:
    for make in (fedcdp.linear, fedcdp.exponential, fedcdp.cosine):
        plan = fedcdp.Plan(clip=make(6, 2), rounds=11)
        assert (plan.clip_at(0), plan.clip_at(10)) == (6, pytest.approx(2))
    assert fedcdp.Plan(clip=fedcdp.constant(3)).clip_at(5) == 3
    follows = fedcdp.Plan(clip=fedcdp.proportional(4), learning_rate=fedcdp.linear(0.2, 0.1), rounds=2)
    assert (follows.clip_at(0), follows.clip_at(1)) == (4, 2)


def test_the_core_is_imported_without_the_command_line_or_any_extra() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import fedcdp, fedcdp.data, fedcdp.training.simulate\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(fedcdp.__file__).parents[1])}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loaded = set(shown.stdout.split())
    assert {"fedcdp.data", "fedcdp.training.simulate"} <= loaded
    assert not loaded & {"typer", "rich", "click", "flwr", "dp_accounting", "onnx", "tensorboard", "sklearn", "PIL"}
    assert "urllib.request" not in loaded
