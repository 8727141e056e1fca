"""Noise on the slots that a client can fill, and the weights of clients that hold different numbers of records."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.config.plan import Plan
from fedcdp.engine.base import Batch
from fedcdp.engine.functional import FunctionalEngine
from fedcdp.files.tree import Tree
from fedcdp.mechanism.noise import SecureNoise, noise_of
from fedcdp.methods import METHODS, Moment, NoisedExamples, take_part

SIZES = [2, 5, 40]


def moment(plan: Plan, times: int) -> tuple[Moment, Tree]:
    """Each size `times` times, on a network without gradients: what is seen is noise alone."""
    network = nn.Linear(3, 1)
    engine = FunctionalEngine(network, lambda outputs, _: 0.0 * outputs.mean())
    sizes = torch.tensor(SIZES * times)
    at = Moment(
        plan, engine, noise_of(plan, engine.layout), 0, torch.arange(len(sizes)), sizes.clamp(max=plan.batch_size),
        records=sizes, mean_records=10.0,
    )  # fmt: skip
    return at, {name: parameter.detach() for name, parameter in network.named_parameters()}


def batch_of(at: Moment) -> Batch:
    clients, width = len(at.clients), at.plan.batch_size
    present = torch.arange(width) < at.records[:, None]
    return Batch(torch.zeros(clients, width, 3), torch.zeros(clients, width, dtype=torch.int64), present)


def seen(plan: Plan, reader: str, times: int = 2000, tapped: bool = True, one_by_one: bool = False) -> Tensor:
    """What the reader sees [size, time, ...], flat."""
    at, weights = moment(plan, times)
    if one_by_one:
        at = replace(at, engine=NoisedExamples(at.engine))
    shown: dict[str, Tree] = {}
    if tapped:
        at = replace(at, tap=lambda who, _, tree: shown.__setitem__(who, tree))
    sent = take_part(METHODS[plan.method], weights, [batch_of(at)], at)
    tree = shown[reader] if tapped else sent.update
    flat = at.engine.layout.flatten(tree, lead=2 if reader == "type2" else 1)
    return flat.unflatten(0, (times, len(SIZES))).transpose(0, 1)


def plan_of(**fields: object) -> Plan:
    usual = {"local_steps": 1, "batch_size": 8, "record_sampling": "partition", "noise_multiplier": 1.5, "clip": 2.0}
    return Plan(**usual | {"learning_rate": 1.0} | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["tapped", "inside the engine"])
def test_only_the_slots_that_a_client_fills_carry_noise(one_by_one: bool) -> None:
    found = seen(plan_of(noise_slots="held"), "type2", one_by_one=one_by_one)
    for size, of_size in zip(SIZES, found, strict=True):
        filled = min(size, 8)
        assert of_size[:, filled:].abs().max() == 0 if filled < 8 else True
        assert of_size[:, :filled].std() == pytest.approx(1.5 * 2.0 * (8 / filled) ** 0.5, rel=0.02)


def test_without_the_option_every_slot_carries_the_same_noise() -> None:
    found = seen(plan_of(), "type2")
    assert torch.allclose(found.std((1, 3)), torch.tensor(3.0), rtol=0.06)


@pytest.mark.parametrize("slots", ["all", "held"])
@pytest.mark.parametrize("tapped", [False, True], ids=["one draw", "slot by slot"])
def test_the_sum_carries_the_same_noise_either_way(slots: str, tapped: bool) -> None:
    found = seen(plan_of(noise_slots=slots), "type0", tapped=tapped)
    for size, of_size in zip(SIZES, found, strict=True):
        assert of_size.std() * min(size, 8) == pytest.approx(1.5 * 2.0 * 8**0.5, rel=0.03)


def test_weighted_by_records_every_client_sends_noise_of_the_same_size() -> None:
    """Where a step takes all records: nobody can tell from the noise who took part."""
    found = seen(plan_of(weighting="records", batch_size=40), "type0", tapped=False)
    deviations = torch.stack([of_size.std() for of_size in found])
    assert torch.allclose(deviations, torch.tensor(1.5 * 2.0 * 40**0.5 / 10), rtol=0.03)


def test_where_a_step_takes_some_records_a_large_client_sends_more_noise() -> None:
    """So other clients' noise is not credited there (`views.why_alone`)."""
    found = seen(plan_of(weighting="records"), "type0", tapped=False)
    assert found[2].std() > 4 * found[0].std()


@pytest.mark.parametrize("generator", ["philox", "chacha20"])
def test_secure_noise_lies_on_the_same_slots(generator: str) -> None:
    plan = plan_of(noise_slots="held", secure_noise=True, noise_generator=generator)
    at, weights = moment(plan, 300)
    assert isinstance(at.noise, SecureNoise)
    shown: dict[str, Tree] = {}
    at = replace(at, tap=lambda who, _, tree: shown.__setitem__(who, tree))
    take_part(METHODS["fed-cdp"], weights, [batch_of(at)], at)
    flat = at.engine.layout.flatten(shown["type2"], lead=2).unflatten(0, (300, 3))
    assert flat[:, 0, 2:].abs().max() == 0
    assert flat[:, 0, :2].std() == pytest.approx(3.0 * 2.0, rel=0.1)


def test_indicators_are_noised_on_the_same_slots() -> None:
    plan = plan_of(noise_slots="held", clip="quantile(0.5, 2)", quantile_noise=0.5)
    at, weights = moment(plan, 2000)
    shown: dict[str, Tree] = {}
    at = replace(at, tap=lambda who, _, tree: shown.__setitem__(who, tree))
    take_part(METHODS["fed-cdp"], weights, [batch_of(at)], at)
    within = shown["type2-count"]["within"].unflatten(0, (2000, 3))
    assert within[:, 0, 2:].abs().max() == 0
    assert within[:, 0, :2].std() == pytest.approx(0.5 * (8 / 2) ** 0.5, rel=0.05)
    assert within.sum(2).std(0).tolist() == pytest.approx([0.5 * 8**0.5] * 3, rel=0.05)


def test_five_hospitals_no_longer_share_the_epsilon_of_the_smallest() -> None:
    """Sampling the same number of records everywhere, the smallest site sets the ε; with the recipe, no site does."""
    sizes = {"north": 1200, "east": 500, "south": 250, "west": 90, "island": 25}
    rows, start = {}, 0
    for name, size in sizes.items():
        rows[name] = range(start, start + size)
        start += size
    federation = fedcdp.partition((torch.randn(start, 4), torch.arange(start) % 2), indices=list(rows.values()))
    federation = replace(federation, names=tuple(sizes))
    model = nn.Linear(4, 2)
    before = Plan(rounds=40, per_round=5, local_steps=1, batch_size=25, clip_mode="flat", noise_multiplier=1.0)
    stated = before.privacy(federation, model=model)
    assert [row.client for row in stated.clients] == ["island", "west", "south", "east", "north"]
    assert stated.clients[0].epsilon == pytest.approx(stated.row("server").epsilon)
    assert stated.clients[0].epsilon > 3 * stated.clients[1].epsilon
    assert "island, with 25 records, sets the ε" in " ".join(stated.notes)
    assert "island" in str(stated)
    assert stated.as_json()["clients"][0]["client"] == "island"
    run = fedcdp.simulate(model, federation, target_epsilon=4)
    after = run.privacy()
    assert {round(row.epsilon, 6) for row in after.clients} == {round(after.row("server").epsilon, 6)}
    assert "every client has this ε, whether it holds 25 or 1,200 records" in after.notes
    assert run.plan.weighting == "records"


def test_a_client_that_took_part_less_has_spent_less() -> None:
    federation = fedcdp.partition((torch.randn(60, 4), torch.arange(60) % 2), indices=[range(40), range(40, 60)])
    plan = Plan(rounds=6, per_round=1, local_steps=1, batch_size=5, noise_multiplier=1.0, seed=3)
    run = fedcdp.simulate(nn.Linear(4, 2), federation, plan)
    spent = {row.records: row.epsilon_used for row in run.privacy().clients}
    often = dict(zip([40, 20], run.participations.tolist(), strict=True))
    assert len(set(often.values())) == 2
    alone = {
        size: plan.privacy(federation, rounds=count, per_round=2, model=nn.Linear(4, 2)).clients
        for size, count in often.items()
    }
    for size, rows in alone.items():
        assert spent[size] == pytest.approx(next(row.epsilon_worst for row in rows if row.records == size), rel=1e-6)
