"""Trap weights: rows that few inputs open show single inputs, unless there is noise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcdp.attacks.first_layer import FirstLayer
from fedcdp.attacks.trap_weights import trap_rows
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import ModelError
from fedcdp.methods import METHODS as FEDERATED
from tests.support.active import LEAKING, METHODS, NOISED, leaks_of, plan_of, small_federation
from tests.support.sabotage import sabotaged, silenced


@pytest.fixture(scope="module")
def federation(digits: Dataset) -> Federation:
    return small_federation(digits)


@pytest.mark.parametrize("trust", ["updates", "sum"])
@pytest.mark.parametrize("method", LEAKING)
def test_rows_show_single_inputs(method: str, trust: str, federation: Federation) -> None:
    plan = plan_of(**METHODS[method], secure_aggregation=trust == "sum")
    told = leaks_of("trap-weights", federation, plan).summary()
    assert not told["changed_network"]
    assert told["success_rate"] > (0.7 if trust == "updates" else 0.3)


@pytest.mark.parametrize("method", NOISED)
def test_noise_leaves_no_more_than_the_public_mean(method: str, federation: Federation) -> None:
    told = leaks_of("trap-weights", federation, plan_of(**METHODS[method])).summary()
    assert told["success_rate"] == told["recognisable_rate"] == 0
    assert told["distance_mean"] > 0.9 * told["knowing_nothing"]["dataset_mean"]["mse"]


def test_a_layer_without_noise_is_seen(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(method="fed-cdp", noise="batch")
    monkeypatch.setitem(FEDERATED, "fed-cdp", sabotaged(FEDERATED["fed-cdp"], silenced("1.weight", "1.bias")))
    assert leaks_of("trap-weights", federation, plan).success_rate > 0.6  # type: ignore[operator]


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_rows_open_for_the_wanted_share_of_inputs(low: float) -> None:
    generator = torch.Generator().manual_seed(0)
    public = low + (1 - low) * torch.rand(2000, 30, generator=generator, dtype=torch.float64)
    rows, biases = trap_rows(public, 50, 0.05, seed=0)
    others = low + (1 - low) * torch.rand(2000, 30, generator=generator, dtype=torch.float64)
    opened = (others @ rows.T + biases > 0).double().mean(0)
    assert float(opened.mean()) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "that a ReLU and another dense layer follow"),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), "that a ReLU and another dense layer follow"),
        (nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)), "with a bias"),
        (nn.Sequential(nn.Conv1d(4, 3, 1), nn.ReLU(), nn.Linear(3, 2)), "whose first layer is dense"),
    ],
)
def test_other_networks_are_refused(network: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        FirstLayer.of(network, (4,))


def test_a_convolution_is_refused_by_name(federation: Federation) -> None:
    with pytest.raises(ModelError, match="attack: trap-weights needs a network whose first layer is dense"):
        leaks_of("trap-weights", federation, plan_of(), "small")
