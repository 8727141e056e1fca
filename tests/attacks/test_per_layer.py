"""Tensor by tensor: one that a method forgot to noise is found by its name, and a sound method is not accused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import LayerLeaks, portfolio
from fedcdp.attacks.per_layer import _much_less
from fedcdp.attacks.recipe import CPL
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.engine import Batch
from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.noise import Noise
from fedcdp.methods import METHODS, FedCDP, FedSDP, GradientSum, Moment

TENSORS = ("0.weight", "0.bias", "2.weight", "2.bias")


@pytest.fixture(scope="module")
def tables() -> Federation:
    return fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=40, scheme="iid")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is measured, whatever the search finds: one iteration will do."""
    monkeypatch.setattr(portfolio, "ONE_TENSOR", CPL.but(iterations=1))


def looked(federation: Federation, victims: int = 4, leak: Any = "type2", **fields: Any) -> LayerLeaks:
    defaults = {"method": "fed-cdp", "rounds": 2, "per_round": 5, "local_steps": 1, "batch_size": 2}
    plan = Plan(**defaults | {"record_sampling": "partition", "learning_rate": 0.1} | fields)
    found = fedcdp.attack(
        plan, model=nn.Sequential(nn.Linear(30, 4), nn.Sigmoid(), nn.Linear(4, 2)), federation=federation, victims=victims,
        leak=leak, attack="per-layer",
        steps=1 if leak == "type2" else plan.local_steps,
    )  # fmt: skip
    assert isinstance(found, LayerLeaks)
    return found


@dataclass(frozen=True)
class Holes(Noise):
    """Noise that leaves one tensor with only a share of it."""

    whole: Noise
    tensor: str
    share: float
    layout: Layout

    def _tree(self, *where: Any) -> Tree:
        return {n: v * self.share if n == self.tensor else v for n, v in self.whole._tree(*where).items()}

    def _unit(self, *where: Any) -> Tensor:
        return self.whole._unit(*where)


def holed(at: Moment, tensor: str, share: float) -> Moment:
    return replace(at, noise=Holes(at.noise, tensor, share, at.engine.layout))


class Forgetful(FedCDP):
    """Fed-CDP, but for one tensor."""

    def __init__(self, tensor: str, share: float = 0.0) -> None:
        self.tensor, self.share = tensor, share

    def gradient_sum(self, weights: Tree, batch: Batch, at: Moment) -> GradientSum:
        return super().gradient_sum(weights, batch, holed(at, self.tensor, self.share))


class ForgetfulServer(FedSDP):
    def sanitise_update(self, update: Tree, at: Moment) -> Tree:
        return super().sanitise_update(update, holed(at, "0.bias", 0.0))


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("leak", ["type2", "type1"])
def test_a_tensor_that_was_left_without_noise_is_found_by_its_name(
    tables: Federation, monkeypatch: pytest.MonkeyPatch, tensor: str, leak: Any
) -> None:
    monkeypatch.setitem(METHODS, "fed-cdp", Forgetful(tensor))
    found = looked(tables, leak=leak)
    assert found.unsanitised == (tensor,)
    assert found.summary()["unsanitised"] == [tensor]
    noise = {layer.tensor: layer.noise_deviation for layer in found.layers}
    assert noise[tensor] < 1e-3
    assert all(noise[other] > found.promised_deviation / 3 for other in TENSORS if other != tensor)


def test_what_was_left_without_noise_gives_the_record_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portfolio, "ONE_TENSOR", CPL.but(iterations=60, labels="known"))
    monkeypatch.setitem(METHODS, "fed-cdp", Forgetful("0.weight"))
    generator = torch.Generator().manual_seed(3)
    records = torch.rand(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    plan = Plan(method="fed-cdp", clip=100.0, noise_multiplier=1.0, local_steps=1, batch_size=1, rounds=1, per_round=8)
    found = fedcdp.attack(
        plan, model=nn.Sequential(nn.Linear(6, 20), nn.Sigmoid(), nn.Linear(20, 3)), attack="per-layer", victims=4,
        federation=fedcdp.partition(records, clients=8, scheme="iid"),
    )  # fmt: skip
    assert isinstance(found, LayerLeaks)
    distances = {layer.tensor: layer.distance_median for layer in found.layers}
    assert found.summary()["most_telling"] == "0.weight"
    assert distances.pop("0.weight") < 0.01 < min(distances.values())


def test_a_method_that_forgets_at_the_client_is_found_too(tables: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "fed-sdp", ForgetfulServer())
    found = looked(tables, leak="type0", method="fed-sdp", noise_at="client")
    assert found.unsanitised == ("0.bias",)


@pytest.mark.parametrize(("share", "found"), [(0.1, True), (0.3, True), (0.8, False)])
def test_much_less_noise_than_promised_is_as_bad_as_none(
    tables: Federation, monkeypatch: pytest.MonkeyPatch, share: float, found: bool
) -> None:
    monkeypatch.setitem(METHODS, "fed-cdp", Forgetful("0.weight", share))
    assert looked(tables).unsanitised == (("0.weight",) if found else ())


@pytest.mark.parametrize(
    ("leak", "fields"),
    [
        ("type2", {"method": "fed-cdp"}),
        ("type1", {"method": "fed-cdp"}),
        ("type0", {"method": "fed-cdp-decay"}),
        ("type1", {"method": "fed-cdp", "noise": "batch", "local_steps": 3, "learning_rate": 0.001}),
        ("type2", {"method": "fed-cdp", "noise": "batch"}),
        ("type1", {"method": "fed-sdp", "noise_at": "client"}),
        ("type0", {"method": "fed-sdp", "noise_at": "server"}),
        ("type1", {"method": "dssgd"}),
        ("type2", {"method": "nonprivate"}),
    ],
    ids=str,
)
def test_a_sound_method_is_not_accused(tables: Federation, leak: Any, fields: dict[str, Any]) -> None:
    found = looked(tables, victims=2, leak=leak, **fields)
    assert found.unsanitised == ()
    assert [layer.tensor for layer in found.layers] == list(TENSORS)
    if found.promised_deviation:
        assert found.layers[0].noise_deviation == pytest.approx(found.promised_deviation, rel=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_a_few_numbers_that_happen_to_be_small_are_no_evidence(tables: Federation, seed: int) -> None:
    """A bias of two numbers and one victim: one time in ten both are less than half of their deviation."""
    assert looked(tables, victims=1, seed=seed).unsanitised == ()


def test_small_noise_is_told_from_little_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    for numbers in (1, 2, 4, 10, 100):
        drawn = 3 * torch.randn(20_000, numbers, generator=generator).double()
        sizes = drawn.square().mean(1).sqrt().tolist()
        assert sum(_much_less(size, 3.0, numbers) for size in sizes) <= 1, numbers
        assert _much_less(0.0, 3.0, numbers)
    assert _much_less(1.0, 3.0, 100)
    assert not _much_less(2.5, 3.0, 10_000)
    assert not _much_less(0.0, 0.0, 100)


def test_the_summary_is_strict_json_and_names_the_most_telling_tensor(tables: Federation) -> None:
    found = looked(tables, victims=2, method="nonprivate")
    row = json.loads(json.dumps(found.summary(), allow_nan=False))
    assert row["method"] == "nonprivate"
    assert row["attack"] == "per-layer"
    assert row["most_telling"] == min(row["layers"], key=lambda layer: layer["distance_median"])["tensor"]
    assert row["success_rate"] == max(layer["success_rate"] for layer in row["layers"])
