"""Engine and chunk are measured for a long training, remembered, and change nothing but rounding."""

from __future__ import annotations

import math
from importlib.util import find_spec
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
from fedcdp.training.local_engines import Examples, LocalEngine
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State
from fedcdp.training.simulate import simulate


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

    def seconds(made: Simulator, _: State) -> float:
        asked.append((made.local_engine.name, made.chunk))
        return (2.0 if made.local_engine.name == "batched" else 1.0) * (1 + abs(made.chunk - 4))

    monkeypatch.setattr(Simulator, "seconds_a_client_step", seconds)
    monkeypatch.setattr(autotune, "_LONG", 1)
    return asked


def test_a_long_training_measures_once(model, federation, measured):
    run = simulate(model, federation, plan(rounds=1))
    assert measured == [("batched", 6), ("functional", 6), ("functional", 4)]
    assert (run.engine, run.chunk) == ("functional", 4)
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


class OnAGpu:
    """What is asked of training data before any is read, with the answers of a GPU's."""

    is_cuda, device, shape, dtype = True, torch.device("cpu"), torch.Size([60]), torch.int64


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("step", "by_kernel", "used", "at_once"),
    [(4e-3, 1e-3, "kernel", 10), (4e-3, 3e-3, "compiled", 4), (4e-5, 1e-5, "kernel", 10), (4e-6, 1e-6, "batched", 4)],
    ids=["the kernel is faster", "a program would be", "40 s by the engine", "4 s by the engine"],
)
def test_a_long_training_on_a_gpu_takes_the_fastest(step, by_kernel, used, at_once):
    """A million steps, fastest with four clients at once; a program is expected to take about half of the time."""

    def seconds(local_engine: LocalEngine, clients: int) -> float:
        return by_kernel if local_engine.name == "kernel" else step * (1 + abs(clients - 4))

    engine = BatchedEngine(build("cnn", (1, 10, 10), 3), F.cross_entropy)
    examples = Examples(torch.zeros(60, 1, 10, 10), OnAGpu())  # type: ignore[arg-type]
    local_engine, chunk = autotune.choose_engine(
        Plan(rounds=1000, per_round=10, local_steps=100),
        {"batched": engine},
        "auto",
        examples,
        chunk=None,
        most=16,
        seconds=seconds,
    )
    assert (local_engine.name, chunk) == (used, at_once)


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


def test_a_quantile_clip_is_measured_at_its_start(model, federation, monkeypatch):
    """Before the first round there is no bound yet but the one that the plan begins with."""
    timed: list[tuple[float, float | None]] = []
    real = Simulator.seconds_a_client_step

    def seconds(made: Simulator, state: State) -> float:
        timed.append((real(made, state), state.clip))
        return timed[-1][0]

    monkeypatch.setattr(Simulator, "seconds_a_client_step", seconds)
    monkeypatch.setattr(autotune, "_LONG", 1)
    what = plan(rounds=1, clip="quantile(0.5, 1)")
    run = simulate(model, federation, what)
    assert len(timed) >= 3
    assert all(0 < each < math.inf and clip == 1.0 for each, clip in timed)
    same = simulate(model, federation, what, engine=run.engine, chunk=run.chunk)
    assert torch.equal(weights(run.model), weights(same.model))
