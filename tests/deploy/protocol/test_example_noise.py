"""A client whose policy names `example`: no gradient without noise leaves the engine, one by one or summed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.local_grid import experiment, make_nodes
from tests.support.one_client import NETWORK, ask, job, send

pytest.importorskip("flwr")

from fedcdp.deploy.protocol import local_round, messages, wire
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.engine.base import Batch
from fedcdp.engine.batched import engines_for
from fedcdp.errors import DefectError
from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.noise import SecureNoise, noise_of
from fedcdp.methods import METHODS, FedCDP, Local, Moment, NoisedExamples

LAYOUT = Layout.of(NETWORK)
SIGMA = 2.0
FEARS_READERS = ClientPolicy(epsilon=1e6, adversary="example")


class Watched:
    """Stands between a method and its engine, and keeps every tensor that the engine hands over."""

    def __init__(self, engine: Any, seen: list[tuple[str, Tree]]) -> None:
        self._engine, self._seen = engine, seen

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if not callable(found) or name in ("model", "loss"):
            return found

        def call(*given: Any, **named: Any) -> Any:
            result = found(*given, **named)
            for part in result if isinstance(result, tuple) else (result,):
                if part is not None:
                    self._seen.append((name, part if isinstance(part, dict) else {"count": part}))
            return result

        return call


class WatchedExamples(Watched, NoisedExamples):
    """The same, for the method's question which kind of engine it has."""

    released = property(lambda self: self.__getattr__("released"))  # type: ignore[assignment]


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tree]]:
    """What engines hand over to the methods, by the name of what was asked."""
    seen: list[tuple[str, Tree]] = []
    real = local_round.Moment

    def watched(plan: Any, engine: Any, *rest: Any, **named: Any) -> Moment:
        kind = WatchedExamples if isinstance(engine, NoisedExamples) else Watched
        return real(plan, kind(engine, seen), *rest, **named)

    monkeypatch.setattr(local_round, "Moment", watched)
    return seen


def take_part(tmp_path: Path, policy: ClientPolicy, weights: dict[str, torch.Tensor], **plan: Any) -> Tree:
    task = job(noise_multiplier=SIGMA, local_steps=2, **plan).task()
    node = make_nodes(tmp_path, policy)[100]
    assert send(node, messages.publish(task), "query.subscribe").config_records["answer"]["accepts"] is True
    clip = 1.0 if task.plan.quantile else None
    content = messages.ask(task.digest(), Round(0, 0, clip), wire.dense(weights)) if clip else ask(task, 0)
    return wire.decode(send(node, content, "train").array_records["update"], LAYOUT, may_be_sparse=True)


@pytest.mark.parametrize("plan", [{}, {"record_sampling": "partition"}, {"clip": "quantile(0.5, 1)"}, {"momentum": 0.5}])
def test_the_method_is_given_noised_gradients_and_nothing_else(
    plan: dict[str, Any], tmp_path: Path, handed_over: list[tuple[str, Tree]]
) -> None:
    weights = {name: p.detach() for name, p in NETWORK.named_parameters()}
    take_part(tmp_path, FEARS_READERS, weights, **plan)
    wanted = job(noise_multiplier=SIGMA, local_steps=2, **plan).plan
    assert {name for name, _ in handed_over} == {"released"}
    assert sum("count" in tree for _, tree in handed_over) == (wanted.quantile is not None)
    bound = 1.0 if wanted.quantile else wanted.clip_at(0)
    for _, tree in handed_over:
        if "count" in tree:
            assert tree["count"].shape == (1, wanted.slots)
            assert float(tree["count"].std()) > wanted.quantile_noise / 3
            continue
        flat = LAYOUT.flatten(tree, 2)[0].double()
        assert flat.shape == (wanted.slots, LAYOUT.size)  # as many as there are slots, filled or not
        # Of d coordinates with noise of σC, under which a clipped gradient's norm of √3·C is lost.
        spread = flat.norm(dim=1) / (SIGMA * bound * math.sqrt(LAYOUT.size))
        assert float(spread.min()) > 0.9
        assert float(spread.max()) < 1.1
        alike = torch.corrcoef(flat) - torch.eye(len(flat))
        assert float(alike.abs().max()) < 6 / math.sqrt(LAYOUT.size)


def test_a_small_client_has_more_noise_on_the_slots_that_it_fills(
    tmp_path: Path, handed_over: list[tuple[str, Tree]]
) -> None:
    """With `noise_slots = held`: √(S/N_i) on each of N_i slots and none on the others, as much in sum as anyone's."""
    weights = {name: p.detach() for name, p in NETWORK.named_parameters()}
    plan = {"noise_slots": "held", "record_sampling": "partition", "batch_size": 45}
    take_part(tmp_path, FEARS_READERS, weights, **plan)
    wanted = job(noise_multiplier=SIGMA, local_steps=2, **plan).plan
    held, slots = 20, wanted.slots
    assert held < slots
    assert {name for name, _ in handed_over} == {"released"}
    for _, tree in handed_over:
        flat = LAYOUT.flatten(tree, 2)[0].double()
        spread = flat.norm(dim=1) / (SIGMA * wanted.clip_at(0) * math.sqrt(LAYOUT.size))
        assert len(spread) == slots
        assert spread[:held].tolist() == pytest.approx([math.sqrt(slots / held)] * held, rel=0.1)
        assert float(spread[held:].max()) == 0


def test_without_such_a_policy_the_engine_hands_over_a_sum_without_noise(
    tmp_path: Path, handed_over: list[tuple[str, Tree]]
) -> None:
    """What the policy is for: another client's method holds the clipped sum, and noises it itself."""
    weights = {name: p.detach() for name, p in NETWORK.named_parameters()}
    take_part(tmp_path, ClientPolicy(epsilon=1e6), weights)
    assert {name for name, _ in handed_over} == {"clipped_sum"}
    norms = [float(LAYOUT.flatten(tree, 1).norm()) for _, tree in handed_over]
    assert max(norms) < 12 * 4.0 * math.sqrt(3)  # 12 slots, C = 4, three layers; noise would have a norm above 1000


@pytest.mark.parametrize("name", ["per_example_gradients", "summed_gradients", "plain_sum", "clipped_sum"])
def test_such_an_engine_refuses_everything_that_has_no_noise(name: str) -> None:
    engine = NoisedExamples(next(iter(engines_for(NETWORK, torch.nn.functional.cross_entropy).values())))
    more = ((), 1.0) if name == "clipped_sum" else ()
    with pytest.raises(DefectError, match="no gradient without noise"):
        getattr(engine, name)({}, _batch(1), *more)


def _batch(examples: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(1, examples, 30, generator=generator)
    return Batch(inputs, torch.randint(2, (1, examples), generator=generator), torch.ones(1, examples, dtype=torch.bool))


def _moment(engine: Any, noise: Any, plan: Any, **named: Any) -> Moment:
    return Moment(plan, engine, noise, 0, torch.tensor([3]), torch.tensor([4]), **named)


@pytest.mark.parametrize("clip", ["4", "quantile(0.5, 1)"])
@pytest.mark.parametrize("examples", [1, 5, 12])
def test_it_is_to_the_bit_what_a_type_2_reader_is_shown_by_the_tapped_method(clip: str, examples: int) -> None:
    plan = experiment(clip=clip).plan
    engine = next(iter(engines_for(NETWORK, torch.nn.functional.cross_entropy).values()))
    noise, current = noise_of(plan, LAYOUT), 1.0 if plan.quantile else None
    weights = {name: p.detach()[None] for name, p in NETWORK.named_parameters()}
    shown: dict[str, list[tuple[str, Tree]]] = {}
    results = []
    for name, kind in (("tapped", engine), ("one by one", NoisedExamples(engine))):
        seen = shown.setdefault(name, [])
        tap: Callable[..., None] = lambda reader, _, tree, seen=seen: seen.append((reader, tree))  # noqa: E731
        at = _moment(kind, noise, plan, tap=tap, current_clip=current)
        results.append(METHODS["fed-cdp"].local_step(Local(weights), _batch(examples), at))
    for (reader, one), (other_reader, other) in zip(
        *(sorted(each, key=lambda e: e[0]) for each in shown.values()), strict=True
    ):
        assert reader == other_reader
        assert all(torch.equal(one[name], other[name]) for name in one)
    for name in weights:
        assert torch.equal(results[0].weights[name], results[1].weights[name])


@pytest.mark.slow
def test_the_sum_of_a_step_is_distributed_as_under_one_draw() -> None:
    """Mean: the clipped sum. Deviation: σC√S, from many steps, of both; noise of slots and steps is independent."""
    plan = experiment(noise_multiplier=0.5).plan.but(secure_noise=True)
    engine = next(iter(engines_for(NETWORK, torch.nn.functional.cross_entropy).values()))
    weights = {name: p.detach()[None] for name, p in NETWORK.named_parameters()}
    batch, noise = _batch(5), SecureNoise(LAYOUT)
    at = _moment(engine, noise, plan)
    clipped = LAYOUT.flatten(engine.clipped_sum(weights, batch, at.groups, at.clip_bound), 1)[0].double()
    for kind in (engine, NoisedExamples(engine)):
        steps = [FedCDP().gradient_sum(weights, batch, _moment(kind, noise, plan)).total for _ in range(60)]
        sums = torch.stack([LAYOUT.flatten(step, 1)[0].double() for step in steps])
        rest, promised = sums - clipped, 0.5 * 4.0 * math.sqrt(plan.slots)
        values = rest.numel()
        assert float(rest.std()) == pytest.approx(promised, rel=5 / math.sqrt(2 * values))
        assert abs(float(rest.mean())) < 5 * promised / math.sqrt(values)
        assert float((torch.corrcoef(rest) - torch.eye(60)).abs().max()) < 6 / math.sqrt(LAYOUT.size)


def test_raw_gradients_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once `released` has returned, nothing holds on to the gradients without noise."""
    import gc
    import weakref

    engine = next(iter(engines_for(NETWORK, torch.nn.functional.cross_entropy).values()))
    plan = experiment(clip="quantile(0.5, 1)").plan
    raw: list[weakref.ref[torch.Tensor]] = []
    real = type(engine).per_example_gradients

    def noted(self: Any, weights: Tree, batch: Batch) -> Tree:
        found = real(self, weights, batch)
        raw.extend(weakref.ref(value) for value in found.values())
        return found

    monkeypatch.setattr(type(engine), "per_example_gradients", noted)
    kept = NoisedExamples(engine)
    weights = {name: p.detach()[None] for name, p in NETWORK.named_parameters()}
    released = kept.released(weights, _batch(5), _moment(kept, noise_of(plan, LAYOUT), plan, current_clip=1.0))
    gc.collect()
    assert released
    assert raw
    assert all(each() is None for each in raw)


@pytest.mark.parametrize("epsilon", [1e6, math.inf])
@pytest.mark.parametrize(
    "plan",
    [{"noise": "batch"}, {"noise": "cohort"}, {"method": "fed-sdp"}, {"method": "fed-sdp", "noise_at": "client"},
     {"method": "nonprivate"}, {"method": "dssgd"}],
)  # fmt: skip
def test_a_policy_against_readers_on_the_client_declines_every_other_noise(
    plan: dict[str, Any], epsilon: float, tmp_path: Path
) -> None:
    allowed = ("nonprivate", "dssgd", "fed-sdp", "fed-cdp")
    node = make_nodes(tmp_path, ClientPolicy(epsilon=epsilon, adversary="example", methods=allowed))[100]
    answer = send(node, messages.publish(job(**plan).task()), "query.subscribe").config_records["answer"]
    assert answer["accepts"] is False
    assert "has no ε against example" in str(answer["reason"])


def test_noise_is_on_the_slots_that_are_empty() -> None:
    plan = experiment().plan
    engine = NoisedExamples(next(iter(engines_for(NETWORK, torch.nn.functional.cross_entropy).values())))
    weights = {name: p.detach()[None] for name, p in NETWORK.named_parameters()}
    empty = Batch(torch.zeros(1, 1, 30), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bool))
    released, _ = engine.released(weights, empty, _moment(engine, noise_of(plan, LAYOUT), plan))
    flat = LAYOUT.flatten(released, 2)[0]
    assert flat.shape[0] == plan.slots
    assert float(flat.std(1).min()) > 0.9 * plan.noise_scale_at(0)
