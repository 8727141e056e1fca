"""Engine and chunk are measured for a long training, remembered, and change nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp import Plan, simulate, tuning
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.methods import METHODS


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
    return fedcdp.models.build("cnn", (1, 10, 10), 3)


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

    def seconds(_: object, engine: object, __: object, clients: int) -> float:
        asked.append((type(engine).__name__, clients))
        return (2.0 if type(engine).__name__ == "BatchedEngine" else 1.0) * (1 + abs(clients - 4))

    monkeypatch.setattr(tuning, "seconds_a_client_step", seconds)
    monkeypatch.setattr(tuning, "_LONG", 1)
    return asked


def test_a_long_training_measures_once(model, federation, measured):
    simulate(model, federation, plan(rounds=1))
    assert measured == [("BatchedEngine", 6), ("FunctionalEngine", 6), ("FunctionalEngine", 4)]
    simulate(model, federation, plan(rounds=1))
    assert len(measured) == 3
    simulate(model, federation, plan(rounds=1, batch_size=2))
    assert len(measured) == 6


def test_what_is_given_is_not_measured(model, federation, measured):
    simulate(model, federation, plan(rounds=1), engine="batched", chunk=2)
    assert measured == []
    simulate(model, federation, plan(rounds=1), chunk=2)
    assert measured == [("BatchedEngine", 2), ("FunctionalEngine", 2)]
    simulate(model, federation, plan(rounds=1), engine="functional")
    assert {engine for engine, _ in measured[2:]} == {"FunctionalEngine"}


def test_a_short_training_does_not_measure(model, federation, measured, monkeypatch):
    monkeypatch.setattr(tuning, "_LONG", 1000)
    simulate(model, federation, plan(rounds=1))
    assert measured == []


@pytest.mark.parametrize("method", METHODS)
def test_a_measured_training_gives_the_model_of_one_that_is_not(model, federation, method, monkeypatch):
    short = simulate(model, federation, plan(method=method), engine="functional")
    monkeypatch.setattr(tuning, "_LONG", 1)
    long = simulate(model, federation, plan(method=method))
    torch.testing.assert_close(weights(long.model), weights(short.model), rtol=0, atol=1e-4)


def test_a_quantile_clip_can_be_measured(model, federation, monkeypatch):
    monkeypatch.setattr(tuning, "_LONG", 1)
    simulate(model, federation, plan(rounds=1, clip="quantile(0.5, 1)"))
