"""Inconsistent models: a secure sum that does not compare weights is the victim's update."""

from __future__ import annotations

import pytest
import torch

from fedcdp.attacks.imprint import Imprint
from fedcdp.attacks.inconsistent_models import dead_weights, isolated
from fedcdp.attacks.observe import Look, capture_clients
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import ModelError
from tests.support.active import LEAKING, METHODS, NOISED, leaks_of, plan_of, small_federation, stage_of


@pytest.fixture(scope="module")
def federation(digits: Dataset) -> Federation:
    return small_federation(digits)


@pytest.mark.parametrize("method", LEAKING)
def test_the_victim_is_read_out_of_the_sum(method: str, federation: Federation) -> None:
    told = leaks_of("inconsistent-models", federation, plan_of(**METHODS[method], secure_aggregation=True)).summary()
    assert (told["victims"], told["summed_clients"], told["examples"]) == (4, 4, 32)
    assert told["success_rate"] > 0.6
    assert "cancel only for equal weights" in told["assumption"]


@pytest.mark.parametrize("method", NOISED)
def test_noise_leaves_no_more_than_the_public_mean(method: str, federation: Federation) -> None:
    told = leaks_of("inconsistent-models", federation, plan_of(**METHODS[method], secure_aggregation=True)).summary()
    assert told["success_rate"] == told["recognisable_rate"] == 0
    assert told["distance_mean"] > 0.9 * told["knowing_nothing"]["dataset_mean"]["mse"]


@pytest.mark.parametrize("noise", [None, "sum"])
def test_the_sum_is_the_victims_update_and_everybodys_noise(noise: str | None, federation: Federation) -> None:
    private = {} if noise is None else {"method": "fed-cdp", "noise": noise, "noise_multiplier": 1e-3, "clip_mode": "flat"}
    stage = stage_of(federation, plan_of(secure_aggregation=True, **private))
    dead = dead_weights(stage)
    assert dead is not None
    stage = stage.crafted(Imprint().craft(stage).network)
    captured = isolated(stage, dead)
    for place, client in enumerate(captured.client):
        alone = capture_clients(stage.simulator, stage.state, Look("type1", silent=True), client[None])
        assert alone is not None
        wrong = captured.seen["1.weight"][place] - alone.seen["1.weight"][0]
        allowed = max(6 * float(captured.deviation[place]), 1e-6)
        assert float(wrong.abs().max()) < allowed
    assert captured.noisy == (noise is not None)


@pytest.mark.parametrize(("network", "works"), [("mlp", True), ("small", False)])
def test_dead_weights_silence_a_relu_network(network: str, works: bool, federation: Federation) -> None:
    """A saturated tanh is constant, but not zero: the next layer still gets a gradient."""
    found = dead_weights(stage_of(federation, plan_of(secure_aggregation=True), network))
    assert (found is not None) == works


def test_without_a_sum_it_is_refused(federation: Federation) -> None:
    with pytest.raises(ModelError, match="without secure_aggregation the server reads each update anyway"):
        leaks_of("inconsistent-models", federation, plan_of())
    with pytest.raises(ModelError, match="leak type1 shows the update that the server would isolate"):
        leaks_of("inconsistent-models", federation, plan_of(secure_aggregation=True), "small")


def test_dead_weights_need_a_network_that_can_be_closed(federation: Federation) -> None:
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(196, 10))
    assert dead_weights(stage_of(federation, plan_of(secure_aggregation=True), linear)) is None
