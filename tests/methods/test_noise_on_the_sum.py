"""Noise on the sum: clients send whole numbers with a share of the noise each, and the server reads only their sum."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import Batch, BatchedEngine, FunctionalEngine
from fedcdp.engine.batched import engines_for
from fedcdp.errors import PlanError
from fedcdp.files.tree import Tree
from fedcdp.mechanism import noise as noise_module
from fedcdp.mechanism.noise import SeededNoise
from fedcdp.methods import METHODS, Moment, take_part
from fedcdp.methods.aggregation import Aggregate, server_update
from fedcdp.training.autotune import choose_engine
from fedcdp.training.local_engines import StepwiseEngine, refusal
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State
from fedcdp.training.simulate import simulate
from tests.support import naive

SIZES = [9, 2, 6, 7]
KINDS: dict[str, dict[str, Any]] = {
    "fed-cdp": {"method": "fed-cdp", "clip": 0.5},
    "fed-cdp-decay": {"method": "fed-cdp-decay", "clip": "linear(0.6, 0.2)"},
    "fed-sdp": {"method": "fed-sdp", "noise_at": "client", "clip": 0.1, "local_steps": 3, "batch_size": 3},
}


def plan_of(**changes: Any) -> Plan:
    usual = {
        "noise": "sum", "secure_aggregation": True, "rounds": 2, "per_round": 3, "local_steps": 1, "batch_size": 5,
        "learning_rate": 0.2, "record_sampling": "partition", "noise_multiplier": 0.8, "seed": 5, "clip": 0.5,
    }  # fmt: skip
    return Plan(**usual | changes)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def federation(sizes: list[int] = SIZES) -> Federation:
    generator = torch.Generator().manual_seed(1)
    count = sum(sizes)
    inputs, targets = torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    starts = [sum(sizes[:client]) for client in range(len(sizes))]
    return partition((inputs, targets), indices=[list(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)])


def simulator_of(plan: Plan, chunk: int = 2, engine: type = BatchedEngine, sizes: list[int] = SIZES) -> Simulator:
    data = ClientData(federation(sizes), plan, torch.device("cpu"))
    return Simulator.stepwise(data, engine(network(), nn.functional.cross_entropy), chunk)


def start() -> State:
    return State(0, {name: p.detach() for name, p in network().named_parameters()}, None)


def sent_by(simulator: Simulator, clients: list[int], **moment: Any) -> Tree:
    state = start()
    table, sizes = simulator.data.records_of(torch.tensor(clients))
    at = replace(simulator.moment(state, torch.tensor(clients), sizes), **moment)
    return simulator.local_engine(state.weights, simulator.data.draw(at, table, sizes), at).update


# The same as a loop in Python's whole numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [BatchedEngine, FunctionalEngine])
@pytest.mark.parametrize("colluders", [0, 2])
def test_a_fed_cdp_round_equals_a_loop_in_whole_numbers(engine: type, colluders: int) -> None:
    """To the bit; the batched engine never rounds outer products to float32, and may differ by a step or two."""
    plan = plan_of(colluders=colluders, noise_multiplier=3.0)
    simulator, state = simulator_of(plan, engine=engine), start()
    clients, bound, shares = [0, 1, 3], 0.5, []
    tau = math.ceil(math.hypot(3 * 2**24 * (1 + 2**-18 + math.sqrt(43 / 2) / 2**24), 4) / math.sqrt(3 - colluders))
    for client in clients:
        table, sizes = simulator.data.records_of(torch.tensor([client]))
        at = simulator.moment(state, torch.tensor([client]), sizes)
        draw = simulator.data.draw(at, table, sizes)
        batch = simulator.data.examples.batch(draw.positions[0], draw.present[0])
        weights = {name: value[None] for name, value in state.weights.items()}
        gradients = {n: g[0].double() for n, g in simulator.engine.per_example_gradients(weights, batch).items()}
        total = {name: torch.zeros_like(value[0]) for name, value in gradients.items()}
        for slot in range(int(batch.present.sum())):
            one = {name: value[slot] for name, value in gradients.items()}
            total = naive.add(total, naive.clipped(one, naive.layers_of(network()), bound))
        unit = SeededNoise(plan.seed, simulator.engine.layout)._unit("sum-noise", 0, torch.tensor([client]), 0, 0, 43)
        noise = simulator.engine.layout.unflatten((unit[0].double() * tau).round())
        shares.append(naive.rounded_share(total, bound, noise))
        found = sent_by(simulator, [client])
        for name, value in found.items():
            wrong = [(x - y) % 2**64 for x, y in zip(value.flatten().tolist(), shares[-1][name], strict=True)]
            assert max(min(x, 2**64 - x) for x in wrong) <= (2 if engine is BatchedEngine else 0)
    mean_in_step = (5 + 2 + 5 + 5) / 4
    expected = naive.sum_of_shares(shares, bound)
    moved = simulator.round(state, torch.tensor(clients)).weights
    for name, value in moved.items():
        step = torch.tensor(expected[name], dtype=torch.float64).view(value.shape) * (-0.2 / mean_in_step / 3)
        torch.testing.assert_close(value, (state.weights[name].double() + step).float(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_clients_change_nothing_to_the_bit(kind: str) -> None:
    plan = plan_of(**KINDS[kind], per_round=4, noise_multiplier=2.0)
    whole = sent_by(simulator_of(plan), [0, 1, 2, 3])
    for client in range(4):
        alone = sent_by(simulator_of(plan), [client])
        assert all(torch.equal(alone[name][0], whole[name][client]) for name in whole)
    after = [simulator_of(plan, chunk).round(start(), torch.arange(4)).weights for chunk in (1, 2, 3, 4)]
    for other in after[1:]:
        assert all(torch.equal(other[name], after[0][name]) for name in other)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_training_is_that_of_plain_sums(kind: str) -> None:
    """Fed-CDP with clients of one size, Fed-SDP with any: only the grid is between the two."""
    plan = plan_of(**KINDS[kind], noise_multiplier=0.0)
    sizes = [6, 6, 6, 6] if plan.per_example else SIZES
    sums = simulate(network(), federation(sizes), plan).model
    plain = simulate(network(), federation(sizes), plan.but(noise="batch", secure_aggregation=False)).model
    for one, other in zip(sums.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_every_record_weighs_the_same_whoever_holds_it() -> None:
    plan = plan_of(noise_multiplier=0.0, per_round=5, rounds=1, batch_size=24)
    split, union = federation([9, 2, 1, 7, 5]), federation([24])
    single = plan.but(noise="batch", secure_aggregation=False, per_round=1)
    for changes in ({}, {"weighting": "records"}, {"mean_records": 4.8}):
        found = simulate(network(), split, plan.but(**changes)).model
        for one, other in zip(found.parameters(), simulate(network(), union, single).model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


# Noise ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("colluders", [0, 2])
def test_the_noise_on_the_sum_is_sigma_c_once_the_colluders_are_left_out(kind: str, colluders: int) -> None:
    plan = plan_of(**KINDS[kind], per_round=4, colluders=colluders, rounds=200, noise_multiplier=2.0)
    silent = plan.but(noise_multiplier=0.0)
    found = []
    for round_ in range(60):
        state = replace(start(), round=round_)
        moved, still = (simulator_of(each, chunk=4).round(state, torch.arange(4)).weights for each in (plan, silent))
        unit = plan.noise_scale_at(round_) / 4
        if plan.per_example:
            unit *= plan.learning_rate_at(round_) / (17 / 4)
        found.append(torch.cat([(moved[name] - still[name]).flatten() for name in moved]).double() / unit)
    drawn = torch.cat(found)
    assert abs(float(drawn.mean())) < 6 * math.sqrt(2 / len(drawn))
    assert float(drawn.square().mean()) == pytest.approx(4 / (4 - colluders), rel=6 * math.sqrt(2 / len(drawn)))


def test_a_share_follows_the_roster_and_the_attempt() -> None:
    plan = plan_of(per_round=4, noise_multiplier=50.0, colluders=1)
    simulator = simulator_of(plan)
    whole, few, again = (
        simulator.engine.layout.flatten(sent_by(simulator, [0], **moment), lead=1).double()
        for moment in ({}, {"roster": 2}, {"attempt": 1})
    )
    assert float((few / whole).quantile(0.5)) == pytest.approx(math.sqrt(3), rel=0.05)  # the same draw, scaled up
    assert not torch.allclose(whole, again, rtol=0.1)


def test_secure_shares_are_drawn_by_opendp_and_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opendp")
    drawn: list[tuple[tuple[int, ...], int]] = []
    real = noise_module.discrete_gaussians

    def noted(shape: tuple[int, ...], deviation: int) -> Tensor:
        drawn.append((shape, deviation))
        return real(shape, deviation)

    monkeypatch.setattr(noise_module, "discrete_gaussians", noted)
    plan = plan_of(secure_noise=True, rounds=1, noise_multiplier=5.0)
    first, second = (simulate(network(), federation(), plan).model for _ in range(2))
    assert [shape for shape, _ in drawn] == [(3, 43)] * 2
    assert drawn[0][1] == pytest.approx(5 * 2**24 / math.sqrt(3), rel=1e-5)
    assert not torch.allclose(next(first.parameters()), next(second.parameters()), atol=1e-3)


# Sums -----------------------------------------------------------------------------------------------------------------


def exact_total(inputs: Tensor, bound: float) -> list[float]:
    """The sum of clipped rows, rounded once."""
    norms = inputs.double().norm(dim=1, keepdim=True).clamp(min=bound)
    return [math.fsum(column) for column in (inputs.double() * (bound / norms)).T.tolist()]


@pytest.mark.parametrize("engine", [BatchedEngine, FunctionalEngine])
@pytest.mark.parametrize("exact", [True, False])
def test_sums_are_exact_to_the_grid_and_float32_would_not_be(engine: type, exact: bool) -> None:
    records, width, bound = 500, 300, 1.0
    inputs = torch.rand(1, records, width, generator=torch.Generator().manual_seed(0)) + 0.1
    model = nn.Linear(width, 1, bias=False)
    found = engine(model, lambda outputs, _: outputs.mean()).clipped_sum(
        {"weight": torch.zeros(1, 1, width)}, Batch(inputs, torch.zeros(1, records), torch.ones(1, records).bool()),
        (("weight",),), bound, exact=exact,
    )["weight"]  # fmt: skip
    assert found.dtype == (torch.float64 if exact else torch.float32)
    wrong = (found[0, 0].double() - torch.tensor(exact_total(inputs[0], bound), dtype=torch.float64)).abs() * 2**24 / bound
    assert (float(wrong.max()) < 1e-3) == exact
    assert (float(wrong.norm()) > math.sqrt(width)) != exact  # more than rounding to the grid may add


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([BatchedEngine, FunctionalEngine]), st.booleans())
def test_zeroing_a_record_out_moves_the_whole_numbers_by_at_most_the_sensitivity(
    seed: int, engine: type, flat: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    inputs = torch.randn(1, 12, 6, generator=generator) * 10.0 ** float(torch.rand(1, generator=generator) * 6 - 3)
    targets, bound = torch.randint(0, 3, (1, 12), generator=generator), 0.3
    plan, computing = plan_of(clip=bound, clip_mode="flat" if flat else "layer"), engine(model, nn.functional.cross_entropy)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    noise, clients = noise_module.Silence(computing.layout), torch.tensor([0])
    at = Moment(plan, computing, noise, 0, clients, torch.tensor([12]))
    everyone = torch.ones(1, 12, dtype=torch.bool)
    without = everyone.clone()
    without[0, int(torch.randint(0, 12, (1,), generator=generator))] = False
    with_it, without_it = (
        computing.layout.flatten(
            take_part(METHODS["fed-cdp"], weights, [Batch(inputs, targets, present)], at).update, lead=1
        )
        for present in (everyone, without)
    )
    groups = 1 if flat else 2
    limit = 2**24 * math.sqrt(groups) * (1 + 2**-18) + math.sqrt(computing.layout.size)
    assert float((with_it - without_it).double().norm()) <= limit


def test_a_spoilt_record_adds_nothing_to_the_sum() -> None:
    plan = plan_of(noise_multiplier=0.0)
    for engine in (BatchedEngine, FunctionalEngine):
        computing = engine(network(), nn.functional.cross_entropy)
        weights = {name: p.detach() for name, p in network().named_parameters()}
        inputs, targets = torch.randn(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64)
        spoilt = inputs.clone()
        spoilt[0, 1] = math.nan
        at = Moment(plan, computing, noise_module.Silence(computing.layout), 0, torch.tensor([0]), torch.tensor([3]))
        there = torch.tensor([[True, False, True]])
        batches = (Batch(inputs, targets, there), Batch(spoilt, targets, torch.ones(1, 3, dtype=torch.bool)))
        one, other = (take_part(METHODS["fed-cdp"], weights, [batch], at).update for batch in batches)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_sums_wrap_around_and_are_read_as_signed_numbers() -> None:
    plan = plan_of(per_round=2)
    weights = {"w": torch.zeros(2)}
    received = Aggregate(weights, plan)
    mask = torch.tensor([2**63 - 1, -(2**63)])
    received.add({"w": torch.stack([mask + torch.tensor([5, 7]), -mask])})
    assert received.total_update()["w"].tolist() == [5, 7]


# Engines and taps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kernel", "compiled"])
def test_engines_that_sum_in_float32_are_not_used(name: Any, caplog: pytest.LogCaptureFixture) -> None:
    plan, data = plan_of(), ClientData(federation(), plan_of(), torch.device("cpu"))
    engines = engines_for(network(), nn.functional.cross_entropy, name)
    caplog.set_level(logging.WARNING, logger="fedcdp")
    chosen, _ = choose_engine(plan, engines, name, data.examples, chunk=2, most=4, seconds=lambda *_: 1.0)
    assert isinstance(chosen, StepwiseEngine)
    assert "using the batched engine" in caplog.text


def test_the_kernel_says_that_it_sums_in_float32() -> None:
    data = ClientData(federation(), plan_of(), torch.device("cpu"))
    data.examples = replace(data.examples, targets=_OnGpu(data.examples.targets))
    engine = next(iter(engines_for(network(), nn.functional.cross_entropy).values()))
    assert "float64" in str(refusal(plan_of(), engine, data.examples))
    assert "float64" not in str(refusal(plan_of(**KINDS["fed-sdp"]), engine, data.examples))


class _OnGpu:
    is_cuda = True

    def __init__(self, values: Tensor) -> None:
        self._values = values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", ["sum", "batch"])
def test_under_secure_aggregation_a_server_is_shown_the_sum_alone(kind: str, noise: str) -> None:
    plan = plan_of(**KINDS[kind] | {"noise": noise})
    simulator, state = simulator_of(plan), start()
    shown: dict[str, list[Tree]] = {}

    def tap(reader: str, _: Moment, tree: Tree) -> None:
        shown.setdefault(reader, []).append(tree)

    received = Aggregate(state.weights, plan)
    sent = sent_by(simulator, [0, 1, 2], tap=tap)
    assert "type0" not in shown
    assert all(torch.equal(shown["type1"][0][name], sent[name]) for name in sent)
    received.add(sent)
    nobody = torch.zeros(0, dtype=torch.int64)
    server_update(METHODS[plan.method], state.weights, received, replace(simulator.moment(state, nobody, nobody), tap=tap))
    (read,) = shown["type0"]
    assert all(torch.equal(read[name], sent[name].to(read[name].dtype).sum(0)) for name in sent)


def test_plans_that_do_not_fit_are_refused_before_training() -> None:
    with pytest.raises(PlanError, match="below 64"):
        simulate(network(), federation(), plan_of(noise_multiplier=1e-6))
