"""Active servers: which attacks fit a plan, and what their targets are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.attacks import ATTACKS
from fedcdp.attacks.active_servers import ACTIVE, fitting
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import FedcdpError
from tests.support.active import leaks_of, network_of, plan_of, small_federation, stage_of

FITS = {
    ("mlp", False): {"imprint", "trap-weights", "fishing"},
    ("mlp", True): {"imprint", "trap-weights", "fishing", "inconsistent-models"},
    ("small", False): {"imprint", "fishing"},
    ("linear", False): {"imprint", "fishing", "frozen-weights"},
    ("linear", True): {"imprint", "fishing", "frozen-weights"},
}


@pytest.fixture(scope="module")
def federation(digits: Dataset) -> Federation:
    return small_federation(digits)


@pytest.mark.parametrize(("network", "summed"), FITS)
def test_each_attack_says_whether_it_fits(network: str, summed: bool, federation: Federation) -> None:
    stage = stage_of(federation, plan_of(secure_aggregation=summed), network)
    fits = {name for name, reason in fitting(stage).items() if reason is None}
    assert fits == FITS[network, summed]
    assert all(fitting(stage)[name] for name in ACTIVE if name not in fits)


@pytest.mark.parametrize("name", ACTIVE)
def test_what_fits_runs_and_what_does_not_says_the_same(name: str, federation: Federation) -> None:
    plan, network = plan_of(), "linear" if name == "frozen-weights" else "mlp"
    reason = fitting(stage_of(federation, plan, network))[name]
    if reason is None:
        assert leaks_of(name, federation, plan, network, victims=2).attack == name
    else:
        with pytest.raises(FedcdpError) as raised:
            leaks_of(name, federation, plan, network)
        assert str(raised.value) == f"attack: {name} {reason}"


def test_all_are_attacks_by_name() -> None:
    assert set(ACTIVE) < set(ATTACKS)
    assert list(ACTIVE) == ["imprint", "trap-weights", "fishing", "frozen-weights", "inconsistent-models"]


@pytest.mark.parametrize("name", ACTIVE)
def test_raw_gradients_are_refused(name: str) -> None:
    model, inputs, labels = nn.Linear(4, 2), torch.rand(2, 4), torch.tensor([0, 1])
    nn.functional.cross_entropy(model(inputs), labels).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(FedcdpError, match=f"{name} needs a run or a plan"):
        fedcdp.attack(gradients, model=model, truth=(inputs, labels), attack=name, leak="type0")


def test_the_network_of_the_plan_is_left_as_it_is(federation: Federation) -> None:
    model = network_of()
    before = [p.clone() for p in model.parameters()]
    for name in ("imprint", "fishing"):
        fedcdp.attack(plan_of(), model=model, federation=federation, leak="type0", attack=name, victims=2)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_run_is_attacked_from_its_trained_weights(federation: Federation) -> None:
    run = fedcdp.simulate(network_of(), federation, plan=plan_of(rounds=1))
    found = fedcdp.attack(run, leak="type0", attack="imprint", victims=2)
    assert found.summary()["success_rate"] > 0.5
