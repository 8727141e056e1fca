"""The matched filter does as well as theory says that anyone can, and no better; without noise it is never wrong."""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import pytest
import torch
from scipy.special import expit, logit, ndtr
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import Criteria, Presence, presence
from fedcdp.attacks.membership import Estimate
from fedcdp.attacks.observe import Captured, Look
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.models.networks import build
from tests.support.pairs import sample_first

CLIENTS = 400


@pytest.fixture(scope="module")
def tables() -> Federation:
    """426 real records, one at a client; the validation split is public."""
    return fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=CLIENTS, scheme="iid")


def plan_of(**fields: Any) -> Plan:
    defaults = {"method": "fed-cdp", "rounds": 2, "per_round": 5, "local_steps": 1, "batch_size": 1}
    return Plan(**defaults | {"record_sampling": "partition", "clip": 4.0, "learning_rate": 0.1} | fields)


def filtered(plan: Plan, federation: Federation, model: nn.Module | None = None, **how: Any) -> Presence:
    how = {"victims": 300, "leak": "type2"} | how
    found = fedcdp.attack(plan, model=model or nn.Linear(30, 2), federation=federation, attack="matched-filter", **how)
    assert isinstance(found, Presence)
    return found


def within(value: float, estimate: Estimate) -> bool:
    """Whether a value lies in the 99.9 % interval: the 99 % one, widened on its own, logit scale."""
    low, middle, high = (float(logit(each)) for each in (estimate.low, estimate.value, estimate.high))
    wider = 3.2905 / 2.5758
    return bool(expit(middle - wider * (middle - low)) <= value <= expit(middle + wider * (high - middle)))


# How well ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", sample_first(["type2", "type1", "type0"]))
@pytest.mark.parametrize(("sigma", "releases"), [(0.2, 1), (0.6, 1), (0.6, 9), (2.0, 1), (2.0, 16)])
def test_the_auc_is_what_the_formula_says(tables: Federation, leak: Any, sigma: float, releases: int) -> None:
    found = filtered(plan_of(noise_multiplier=sigma), tables, leak=leak, releases=releases)
    assert found.auc_predicted is not None
    assert 0.51 < found.auc_predicted < 0.9999
    assert within(found.auc_predicted, found.auc), (found.auc_predicted, found.auc)
    assert found.noise_deviation == pytest.approx(sigma * 4 / math.sqrt(releases))
    # Norms hardly differ here, so that one distance stands for all.
    alike = ndtr(found.distance_between_worlds / (math.sqrt(2) * found.noise_deviation))
    assert found.auc_predicted == pytest.approx(float(alike), abs=0.02)


def test_in_a_batch_the_noise_of_every_slot_hides_an_example() -> None:
    pairs = fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=200, scheme="iid")
    found = filtered(plan_of(noise_multiplier=0.3, batch_size=2), pairs, leak="type1", victims=200)
    assert found.noise_deviation == pytest.approx(0.3 * 4 * math.sqrt(2) / 2)
    assert found.auc_predicted is not None
    assert within(found.auc_predicted, found.auc)
    assert (found.success_rate, found.candidates) == (None, None)


def test_an_update_of_several_steps_is_filtered_too(tables: Federation) -> None:
    plan = plan_of(noise_multiplier=0.2, local_steps=3, learning_rate=0.01)
    found = filtered(plan, tables, leak="type0", steps=3)
    assert found.steps == 3
    assert found.auc_predicted is not None
    assert within(found.auc_predicted, found.auc)


def test_noise_at_the_client_of_fed_sdp_hides_its_update(tables: Federation) -> None:
    plan = plan_of(method="fed-sdp", noise_at="client", noise_multiplier=0.1, clip=0.5)
    for leak in ("type1", "type0"):
        found = filtered(plan, tables, leak=leak)
        assert found.noise_deviation == pytest.approx(0.1 * 0.5 / 0.1)
        assert found.auc_predicted is not None
        assert within(found.auc_predicted, found.auc)


@pytest.mark.parametrize(
    ("fields", "leak"),
    [
        ({"method": "nonprivate"}, "type2"),
        ({"method": "nonprivate"}, "type1"),
        ({"method": "dssgd"}, "type0"),
        ({"method": "fed-sdp"}, "type2"),
        ({"method": "fed-sdp", "noise_at": "client"}, "type2"),
        ({"method": "fed-sdp"}, "type0"),
        ({"method": "fed-cdp", "noise": "batch"}, "type2"),
        ({"method": "fed-cdp", "noise_multiplier": 0.0}, "type1"),
    ],
    ids=str,
)
def test_without_noise_it_is_never_wrong(tables: Federation, fields: dict[str, Any], leak: Any) -> None:
    found = filtered(plan_of(**fields), tables, leak=leak, victims=50)
    assert (found.auc.value, found.auc_predicted, found.noise_deviation) == (1, None, 0)
    assert found.auc.low > 0.85
    assert found.success_rate == (1 if leak == "type2" else None)


def test_it_identifies_by_chance_under_much_noise_and_always_under_little(tables: Federation) -> None:
    much, little = (filtered(plan_of(noise_multiplier=sigma), tables, victims=100) for sigma in (60.0, 1e-6))
    assert much.success_rate is not None
    assert much.success_rate <= 0.1
    assert (little.success_rate, little.candidates) == (1, 144)


def test_candidates_are_as_many_as_are_asked_for_and_never_the_victim_itself(tables: Federation) -> None:
    plan = plan_of(noise_multiplier=1e-6)
    few = filtered(plan, tables, victims=10, criteria=Criteria(candidates=20))
    assert few.candidates == 20
    everyone = Dataset(tables.train.inputs, tables.train.targets, 2)
    assert filtered(plan, tables, victims=20, public=everyone).success_rate == 1


def test_heterogeneous_victims_have_the_auc_of_their_pairs() -> None:
    """Half of the victims are easy, half hopeless: their mean distance would promise too much."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 5, generator=generator)
    inputs[::2] *= 0.01
    federation = fedcdp.partition((inputs, torch.randint(2, (400,), generator=generator)), clients=400, scheme="iid")
    found = filtered(plan_of(noise_multiplier=0.2), federation, nn.Linear(5, 2, bias=False))
    assert found.auc_predicted is not None
    assert within(found.auc_predicted, found.auc)
    distances = torch.cat([torch.zeros(1), torch.tensor([3.0])]).double()
    expected = (0.5 + 2 * ndtr(3 / 2) + ndtr(3 / math.sqrt(2))) / 4
    assert presence._predicted(distances) == pytest.approx(float(expected))


# How it is measured --------------------------------------------------------------------------------------------------


def test_no_two_captures_share_their_noise(tables: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Look, Tensor]] = []

    def spied(simulator: Any, state: Any, look: Look, victims: int) -> Captured:
        captured = original(simulator, state, look, victims)
        seen.append((look, captured.engine.layout.flatten(captured.seen, lead=1).double()))
        return captured

    original = presence.capture
    monkeypatch.setattr(presence, "capture", spied)
    for leak in ("type2", "type1"):
        seen.clear()
        filtered(plan_of(noise_multiplier=1.0), tables, leak=leak, releases=3, victims=40)
        expected = {look.without_example: tree for look, tree in seen if look.silent}
        noises = [tree - expected[look.without_example] for look, tree in seen if not look.silent]
        assert len(noises) == 6
        for noise in noises:
            assert float(noise.std()) == pytest.approx(4.0, rel=0.1)
        for one, other in combinations(noises, 2):
            correlation = float((one * other).mean()) / 16
            assert abs(correlation) < 5 / math.sqrt(one.numel())


def test_secure_noise_is_filtered_alike(tables: Federation) -> None:
    found = filtered(plan_of(noise_multiplier=0.6, secure_noise=True), tables, releases=2)
    assert found.auc_predicted is not None
    assert within(found.auc_predicted, found.auc)


def test_a_step_after_the_first_is_tested_at_the_weights_of_that_step(tables: Federation) -> None:
    found = filtered(plan_of(method="nonprivate", local_steps=3), tables, step=2, victims=20)
    assert found.auc.value == 1
    assert found.success_rate is None  # weights differ by victim; candidates would have to be run for each


def test_the_summary_is_strict_json_with_the_interval(tables: Federation) -> None:
    row = json.loads(json.dumps(filtered(plan_of(), tables, victims=2).summary(), allow_nan=False))
    assert row["attack"] == "matched-filter"
    assert row["auc_interval_99"][0] <= row["auc"] <= row["auc_interval_99"][1]
    assert {row[name] for name in ("distance_mean", "distance_median", "psnr_mean", "iterations_mean")} == {None}


def test_the_papers_network_under_the_papers_noise() -> None:
    """σ = 6, C = 4: per-layer clipping leaves |g| ≈ 4.3 at initialisation, and Φ(|g|·√R / (√2·σC)) is all there is."""
    digits = fedcdp.load("mnist5k", quiet=True)
    federation = fedcdp.partition(digits, clients=100, scheme="shards", records=40)
    network = build("cnn", (1, 28, 28), 10)
    plan = plan_of(noise_multiplier=6.0)
    found = filtered(plan, federation, network, victims=40, criteria=Criteria(candidates=200))
    assert found.distance_between_worlds == pytest.approx(4.27, abs=0.1)
    assert found.auc_predicted == pytest.approx(0.550, abs=0.003)
    assert within(0.55, found.auc)
    assert found.success_rate is not None
    assert found.success_rate <= 0.1  # 1 in 200 by chance
    distance = torch.tensor([found.distance_between_worlds]).double()
    for releases, auc in ((10, 0.655), (100, 0.896), (1000, 0.9999)):
        assert presence._predicted(distance * math.sqrt(releases) / 24) == pytest.approx(auc, abs=0.005)
