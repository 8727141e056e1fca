"""Engine and chunk are measured for a long training, remembered, and change nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import BatchedEngine
from fedcdp.methods import METHODS
from fedcdp.models.networks import build
from fedcdp.training import autotune
from fedcdp.training.autotune import Choice
from fedcdp.training.simulate import simulate
from fedcdp.training.trainers import Trainer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def federation() -> Federation:
    generator = torch.Generator().manual_seed(5)
    data = Dataset(torch.randn(60, 1, 10, 10, generator=generator), torch.randint(3, (60,), generator=generator), 3)
    return partition(Splits("dots", data, data, None, "as drawn"), clients=10, scheme="iid")


@pytest.fixture
def model() -> nn.Module:
    return fedcdp.models.networks.build("cnn", (1, 10, 10), 3)


def plan(**changes: object) -> Plan:
    usual = {
        "rounds": 3,
        "per_round": 6,
        "local_steps": 4,
        "batch_size": 3,
        "noise_multiplier": 0.3,
        "clip": "linear(0.6, 0.3)",
    }
    return Plan(**usual | changes)  # type: ignore[arg-type]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", ["partition", "poisson"])
def test_the_same_seed_gives_the_same_model_from_both_engines_after_three_rounds(model, federation, method, sampling):
    what = plan(method=method, record_sampling=sampling)
    one, other = (simulate(model, federation, what, engine=engine) for engine in ("batched", "functional"))
    assert (weights(one.model) - weights(model)).abs().max() > 1e-3
    torch.testing.assert_close(weights(one.model), weights(other.model), rtol=0, atol=1e-4)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is measured, in order; every training is long, and the functional engine is the faster one, at chunk 4."""
    asked: list[tuple[str, int]] = []

    def seconds(_: object, trainer: Trainer, __: object, clients: int) -> float:
        asked.append((trainer.name, clients))
        return (2.0 if trainer.name == "batched" else 1.0) * (1 + abs(clients - 4))

    monkeypatch.setattr(autotune, "seconds_a_client_step", seconds)
    monkeypatch.setattr(autotune, "_LONG", 1)
    return asked


def test_a_long_training_measures_once(model, federation, measured):
    simulate(model, federation, plan(rounds=1))
    assert measured == [("batched", 6), ("functional", 6), ("functional", 4)]
    simulate(model, federation, plan(rounds=1))
    assert len(measured) == 3
    simulate(model, federation, plan(rounds=1, batch_size=2))
    assert len(measured) == 6


def test_what_is_given_is_not_measured(model, federation, measured):
    simulate(model, federation, plan(rounds=1), engine="batched", chunk=2)
    assert measured == []
    simulate(model, federation, plan(rounds=1), chunk=2)
    assert measured == [("batched", 2), ("functional", 2)]
    simulate(model, federation, plan(rounds=1), engine="functional")
    assert {engine for engine, _ in measured[2:]} == {"functional"}


@pytest.mark.parametrize(
    ("kernel_seconds", "used"), [(1.0, "kernel"), (3.0, "compiled")], ids=["the kernel is faster", "a program would be"]
)
def test_a_long_training_on_a_gpu_takes_the_kernel_where_it_is_the_fastest(monkeypatch, kernel_seconds, used):
    class Gpu:
        type = "cuda"

    class Simulator:
        plan, device, examples = Plan(rounds=100, per_round=10, local_steps=10), Gpu(), None

    engine = BatchedEngine(build("cnn", (1, 10, 10), 3), F.cross_entropy)
    monkeypatch.setattr(autotune, "_measured", lambda *_: Choice("batched", 4, 4.0))
    monkeypatch.setattr(autotune, "refusal", lambda *_: None)
    monkeypatch.setattr(autotune, "seconds_a_client_step", lambda *_: kernel_seconds)
    trainer, chunk = autotune.tuned(Simulator(), {"batched": engine}, None, None, "auto")
    assert (trainer.name, chunk) == (used, 10 if used == "kernel" else 4)


def test_a_short_training_does_not_measure(model, federation, measured, monkeypatch):
    monkeypatch.setattr(autotune, "_LONG", 1000)
    simulate(model, federation, plan(rounds=1))
    assert measured == []


@pytest.mark.parametrize("method", METHODS)
def test_a_measured_training_gives_the_model_of_one_that_is_not(model, federation, method, monkeypatch):
    short = simulate(model, federation, plan(method=method), engine="functional")
    monkeypatch.setattr(autotune, "_LONG", 1)
    long = simulate(model, federation, plan(method=method))
    torch.testing.assert_close(weights(long.model), weights(short.model), rtol=0, atol=1e-4)


def test_a_quantile_clip_can_be_measured(model, federation, monkeypatch):
    monkeypatch.setattr(autotune, "_LONG", 1)
    simulate(model, federation, plan(rounds=1, clip="quantile(0.5, 1)"))
