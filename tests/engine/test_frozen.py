"""Layers that are not trained are applied to the data once, and the training is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import frozen
from fedcdp.engine.frozen import split
from fedcdp.models.features import UnitNorm
from fedcdp.training import feature_cache, rounds, trainer
from fedcdp.training.simulate import simulate

CPU = torch.device("cpu")


@pytest.fixture
def federation() -> Federation:
    generator = torch.Generator().manual_seed(1)
    splits = [Dataset(torch.randn(n, 4, generator=generator), torch.arange(n) % 3, 3) for n in (60, 30)]
    return partition(Splits("noise", *splits, None, "as drawn"), clients=6, scheme="iid")


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        front = nn.Linear(4, 5).requires_grad_(False)
        return nn.Sequential(front, nn.Tanh(), UnitNorm(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("engine", ["batched", "functional"])
@pytest.mark.parametrize("method", ["fed-cdp", "nonprivate"])
def test_training_behind_them_is_the_same_as_training_through_them(
    federation: Federation, method: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(method=method, rounds=3, per_round=4, local_steps=2, batch_size=5, noise_multiplier=0.5, ema=0.5)
    seen: list[nn.Module | None] = []
    of: Callable[..., Tensor] = feature_cache.features_of
    monkeypatch.setattr(rounds, "features_of", lambda *given: seen.append(given[0]) or of(*given))
    once = simulate(network(), federation, plan, engine=engine)
    assert seen[0] is not None
    monkeypatch.setattr(trainer, "split", lambda model, *_: (None, model))
    every_time = simulate(network(), federation, plan, engine=engine)
    assert seen[-1] is None
    assert once.metrics[-1]["loss"] == pytest.approx(every_time.metrics[-1]["loss"], abs=1e-6)
    for name, value in every_time.model.state_dict().items():
        assert torch.allclose(once.model.state_dict()[name], value, atol=1e-6)
    assert torch.equal(once.model[0].weight, network()[0].weight)
    assert once.federation is federation


def test_what_is_left_of_the_network_keeps_its_names(federation: Federation) -> None:
    whole = network()
    front, rest = split(whole, federation.train.inputs, CPU)
    assert front is not None
    assert [type(layer) for layer in front] == [nn.Linear, nn.Tanh, UnitNorm]
    assert list(rest.state_dict()) == ["3.weight", "3.bias", "5.weight", "5.bias"]
    inputs = federation.train.inputs
    assert torch.equal(rest(front(inputs)), whole(inputs))
    assert isinstance(whole[0], nn.Linear)


class Own(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


def hooked() -> nn.Module:
    layer = UnitNorm()
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
        nn.Sequential(Own(), nn.Linear(4, 3)),
        nn.Sequential(hooked(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(7, 4).requires_grad_(False), nn.Linear(4, 3)),
        nn.Linear(4, 3),
    ],
    ids=["first trained", "costs nothing", "may mix examples", "hooks", "does not fit the data", "no sequence"],
)
def test_a_network_is_left_whole_where_that_is_unknown_or_not_worth_it(model: nn.Module) -> None:
    assert split(model, torch.zeros(5, 4), CPU) == (None, model)


def test_features_that_do_not_fit_into_memory_are_computed_in_every_step(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "_room", lambda _: 60 * 5 * 4 - 1)
    whole = network()
    assert split(whole, federation.train.inputs, CPU) == (None, whole)
