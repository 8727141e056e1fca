"""Attacks on networks behind private scaling recover raw inputs: of runs, of their rounds replayed, and of plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import Leaks, scene
from fedcdp.attacks.analytic import first_dense
from fedcdp.attacks.replay import FRESH, PLAN, REPLAYED
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import DataError, ModelError, RunError
from fedcdp.models.features import Standardised
from fedcdp.models.networks import scaling_of, with_scaling

FEATURES = 6
PLACES = torch.tensor([-0.8, -0.4, 0.0, 0.2, 0.6, 0.9])


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Clients of 1 to 40 records; each column fills a small part of [-1, 1], elsewhere."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (400,), generator=generator)
    inputs = PLACES + 0.04 * torch.randn(400, FEATURES, generator=generator) + 0.03 * targets[:, None]
    data = Dataset(inputs.clamp(-1, 1), targets, 3)
    parts = torch.arange(200).split([1, 2, 40, 17, 60, 80])
    public = data.take(torch.arange(200, 400))
    return fedcdp.partition(data.take(torch.arange(200)), indices=[part.numpy() for part in parts], validation=public)


def network(bias: bool = True, hidden: bool = False) -> nn.Module:
    torch.manual_seed(1)
    if hidden:
        return nn.Sequential(nn.Linear(FEATURES, 40, bias=bias), nn.ReLU(), nn.Linear(40, 3))
    return nn.Linear(FEATURES, 3, bias=bias)


def plan_of(**fields: Any) -> Plan:
    usual = {"method": "fed-cdp", "rounds": 3, "per_round": 6, "local_steps": 1, "batch_size": 4, "clip": 0.3}
    usual |= {"record_sampling": "partition", "noise_multiplier": 0.0, "learning_rate": 0.5, "scaling_noise": 0.1}
    return Plan(**usual | fields)


def far_off(found: Any) -> Tensor:
    """[victims]: the largest error of a raw input."""
    assert isinstance(found, Leaks)
    return (found.found.examples - found.captured.inputs).abs().flatten(1).amax(1)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("attack", ["linear-head", "analytic"])
def test_raw_inputs_of_a_run_come_out_behind_its_scaling(federation: Federation, attack: str, bias: bool) -> None:
    run = fedcdp.simulate(network(bias), federation, plan_of(clip=0.3 if bias else 50.0))  # a bound hides a length
    layer = scaling_of(run.model)
    assert layer is not None
    assert float(layer.scale.min()) > 3
    found = fedcdp.attack(run, attack=attack, victims=15)
    assert float(far_off(found).median()) < 1e-4
    if bias:
        assert float(far_off(found).max()) < 1e-4


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_dense_first_layer_is_inverted_to_raw_inputs(federation: Federation, bias: bool) -> None:
    run = fedcdp.simulate(network(bias, hidden=True), federation, plan_of(clip=50.0))
    found = fedcdp.attack(run, attack="analytic", victims=15)
    assert float(far_off(found).median()) < 1e-3


def test_an_adversary_who_ignores_the_scaling_recovers_other_inputs(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fedcdp.simulate(network(), federation, plan_of())
    monkeypatch.setattr(Standardised, "undo", lambda _, outputs: outputs)
    for attack in ("linear-head", "analytic"):
        assert float(far_off(fedcdp.attack(run, attack=attack, victims=15)).min()) > 0.05


@pytest.mark.parametrize(("secure", "source"), [(False, REPLAYED), (True, FRESH)])
@pytest.mark.parametrize("wrapped", [False, True], ids=["as given", "with its layer"])
def test_all_rounds_of_a_run_are_replayed_behind_its_scaling(
    federation: Federation, secure: bool, source: str, wrapped: bool
) -> None:
    """The untrained network may come as the user has it, or as the command builds it: with a layer that is not set."""
    model = network()
    run = fedcdp.simulate(model, federation, plan_of(noise_multiplier=1e-4, secure_noise=secure))
    given = with_scaling(model, (FEATURES,)) if wrapped else model
    found = fedcdp.attack(run, model=given, attack="linear-head", victims=15)
    assert isinstance(found, Leaks)
    assert found.summary()["source"] == source
    assert float(far_off(found).median()) < 0.01
    if wrapped:
        layer = scaling_of(given)
        assert layer is not None
        assert not layer.mean.any()  # the caller's network is not changed


def test_a_replay_behind_another_scaling_is_refused(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    run = fedcdp.simulate(model, federation, plan_of())
    monkeypatch.setattr(scene, "with_set_scaling", lambda given, *_: with_scaling(given, (FEATURES,)))
    with pytest.raises(RunError, match="ends at other weights"):
        fedcdp.attack(run, model=model, attack="linear-head", victims=5)


@pytest.mark.parametrize("at_round", [None, 2])
def test_a_plan_is_attacked_behind_the_scaling_it_would_release(federation: Federation, at_round: int | None) -> None:
    plan = plan_of()
    found = fedcdp.attack(plan, model=network(), federation=federation, attack="linear-head", victims=15, at_round=at_round)
    assert isinstance(found, Leaks)
    assert float(far_off(found).median()) < 1e-4
    if at_round is None:
        assert found.summary()["source"] == PLAN
        return
    trained = scaling_of(fedcdp.simulate(network(), federation, plan).model)
    layer = scaling_of(found.captured.engine.model)
    assert trained is not None
    assert layer is not None
    assert torch.equal(trained.mean, layer.mean)


def test_a_round_of_a_run_is_computed_behind_its_scaling(federation: Federation) -> None:
    model = network()
    run = fedcdp.simulate(model, federation, plan_of())
    found = fedcdp.attack(run, model=model, at_round=1, attack="analytic", victims=15)
    assert float(far_off(found).max()) < 1e-4


@pytest.mark.parametrize("leak", ["type2", "type0"])
def test_every_way_of_attack_runs_on_a_scaled_network(federation: Federation, leak: Any) -> None:
    run = fedcdp.simulate(network(hidden=True), federation, plan_of(weighting="records", noise_slots="held"))
    best = fedcdp.attack(run, leak=leak, victims=4)
    assert isinstance(best, Leaks)
    for attack in ("matched-filter", "labels", "membership"):
        assert fedcdp.attack(run, leak=leak, attack=attack, victims=None if attack == "membership" else 4).summary()


def test_token_ids_cannot_be_scaled_and_a_later_dense_layer_is_not_inverted() -> None:
    data = Dataset(torch.randint(5, (40, 3)), torch.arange(40) % 2, 2)
    tokens = fedcdp.partition(data, clients=4, scheme="iid", validation=data)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(DataError, match="only real-valued inputs are standardised"):
        fedcdp.attack(plan_of(per_round=4), model=model, federation=tokens)
    with pytest.raises(ModelError, match="this one starts with Tanh"):
        first_dense(with_scaling(nn.Sequential(nn.Tanh(), nn.Linear(3, 2)), (3,)), (3,))
