"""Clients of unequal size: weights of their updates and noise on the slots they hold are modelled for each victim."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import Leaks, Presence, gradient_units, observe, sightings
from fedcdp.attacks.head_solver import shown
from fedcdp.attacks.inferred import Inferred
from fedcdp.attacks.linear_head import find_head
from fedcdp.attacks.objectives import predicted
from fedcdp.attacks.observe import Leak
from fedcdp.attacks.recipe import RECIPES
from fedcdp.attacks.replay import Course
from fedcdp.attacks.sightings import Sightings, sighted_throughout
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import ModelError
from fedcdp.methods import Moment
from tests.support import naive
from tests.support.scenes import Scene, flat, scene

SIZES = [1, 2, 4, 9, 24, 40]  # mean 13.3: weights from 0.075 to 3
MEAN = sum(SIZES) / len(SIZES)
CLIP, SIGMA, RATE, BATCH = 0.5, 0.8, 0.2, 4
WIDE = 300

MECHANISMS: dict[str, dict[str, Any]] = {
    "fed-cdp, example noise": {"method": "fed-cdp", "noise": "example"},
    "fed-cdp, held slots": {"method": "fed-cdp", "noise": "example", "noise_slots": "held"},
    "fed-cdp, Poisson and held slots": {
        "method": "fed-cdp", "noise": "example", "noise_slots": "held", "record_sampling": "poisson", "slots": 9,
    },
    "fed-cdp, batch noise": {"method": "fed-cdp", "noise": "batch"},
    "fed-sdp, noise at the client": {"method": "fed-sdp", "noise_at": "client", "clip": 0.02},
}  # fmt: skip


def federation_of(sizes: list[int], features: int = WIDE, classes: int = 3) -> Federation:
    """Random points around a centre for each class; others like them are public."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(classes, features, generator=generator)
    count = sum(sizes) + 200
    targets = torch.randint(classes, (count,), generator=generator)
    data = Dataset(centres[targets] + 0.5 * torch.randn(count, features, generator=generator), targets, classes)
    parts = torch.arange(sum(sizes)).split(sizes)
    own, public = data.take(torch.arange(sum(sizes))), data.take(torch.arange(sum(sizes), count))
    return fedcdp.partition(own, indices=[part.numpy() for part in parts], validation=public)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return federation_of(SIZES)


def network(features: int = WIDE, classes: int = 3, bias: bool = True) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(features, classes, bias=bias))


def watched(federation: Federation, mechanism: str, **fields: Any) -> Scene:
    usual = {"clip": CLIP, "noise_multiplier": SIGMA, "learning_rate": RATE, "batch_size": BATCH, "per_round": 6}
    return scene(network(), federation, **usual | {"seed": 5} | MECHANISMS[mechanism] | fields)


def promised(mechanism: str, leak: Leak, records: int, weighted: bool) -> float:
    """The deviation on a coordinate of what is seen of a client with so many records, by hand."""
    slots = MECHANISMS[mechanism].get("slots", BATCH)
    if mechanism.startswith("fed-sdp"):
        return 0.0 if leak == "type2" else SIGMA * 0.02 / RATE / (records / MEAN if weighted else 1)
    if leak != "type2":
        return SIGMA * CLIP * (1 if "batch" in mechanism else math.sqrt(slots)) / min(records, BATCH)
    if "batch" in mechanism:
        return 0.0
    return SIGMA * CLIP * (math.sqrt(slots / min(records, slots)) if "held" in mechanism else 1)


# What is seen ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["equal", "records"])
@pytest.mark.parametrize("leak", ["type2", "type1", "type0"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_noise_on_every_victim_has_the_assumed_deviation(
    federation: Federation, mechanism: str, leak: Leak, weighting: str
) -> None:
    there = watched(federation, mechanism, weighting=weighting)
    captured, silent = there.look(leak, 6), there.look(leak, 6, silent=True)
    records = [SIZES[client] for client in captured.client.tolist()]
    by_hand = [promised(mechanism, leak, each, weighting == "records") for each in records]
    assert captured.deviation.tolist() == pytest.approx(by_hand)
    noise = (flat(captured) - flat(silent)).double()
    if not captured.noisy:
        assert float(noise.abs().max()) < 1e-5
        return
    measured = noise.square().mean(1).sqrt()
    assert len(set(records)) > 3
    assert measured.tolist() == pytest.approx(by_hand, rel=5 / math.sqrt(2 * noise.shape[1]))


def test_the_victims_that_are_taken_keep_their_own_weight_and_noise(federation: Federation) -> None:
    captured = watched(federation, "fed-sdp, noise at the client", weighting="records").look("type0", 6)
    assert sorted(captured.client_weight.tolist()) == pytest.approx([size / MEAN for size in SIZES])
    some = captured.take(torch.tensor([4, 1]))
    assert some.client_weight.tolist() == captured.client_weight[[4, 1]].tolist()
    assert some.deviation.tolist() == captured.deviation[[4, 1]].tolist()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_weighted_update_is_seen_and_predicted_in_units_of_a_gradient(federation: Federation, mechanism: str) -> None:
    """Against the loop that computes one example at a time, which knows the weights."""
    there = watched(federation, mechanism, weighting="records")
    captured = there.look("type0", 6, silent=True)
    again = predicted(captured, "method", captured.inputs, captured.targets, captured.present)
    plan, model = there.plan, network()
    plain = naive.Setting(
        method=plan.method, clips=[plan.clip.start], rates=[RATE], planned=6, batch=BATCH, slots=plan.slots, flat=False,
        noise_at=plan.noise_at, mean_records=MEAN,
    )  # fmt: skip
    start = naive.trainable(model)
    nothing = {name: torch.zeros_like(value) for name, value in start.items()}
    quiet = naive.Unit(*(lambda *_: nothing,) * 3, *(lambda *_: 0.0,) * 2)
    for victim, client in enumerate(captured.client.tolist()):
        uses, used = captured.uses[0, victim], captured.used[0, victim]
        step = [(captured.tensor[victim, one], captured.targets[victim, one]) for one in uses[used].tolist()]
        update, _ = naive.train_client(model, start, [step], SIZES[client], plain, quiet, 0, client)
        weight = SIZES[client] / MEAN
        for name, value in update.items():
            for found in (captured.seen[name][victim], again[name][victim]):
                torch.testing.assert_close(found.double(), value / -RATE / weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leak", ["type2", "type1"])
def test_the_noise_on_all_rounds_of_a_training_is_the_assumed_one(federation: Federation, leak: Leak) -> None:
    found = throughout(federation, leak, plan_of(method="fed-cdp", noise_slots="held", weighting="records", batch_size=6))
    seen_sizes = set()
    for sighting, noise in zip(found.victims, left_over(found), strict=True):
        for release, deviation in zip(noise, sighting.deviation.tolist(), strict=True):
            assert float(release.std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * release.numel()))
        seen_sizes.add(round(float(sighting.deviation[0]), 6))
    assert len(seen_sizes) > 3


def plan_of(**fields: Any) -> Plan:
    usual = {"method": "nonprivate", "rounds": 2, "per_round": 6, "local_steps": 1, "batch_size": 1, "clip": 1.0}
    usual |= {"record_sampling": "partition", "learning_rate": 0.1, "clip_mode": "flat", "noise_multiplier": 1.0}
    return Plan(**usual | fields)


def throughout(federation: Federation, leak: Leak, plan: Plan) -> Sightings:
    model = network(bias=False)
    head = find_head(model, (WIDE,))
    assert head is not None
    return sighted_throughout(Course(model, federation, plan, torch.device("cpu"), F.cross_entropy), head, leak, 6)


def left_over(found: Sightings) -> list[Tensor]:
    """What of each victim's observations its own examples do not explain."""
    captured = found.captured
    rows = []
    for victim, kept in enumerate(found.victims):
        sighting, count = kept.in_float64(), kept.shares.shape[1]
        features, labels = captured.tensor[victim, :count].double(), captured.targets[victim, :count]
        rows.append(sighting.seen - shown(sighting, features, labels))
    return rows


# How well -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> Federation:
    """Clients of 1 to 60 records, and little to tell apart but their sizes."""
    return federation_of([1, 60, 3, 30, 2, 12, 5, 20], features=12, classes=4)


def attacked(federation: Federation, plan: Plan, bias: bool = True, **how: Any) -> Any:
    model = network(12, 4, bias)
    return fedcdp.attack(plan, model=model, federation=federation, victims=8, **{"leak": "type0", "at_round": 0} | how)


@pytest.mark.parametrize(
    ("method", "attack"),
    [("nonprivate", "clip-aware"), ("nonprivate", "batch")]
    + [(method, attack) for method in ("nonprivate", "fed-cdp", "fed-sdp") for attack in ("linear-head", "analytic")],
)
def test_a_weight_protects_nobody(tables: Federation, method: str, attack: str) -> None:
    """One record a step, clipped and without noise: weighted updates are inverted as well as equal ones."""
    fields = {"method": method, "noise_multiplier": 0.0, "clip": 1.0 if method == "fed-cdp" else 0.01, "noise_at": "client"}
    equal, weighted = (
        attacked(tables, plan_of(**fields, per_round=8, weighting=weighting), attack=attack)
        for weighting in ("equal", "records")
    )
    for found in (equal, weighted):
        assert isinstance(found, Leaks)
        assert found.success_rate == 1
        assert float(found.summary()["distance_median"]) < 1e-10
    assert torch.equal(weighted.found.labels, equal.found.labels)


def test_labels_of_weighted_batches_are_counted_like_those_of_equal_ones(tables: Federation) -> None:
    equal, weighted = (
        attacked(tables, plan_of(per_round=8, batch_size=12, weighting=weighting), attack="labels")
        for weighting in ("equal", "records")
    )
    assert isinstance(equal, Inferred)
    assert isinstance(weighted, Inferred)
    assert weighted.labels is not None
    assert equal.labels is not None
    assert weighted.labels.accuracy == equal.labels.accuracy > equal.labels.baseline + 0.1


def ignored(at: Moment) -> Tensor:
    """Sabotage: an adversary who does not know that updates are weighted."""
    return torch.ones(len(at.clients))


def test_an_attack_that_ignores_the_weight_is_noticed(tables: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "weights_of", ignored)
    monkeypatch.setattr(gradient_units, "weights_of", ignored)
    monkeypatch.setattr(sightings, "weights_of", ignored)
    with pytest.raises(ModelError, match="do not give this gradient"):
        attacked(tables, plan_of(per_round=8, weighting="records"), bias=False, attack="linear-head")


def test_under_noise_an_attack_that_ignores_the_weight_is_worse(tables: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bias, the length of an example is read from the size of its update."""
    light = {"method": "fed-cdp", "noise": "batch", "clip": 50.0, "noise_multiplier": 1e-3, "per_round": 8, "rounds": 10}

    def error(weighting: str) -> float:
        found = attacked(tables, plan_of(**light, weighting=weighting), bias=False, attack="linear-head")
        return float(found.summary()["feature_error_median"])

    equal, weighted = error("equal"), error("records")
    monkeypatch.setattr(observe, "weights_of", ignored)
    monkeypatch.setattr(gradient_units, "weights_of", ignored)
    monkeypatch.setattr(sightings, "weights_of", ignored)
    assert weighted < 1.1 * equal
    assert error("records") > 3 * weighted


def filtered(federation: Federation, plan: Plan, leak: Leak) -> Presence:
    found = fedcdp.attack(
        plan, model=network(12, 4), federation=federation, victims=240, leak=leak, attack="matched-filter"
    )  # fmt: skip
    assert isinstance(found, Presence)
    assert found.auc_predicted is not None
    return found


@pytest.fixture(scope="module")
def many() -> Federation:
    """240 clients of 1 to 16 records."""
    return federation_of([1, 16, 2, 8] * 60, features=12, classes=4)


UNEQUAL_NOISE: dict[Leak, dict[str, Any]] = {
    "type2": {"method": "fed-cdp", "noise_slots": "held", "batch_size": 16, "noise_multiplier": 0.4},
    "type1": {"method": "fed-cdp", "noise": "batch", "weighting": "records", "batch_size": 16, "noise_multiplier": 0.6},
    "type0": {"method": "fed-sdp", "noise_at": "client", "weighting": "records", "clip": 0.1, "noise_multiplier": 0.5},
}


@pytest.mark.parametrize("leak", UNEQUAL_NOISE)
def test_the_matched_filter_weighs_every_victim_by_its_own_noise(
    many: Federation, leak: Leak, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One deviation for all would promise another AUC than is measured, or measure a lower one."""
    plan = plan_of(per_round=5, **UNEQUAL_NOISE[leak])
    right = filtered(many, plan, leak)
    assert right.auc.low <= right.auc_predicted <= right.auc.high
    assert 0.6 < right.auc.value < 0.99
    own = observe.promised_deviation

    def one_for_all(at: Moment, leak: Leak) -> Tensor:
        return own(at, leak) * 0 + own(at, leak).min()

    monkeypatch.setattr(observe, "promised_deviation", one_for_all)
    wrong = filtered(many, plan, leak)
    assert wrong.auc_predicted is not None
    assert not wrong.auc.low <= wrong.auc_predicted <= wrong.auc.high


@pytest.mark.slow
def test_averaging_trusts_a_victim_according_to_its_own_noise(tables: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search with a prior balances it against the noise: one deviation for all is worse for the heavy or the light."""
    plan = plan_of(method="fed-sdp", noise_at="client", clip=0.2, noise_multiplier=0.02, per_round=8, weighting="records")
    recipe = RECIPES["averaging"].but(iterations=60)

    def error() -> float:
        found = attacked(tables, plan, attack=recipe)
        assert isinstance(found, Leaks)
        return float(found.summary()["distance_mean"])

    right, own = error(), observe.promised_deviation
    monkeypatch.setattr(observe, "promised_deviation", lambda at, leak: own(at, leak) * 0 + own(at, leak).min())
    assert right < 0.8 * error()
