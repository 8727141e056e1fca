"""Under secure aggregation a server (type0) reads the sum of a round: attacks read it too, or say why they cannot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.observe import Look, capture, cohort_of
from fedcdp.attacks.presence import Presence
from fedcdp.attacks.recipe import RECIPES
from fedcdp.attacks.scene import simulated
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation, partition
from fedcdp.errors import DataError, FedcdpError, ModelError, PlanError
from fedcdp.mechanism.noise import Silence
from fedcdp.report.facts import leak_facts
from fedcdp.report.wording import what_leaks

CLIENTS, RECORDS, WIDTH = 4, 3, 6


def federation(sizes: list[int] | None = None) -> Federation:
    sizes = sizes or [RECORDS] * CLIENTS
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(sum(sizes), WIDTH, generator=generator)
    targets = torch.randint(0, 3, (sum(sizes),), generator=generator)
    starts = [sum(sizes[:client]) for client in range(len(sizes))]
    return partition((inputs, targets), indices=[list(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)])


def public() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    return Dataset(torch.rand(60, WIDTH, generator=generator), torch.arange(60) % 3, 3)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 3)


def plan_of(**changes: Any) -> Plan:
    usual = {"secure_aggregation": True, "per_round": CLIENTS, "local_steps": 1, "batch_size": RECORDS, "rounds": 3}
    return Plan(**usual | {"record_sampling": "partition", "clip": 0.3, "noise_multiplier": 2.0, "seed": 1} | changes)


def scene_of(plan: Plan, leak: Any = "type0", sizes: list[int] | None = None) -> Any:
    return simulated(plan, model(), federation(sizes), leak, None, 0, 1, torch.device("cpu"), None, None)


KINDS: dict[str, dict[str, Any]] = {
    "nonprivate": {"method": "nonprivate"},
    "fed-cdp, example": {},
    "fed-cdp, sum": {"noise": "sum"},
    "fed-sdp, sum": {"method": "fed-sdp", "noise_at": "client", "noise": "sum", "clip": 0.01},
    "fed-sdp, client": {"method": "fed-sdp", "noise_at": "client", "clip": 0.01},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_observation_is_the_mean_over_all_records_of_the_round(kind: str) -> None:
    """What all clients sent, one by one and without noise, averages to what the server reads."""
    plan = plan_of(**KINDS[kind])
    scene = scene_of(plan)
    cohort = cohort_of(scene.simulator, scene.state)
    alone = capture(scene.simulator, scene.state, Look("type1", silent=True))
    whole = cohort.observed(Silence(scene.engine.layout))
    for name, value in whole.items():
        torch.testing.assert_close(value.float(), alone.seen[name].mean(0), rtol=0, atol=1e-5)
    if plan.per_example:
        seen = capture(scene.simulator, scene.state, Look("type0", silent=True))
        assert (len(seen), seen.most, seen.summed_clients) == (1, CLIENTS * RECORDS, CLIENTS)
        torch.testing.assert_close(seen.seen["weight"][0], whole["weight"].float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nonprivate"])
def test_the_noise_of_the_observation_is_that_which_is_promised(kind: str) -> None:
    scene = scene_of(plan_of(**KINDS[kind], colluders=1))
    cohort, layout = cohort_of(scene.simulator, scene.state), scene.engine.layout
    still = layout.flatten(cohort.observed(Silence(layout)), lead=0)
    drawn = []
    for seed in range(60):
        noise = type(scene.simulator.noise)(seed, layout)
        drawn.append((layout.flatten(cohort.observed(noise), lead=0) - still) / cohort.deviation)
    values = torch.stack(drawn)
    assert float(values.square().mean()) == pytest.approx(1.0, rel=6 * math.sqrt(2 / values.numel()))


def test_records_are_reconstructed_from_a_sum_without_noise() -> None:
    """One record at each of two clients: the sum of two gradients of a linear layer with a bias."""
    plan = plan_of(method="nonprivate", per_round=2, batch_size=1, rounds=1)
    apart, alone = federation([1, 1]), plan.but(secure_aggregation=False)
    together = fedcdp.attack(plan, model=model(), federation=apart, leak="type0", attack="linear-head")
    assert isinstance(together, Leaks)
    assert together.summary()["summed_clients"] == 2
    assert (together.summary()["victims"], together.summary()["examples"]) == (1, 2)
    single = fedcdp.attack(alone, model=model(), federation=apart, leak="type0", attack="linear-head")
    assert isinstance(single, Leaks)
    assert single.success_rate == 1.0
    assert "summed_clients" not in single.summary()


@pytest.mark.parametrize("kind", KINDS)
def test_presence_is_tested_in_the_sum(kind: str) -> None:
    plan = plan_of(**KINDS[kind])
    found = fedcdp.attack(plan, model=model(), federation=federation(), leak="type0", attack="presence")
    assert isinstance(found, Presence)
    assert (found.victims, found.summed_clients) == (CLIENTS, CLIENTS)
    if plan.method == "nonprivate":
        assert found.auc.value == 1.0
    else:
        single = fedcdp.attack(plan, model=model(), federation=federation(), leak="type1", attack="presence")
        assert isinstance(single, Presence)
        assert found.auc_predicted is not None
        assert single.auc_predicted is not None
        assert found.auc_predicted < single.auc_predicted  # the others' noise hides a record in the sum


REFUSED: dict[str, tuple[dict[str, Any], list[int] | None, str]] = {
    "too many records": ({"batch_size": 600}, [600, 600], "1200 records of 2 clients"),
    "several steps": ({"noise": "example", "local_steps": 2}, None, "several local steps"),
    "pruned": ({"compression": 0.5}, None, "each client pruned"),
    "clipped updates": ({"method": "fed-sdp", "noise_at": "client", "noise": "sum"}, None, "clipped one by one"),
    "unequal weights": ({"batch_size": 5}, [5, 2, 5, 3], "do not weigh the same"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("attack", ["best", "linear-head", "batch", "labels", "per-layer"])
def test_what_a_sum_does_not_allow_is_refused_with_the_reason(name: str, attack: str) -> None:
    changes, sizes, reason = REFUSED[name]
    plan = plan_of(**changes, per_round=len(sizes or [0] * CLIENTS))
    steps = plan.local_steps
    with pytest.raises(ModelError, match=reason) as error:
        fedcdp.attack(plan, model=model(), federation=federation(sizes), leak="type0", attack=attack, steps=steps)
    assert "presence tests the sum" in str(error.value)


@pytest.mark.parametrize("attack", ["linear-head", "batch", "best"])
def test_a_sum_has_one_victim(attack: str) -> None:
    with pytest.raises(PlanError, match="one sum a round"):
        fedcdp.attack(plan_of(noise="sum"), model=model(), federation=federation(), leak="type0", attack=attack, victims=2)


@pytest.mark.parametrize("leak", ["type0", "type1", "type2"])
@pytest.mark.parametrize("attack", ["best", "linear-head", "analytic", "labels", "presence"])
def test_every_attack_runs_on_whole_numbers_or_says_why_not(leak: Any, attack: str) -> None:
    plan = plan_of(noise="sum", noise_multiplier=1.0)
    victims = None if leak == "type0" else 2
    try:
        found = fedcdp.attack(
            plan, model=model(), federation=federation(), leak=leak, attack=attack, victims=victims, public=public()
        )
    except FedcdpError as error:
        pytest.fail(str(error))
    assert bool(found.summary().get("summed_clients")) == (leak == "type0")


@pytest.mark.parametrize("leak", ["type0", "type1", "type2"])
@pytest.mark.parametrize("attack", ["clip-aware", "class-prior", "inverting-gradients"])
def test_searches_run_on_gradients_that_are_clipped_in_float64(leak: Any, attack: str) -> None:
    recipe = RECIPES[attack].but(iterations=2, restarts=1)
    found = fedcdp.attack(
        plan_of(noise="sum"), model=model(), federation=federation(), leak=leak, attack=recipe, public=public()
    )
    assert found.summary()["iterations_mean"] <= 2


def test_a_run_with_noise_on_the_sum_is_replayed() -> None:
    plan = plan_of(noise="sum", noise_multiplier=0.5)
    run = fedcdp.simulate(model(), federation(), plan)
    for leak in ("type0", "type1"):
        found = fedcdp.attack(run, model=model(), leak=leak, attack="linear-head", public=public())
        assert "replayed" in str(found.summary()["source"])
        assert found.summary()["releases_mean"] == plan.rounds


def test_a_noisy_sum_of_all_clients_needs_public_examples() -> None:
    """Without any, the federation's own would be used, and all of them are victims."""
    with pytest.raises(DataError, match="needs public examples"):
        fedcdp.attack(plan_of(noise="sum"), model=model(), federation=federation(), leak="type0", attack="linear-head")


def test_the_report_says_that_a_sum_was_read(tmp_path: Path) -> None:
    plan = plan_of(method="nonprivate", per_round=2, batch_size=1, rounds=1)
    leaks = fedcdp.attack(plan, model=model(), federation=federation([1, 1]), leak="type0", attack="linear-head")
    assert isinstance(leaks, Leaks)
    leaks.save(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    facts = leak_facts(summary | {"success_rate": 1.0, "recognisable_rate": None}, {})
    assert facts.reader == "type0-sum"
    assert "reads the sum of a round's updates" in what_leaks([facts])
