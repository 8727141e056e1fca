"""A clip bound that follows a quantile: what one record or client can change, what readers see, where the bound goes.

Statistical bounds are five standard errors, as in test_noise.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.errors import PlanError, RunError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.noise import SeededNoise
from fedcdp.methods import METHODS, Moment, take_part
from fedcdp.methods.aggregation import Aggregate, next_clip
from fedcdp.methods.quantile import clip_rule, count_examples, indicators
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.simulate import simulate
from tests.support import naive
from tests.support.pairs import sample_first

MODEL = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
ENGINE = FunctionalEngine(MODEL, F.cross_entropy)
PRIVATE: list[dict[str, Any]] = [
    {"method": "fed-cdp", "noise": "example"},
    {"method": "fed-cdp", "noise": "batch"},
    {"method": "fed-cdp", "noise": "cohort"},
    {"method": "fed-sdp", "noise_at": "server"},
    {"method": "fed-sdp", "noise_at": "client"},
]


def plan_of(**fields: Any) -> Plan:
    defaults = {"clip": "quantile(0.5, 1)", "batch_size": 2, "per_round": 3, "quantile_noise": 0.5, "rounds": 4}
    return Plan(**defaults | fields)


def moment(plan: Plan, clients: int, **fields: Any) -> Moment:
    numbers = torch.arange(clients)
    noise = SeededNoise(plan.seed, ENGINE.layout)
    return Moment(plan, ENGINE, noise, 0, numbers, torch.full((clients,), plan.batch_size), **fields)


def entries(first: Tensor, second: Tensor) -> Tree:
    """Gradients [clients, examples, ...] whose two layers have the given norms."""
    tree = {name: torch.zeros(*first.shape, *shape) for name, shape in ENGINE.layout.shapes.items()}
    tree["0.weight"][..., 0, 1] = first
    tree["1.weight"][..., 1, 1], tree["1.bias"][..., 0] = 0.6 * second, -0.8 * second
    return tree


# What one unit can change --------------------------------------------------------------------------------------------


def test_an_indicator_is_the_share_of_the_layers_within_the_bound_less_a_half():
    first, second = torch.tensor([[0.0, 1.0, 1.01, 9.0, 0.5]]), torch.tensor([[0.0, 0.9, 2.0, 0.1, 1.0001]])
    present = torch.ones(1, 5, dtype=torch.bool)
    found = indicators(entries(first, second), present, moment(plan_of(), 1))
    assert found.tolist() == [[0.5, 0.5, -0.5, 0.0, 0.0]]
    flat = indicators(entries(first, second), present, moment(plan_of(clip_mode="flat"), 1))
    assert flat.tolist() == [[0.5, -0.5, -0.5, -0.5, -0.5]]


def test_it_judges_by_the_bound_of_the_round_not_by_the_first():
    values, present = entries(torch.tensor([[2.0]]), torch.tensor([[2.0]])), torch.ones(1, 1, dtype=torch.bool)
    assert indicators(values, present, moment(plan_of(), 1, current_clip=2.5)).item() == 0.5
    assert indicators(values, present, moment(plan_of(), 1, current_clip=1.5)).item() == -0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_an_empty_slot_and_an_example_that_is_not_finite_say_nothing(bad):
    values = entries(torch.tensor([[0.1, 0.1, bad]]), torch.tensor([[0.1, 0.1, 0.1]]))
    found = indicators(values, torch.tensor([[True, False, True]]), moment(plan_of(), 1))
    assert found.tolist() == [[0.5, 0.0, 0.0]]


norms = st.lists(
    st.tuples(st.floats(0, 1e25), st.floats(0, 1e25)) | st.sampled_from([(math.nan, 0.0), (1.0, math.inf)]), min_size=1
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(norms=norms, bound=st.floats(1e-6, 1e6), data=st.data())
def test_zeroing_out_a_record_moves_the_sum_by_at_most_a_half_and_a_client_by_half_its_slots(norms, bound, data):
    values = entries(torch.tensor([[[a for a, _ in norms]]])[0].float(), torch.tensor([[b for _, b in norms]]).float())
    present = torch.tensor([data.draw(st.lists(st.booleans(), min_size=len(norms), max_size=len(norms)))])
    at = moment(plan_of(), 1, current_clip=bound)
    whole = indicators(values, present, at).sum().item()
    assert abs(whole) <= len(norms) / 2
    for out in range(len(norms)):
        without = present.clone()
        without[0, out] = False
        assert abs(whole - indicators(values, without, at).sum().item()) <= 0.5


def test_half_is_reached():
    """The accountant's ½ is no more than needed."""
    values, at = entries(torch.tensor([[0.1, 5.0]]), torch.tensor([[0.1, 5.0]])), moment(plan_of(), 1)
    assert indicators(values, torch.tensor([[True, True]]), at).tolist() == [[0.5, -0.5]]


# Noise ---------------------------------------------------------------------------------------------------------------

CONVENTIONS = [
    ("example", "poisson", 0.5 * math.sqrt(6)),
    ("example", "partition", 0.5 * math.sqrt(2)),
    ("batch", "poisson", 0.5),
    ("cohort", "poisson", 0.5 / 3),
]


@pytest.mark.parametrize(("convention", "sampling", "expected"), CONVENTIONS)
@pytest.mark.parametrize("tapped", [False, True])
@pytest.mark.parametrize("filled", [0, 1, 2])
def test_a_clients_count_carries_the_noise_of_the_convention_whatever_its_batch(
    convention, sampling, expected, tapped, filled
):
    clients = 4000
    plan = plan_of(noise=convention, record_sampling=sampling)
    at = moment(plan, clients, tap=(lambda *_: None) if tapped else None)
    values = entries(torch.full((clients, 2), 0.5), torch.full((clients, 2), 0.5))
    present = (torch.arange(2) < filled).expand(clients, 2)
    noise = (count_examples(values, present, at) - filled / 2).numpy()
    assert abs(noise.std() - expected) < 5 * expected / math.sqrt(2 * clients)
    assert abs(noise.mean()) < 5 * expected / math.sqrt(clients)


def test_the_count_is_judged_in_the_first_step_only_and_sent_once(small):
    plan = Plan(clip="quantile(0.5, 1)", batch_size=3, per_round=2, local_steps=2)
    engine = FunctionalEngine(small.model, F.cross_entropy)
    at = Moment(plan, engine, SeededNoise(0, engine.layout), 0, torch.tensor([4, 7]), torch.tensor([3, 3]))
    weights = {name: p.detach() for name, p in small.model.named_parameters()}
    mask = torch.ones(2, 3, dtype=torch.bool)
    batches = [
        Batch(small.inputs[i : i + 6].unflatten(0, (2, 3)), small.targets[i : i + 6].unflatten(0, (2, 3)), mask)
        for i in (0, 6, 12)
    ]
    one, two = (take_part(METHODS["fed-cdp"], weights, batches[:n], at) for n in (1, 2))
    other = take_part(METHODS["fed-cdp"], weights, [batches[2], batches[1]], at)
    assert one.count is not None
    assert torch.equal(one.count, two.count)
    assert not torch.equal(one.count, other.count)


@pytest.mark.parametrize("convention", ["example", "batch"])
def test_readers_see_the_count_noised_as_the_gradients_are(small, convention):
    plan = Plan(clip="quantile(0.5, 0.5)", batch_size=3, per_round=2, local_steps=1, noise=convention, quantile_noise=0.7)
    engine = FunctionalEngine(small.model, F.cross_entropy)
    noise, clients = SeededNoise(0, engine.layout), torch.tensor([4, 7])
    seen: dict[str, list[Tree]] = defaultdict(list)
    at = Moment(
        plan, engine, noise, 0, clients, torch.tensor([3, 3]), tap=lambda reader, _, shown: seen[reader].append(shown)
    )
    mask = torch.tensor([[True, True, False], [True, True, True]])
    batch = Batch(small.inputs[:6].unflatten(0, (2, 3)), small.targets[:6].unflatten(0, (2, 3)), mask)
    weights = {name: p.detach() for name, p in small.model.named_parameters()}
    sent = take_part(METHODS["fed-cdp"], weights, [batch], at)
    raw = torch.zeros(2, plan.slots, dtype=torch.float64)
    for client, slot in mask.nonzero().tolist():
        gradient = naive.gradient(
            small.model, naive.trainable(small.model), (batch.inputs[client, slot], batch.targets[client, slot])
        )
        raw[client, slot] = naive.indicator(gradient, naive.layers_of(small.model), 0.5)
    assert len(set(raw.flatten().tolist())) > 1
    shown = seen["type2-count"][0]["within"]
    assert {reader: len(told) for reader, told in seen.items()} == dict.fromkeys(
        ["local-weights", "type2-count", "type2", "type1", "type0", "type1-count", "type0-count"], 1
    )
    if convention == "example":
        torch.testing.assert_close(shown, raw + noise.for_indicators(0, clients, plan.slots, 0.7))
        torch.testing.assert_close(sent.count, shown.sum(1))
    else:
        torch.testing.assert_close(shown, raw[:, :3])
        torch.testing.assert_close(sent.count, raw.sum(1) + noise.for_count(0, clients, 0.7))
    for reader in ("type1-count", "type0-count"):
        assert torch.equal(seen[reader][0]["within"], sent.count)


def test_nothing_is_counted_without_a_quantile_or_without_privacy(small):
    engine = FunctionalEngine(small.model, F.cross_entropy)
    weights = {name: p.detach() for name, p in small.model.named_parameters()}
    batch = Batch(small.inputs[None, :3], small.targets[None, :3], torch.ones(1, 3, dtype=torch.bool))
    plans = [Plan(method=method, batch_size=3) for method in ("fed-cdp", "fed-sdp")]
    plans += [Plan(method=method, batch_size=3, clip="quantile(0.5, 1)") for method in ("nonprivate", "dssgd")]
    for plan in plans:
        noise = SeededNoise(0, engine.layout)
        at = Moment(plan, engine, noise, 0, torch.tensor([1]), torch.tensor([3]))
        sent = take_part(METHODS[plan.method], weights, [batch], at)
        assert sent.count is None
        assert clip_rule(plan).admitted(sent, at) is None


# The server ----------------------------------------------------------------------------------------------------------


def received(plan: Plan, counts: list[list[float]]) -> Aggregate:
    weights = {name: p.detach() for name, p in MODEL.named_parameters()}
    aggregate = Aggregate(weights, plan)
    for chunk in counts:
        update = {name: torch.zeros(len(chunk), *value.shape) for name, value in weights.items()}
        aggregate.add(update, torch.tensor(chunk, dtype=torch.float64))
    return aggregate


@pytest.mark.parametrize("counts", [[[0.7, -0.4, 1.2]], [[0.7], [-0.4, 1.2]], [[0.1]], []])
def test_the_bound_moves_by_the_planned_number_whoever_took_part(counts):
    plan = plan_of(clip="quantile(0.3, 1)", quantile_rate=0.4)
    found = next_clip(received(plan, counts), moment(plan, 0, current_clip=2.0))
    total = sum(sum(chunk) for chunk in counts)
    assert found == pytest.approx(2.0 * math.exp(-0.4 * (0.5 + total / 6 - 0.3)))


def test_fed_sdp_noises_the_sum_once_at_the_server_also_when_nobody_came():
    plan = plan_of(method="fed-sdp", clip="quantile(0.5, 1)", quantile_rate=1.0, quantile_noise=2.0)
    noise = SeededNoise(plan.seed, ENGINE.layout).for_server_count(0, torch.device("cpu"), 2.0)
    for counts in ([], [[0.5, -0.5]]):
        found = next_clip(received(plan, counts), moment(plan, 0, current_clip=1.0))
        assert found == pytest.approx(math.exp(-noise / 3))


def test_how_clients_are_grouped_changes_no_bit_of_the_bound():
    counts = np.random.default_rng(1).normal(size=50).tolist()
    plan = plan_of()
    groups = [[counts], [counts[:7], counts[7:]], [[count] for count in counts], [counts[::-1]]]
    bounds = {next_clip(received(plan, chunks), moment(plan, 0)) for chunks in groups}
    assert len(bounds) == 1


# Whole runs ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A network whose gradient for input x (a number) is x, everywhere: loss = weight · x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


def scaled(sizes: Tensor, clients: int) -> Federation:
    return partition((sizes[:, None], torch.zeros(len(sizes), dtype=torch.int64)), clients=clients, scheme="iid")


def run_scaled(federation: Federation, plan: Plan) -> list[float]:
    run = simulate(Scaled(), federation, plan, loss=lambda outputs, _: outputs.mean())
    return [row["clip"] for row in run.metrics]


@pytest.mark.parametrize("convention", sample_first(["example", "batch", "cohort"]))
@pytest.mark.parametrize(("target", "start"), [(0.5, 100.0), (0.5, 0.01), (0.8, 1.0)])
def test_fed_cdps_bound_finds_the_quantile_of_the_gradients_norms(convention, target, start):
    norms = torch.exp(torch.randn(2000, generator=torch.Generator().manual_seed(2)))
    plan = Plan(
        clip=f"quantile({target}, {start})", rounds=250, per_round=50, local_steps=1, batch_size=8, noise=convention,
        quantile_noise=0.2, noise_multiplier=1.0,
    )  # fmt: skip
    clips = run_scaled(scaled(norms, 100), plan)
    assert clips[0] == start
    assert np.mean(clips[-100:]) == pytest.approx(np.quantile(norms.numpy(), target), rel=0.1)


@pytest.mark.parametrize("placement", ["server", "client"])
def test_fed_sdps_bound_finds_the_median_of_the_updates_norms(placement):
    """One record a client, one step at rate 1: the update's norm is the record."""
    norms = torch.exp(torch.randn(100, generator=torch.Generator().manual_seed(3)))
    plan = Plan(
        method="fed-sdp", noise_at=placement, clip="quantile(0.5, 20)", rounds=250, per_round=60, local_steps=1,
        batch_size=1, quantile_noise=0.5, learning_rate=1.0, record_sampling="partition",
    )  # fmt: skip
    clips = run_scaled(scaled(norms, 100), plan)
    assert np.mean(clips[-100:]) == pytest.approx(norms.median().item(), rel=0.1)


def test_the_noise_follows_the_bound():
    """Gradients of 0: what moves the weight is noise, of σC with the C that the row of metrics says."""
    plan = Plan(
        clip="quantile(0.9, 1)", rounds=300, per_round=1, local_steps=1, batch_size=1, noise="batch", learning_rate=1.0,
        noise_multiplier=2.0, quantile_noise=3.0, quantile_rate=1.0, record_sampling="partition",
    )  # fmt: skip
    moved: list[float] = []
    federation = scaled(torch.zeros(1), 1)
    loss = lambda outputs, _: outputs.mean()  # noqa: E731
    run = simulate(Scaled(), federation, plan, loss=loss)
    clips = np.array([row["clip"] for row in run.metrics])
    assert clips.max() / clips.min() > 10
    noise = SeededNoise(plan.seed, FunctionalEngine(Scaled(), loss).layout)
    for round_ in range(300):
        moved.append(-noise.for_step(round_, torch.tensor([0]), 0, 2.0 * clips[round_])["weight"].item())
    assert run.model.weight.item() == pytest.approx(sum(moved), rel=1e-4)


@pytest.fixture
def federation() -> Federation:
    generator = torch.Generator().manual_seed(1)
    return partition((torch.randn(90, 3, generator=generator), torch.arange(90) % 2), clients=9, scheme="iid")


def training_plan(**fields: Any) -> Plan:
    defaults = {"rounds": 6, "per_round": 7, "local_steps": 2, "batch_size": 4, "noise_multiplier": 0.3}
    return Plan(**defaults | {"clip": "quantile(0.4, 0.2)", "quantile_noise": 0.7} | fields)


@pytest.mark.parametrize("fields", PRIVATE)
def test_how_many_clients_are_trained_at_once_changes_neither_bound_nor_model(federation, fields):
    whole, *others = (simulate(MODEL, federation, training_plan(**fields), chunk=chunk) for chunk in (None, 1, 3))
    clips = [row["clip"] for row in whole.metrics]
    assert len(set(clips)) == 6
    for run in others:
        assert [row["clip"] for row in run.metrics] == clips
        for name, value in run.model.named_parameters():
            torch.testing.assert_close(value, dict(whole.model.named_parameters())[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", PRIVATE)
def test_a_stopped_run_goes_on_to_the_same_bits(federation, tmp_path: Path, fields):
    class StopError(Exception):
        pass

    def stop(row: dict[str, object]) -> None:
        if row["round"] == 3:
            raise StopError

    plan = training_plan(**fields)
    whole = simulate(MODEL, federation, plan)
    with pytest.raises(StopError):
        simulate(MODEL, federation, plan, out=tmp_path / "run", progress=stop)
    state = RunDirectory(tmp_path / "run").load_state()
    assert state is not None
    assert state.clip == whole.metrics[3]["clip"]
    resumed = simulate(MODEL, federation, plan, out=tmp_path / "run", resume=True)
    assert [row["clip"] for row in resumed.metrics] == [row["clip"] for row in whole.metrics]
    for name, value in resumed.model.named_parameters():
        assert torch.equal(value, dict(whole.model.named_parameters())[name])


def test_a_checkpoint_without_the_bound_is_refused(federation, tmp_path: Path):
    plan = training_plan()
    simulate(MODEL, federation, plan, out=tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    state = directory.load_state()
    assert state is not None
    directory.save_state(type(state)(state.round, state.weights, state.average), plan.digest())
    with pytest.raises(RunError, match="does not belong to the plan"):
        simulate(MODEL, federation, plan, out=tmp_path / "run", resume=True)


def test_without_privacy_a_quantile_is_ignored_as_any_bound_is(federation):
    for method in ("nonprivate", "dssgd"):
        one, other = (simulate(MODEL, federation, training_plan(method=method, clip=c)) for c in (4, "quantile(0.5, 4)"))
        assert all("clip" not in row for row in other.metrics)
        for name, value in one.model.named_parameters():
            assert torch.equal(value, dict(other.model.named_parameters())[name])


def test_the_raw_median_is_refused_and_the_sentence_says_what_to_write():
    for written in ("median", "median()", " median(4) "):
        with pytest.raises(PlanError, match=r"^clip: .*no finite ε.*quantile\(0\.5, 4\)") as refused:
            Plan(clip=written)
        assert "\n" not in str(refused.value)
