"""A compiled program trains as the reference does, and is compiled once.

The programs here are traced as for a GPU, and then run without being translated (`aot_eager`), which takes no compiler.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import BatchedEngine, FunctionalEngine
from fedcdp.methods import METHODS
from fedcdp.models.networks import build, prepare
from fedcdp.training import autotune
from fedcdp.training.local_engines import CompiledEngine, refusal
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State
from fedcdp.training.simulate import simulate

CHUNK = 4


@pytest.fixture(autouse=True)
def _fresh_programs() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def federation() -> Federation:
    generator = torch.Generator().manual_seed(5)
    data = Dataset(torch.randn(160, 1, 10, 10, generator=generator), torch.randint(3, (160,), generator=generator), 3)
    return partition(Splits("dots", data, data, None, "as drawn"), clients=8, scheme="iid")


def plan(**changes: Any) -> Plan:
    usual = {"rounds": 3, "per_round": 6, "local_steps": 3, "batch_size": 3, "noise_multiplier": 0.3, "learning_rate": 0.1}
    return Plan(**usual | {"clip": "linear(0.6, 0.3)"} | changes)


def simulator(federation: Federation, plan: Plan, model: nn.Module | None = None) -> tuple[Simulator, State, CompiledEngine]:
    network = prepare(model or build("cnn", (1, 10, 10), 3), plan, "cpu")
    engine = BatchedEngine(network, F.cross_entropy)
    made = Simulator.stepwise(ClientData(federation, plan, torch.device("cpu")), engine, CHUNK)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    clip = plan.quantile.start if plan.quantile else None
    compiled = CompiledEngine(METHODS[plan.method], plan, engine, made.data.examples, CHUNK, backend="aot_eager")
    return made, State(0, weights, None, clip), compiled


def after(made: Simulator, state: State, rounds: int = 2) -> Tensor:
    for number in range(rounds):
        state = made.round(state, torch.tensor([0, 2, 3, 4, 6, 7][: 6 - number]))
    return made.engine.layout.flatten(state.weights, lead=0)


def programs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


CHANGES: dict[str, dict[str, Any]] = {
    "partition": {"record_sampling": "partition"},
    "poisson": {"record_sampling": "poisson"},
    "momentum": {"record_sampling": "poisson", "slots": 3, "momentum": 0.5},
    "flat": {"record_sampling": "fixed", "clip_mode": "flat", "noise": "cohort"},
}


def every_method_under_all_changes() -> Iterator[Any]:
    """Three methods under one change each; the other pairs are slow."""
    for (at, method), (place, change) in itertools.product(enumerate(METHODS), enumerate(CHANGES)):
        quick = at % len(CHANGES) == place and at < 3
        yield pytest.param(method, CHANGES[change], id=f"{method}-{change}", marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("method", "changes"), list(every_method_under_all_changes()))
def test_one_program_trains_all_chunks_as_the_reference_does(federation, method, changes):
    made, state, compiled = simulator(federation, plan(method=method, **changes))
    expected = after(made, state)
    made.local_engine = compiled
    torch.testing.assert_close(after(made, state), expected, rtol=0, atol=1e-5)
    # Packed Poisson batches may outgrow the room of the first program.
    assert 1 <= programs() <= (1 if changes["record_sampling"] != "poisson" else 3)


@pytest.mark.slow
def test_a_sum_that_is_not_finite_is_done_again_without_the_example(federation):
    made, state, compiled = simulator(federation, plan(method="nonprivate", record_sampling="partition"))
    made.data.examples.inputs[federation.table([2])[0][0, 1]] = torch.inf
    expected = after(made, state)
    assert torch.isfinite(expected).all()
    made.local_engine = compiled
    torch.testing.assert_close(after(made, state), expected, rtol=0, atol=1e-5)
    assert programs() == 1


@pytest.mark.slow
def test_an_example_that_is_not_finite_is_left_out_within_the_program(federation):
    made, state, compiled = simulator(federation, plan(method="fed-cdp", record_sampling="partition"))
    made.data.examples.inputs[federation.table([2])[0][0, 1]] = torch.nan
    expected = after(made, state)
    made.local_engine = compiled
    torch.testing.assert_close(after(made, state), expected, rtol=0, atol=1e-5)
    assert torch.isfinite(expected).all()


def test_a_quantile_clip_is_left_to_the_reference(federation):
    made, state, compiled = simulator(federation, plan(method="fed-cdp", clip="quantile(0.5, 1)"))
    expected = after(made, state)
    made.local_engine = compiled
    assert torch.equal(after(made, state), expected)
    assert programs() == 0


def test_a_proximal_term_is_left_to_the_reference(federation):
    made, state, compiled = simulator(federation, plan(method="fed-cdp", proximal=2.0))
    expected = after(made, state)
    made.local_engine = compiled
    assert torch.equal(after(made, state), expected)
    assert programs() == 0
    assert "proximal" in str(refusal(plan(proximal=2.0), made.engine, _on_gpu(made.data.examples)))
    functional = Simulator.stepwise(made.data, FunctionalEngine(made.engine.model, F.cross_entropy), 2)
    torch.testing.assert_close(after(functional, state), expected, rtol=0, atol=1e-5)


def _on_gpu(examples: Any) -> Any:
    """Examples that say that they are on a GPU."""
    return SimpleNamespace(targets=SimpleNamespace(is_cuda=True), inputs=examples.inputs)


@pytest.mark.slow
def test_secure_noise_in_a_program_is_fresh_and_of_the_right_size(federation):
    large = {"noise_multiplier": 50.0, "clip": 0.4, "learning_rate": 1.0, "noise": "batch", "local_steps": 1, "rounds": 1}
    dense = nn.Sequential(nn.Flatten(), nn.Linear(100, 40), nn.Tanh(), nn.Linear(40, 3))
    made, state, compiled = simulator(federation, plan(method="fed-cdp", secure_noise=True, **large), dense)
    made.local_engine = compiled
    one, two = after(made, state, rounds=1), after(made, state, rounds=1)
    start = made.engine.layout.flatten(state.weights, lead=0)
    assert not torch.equal(one, two)
    # σC on the sum of a batch of 3, over the mean of 6 clients
    expected = 50 * 0.4 / 3 / 6**0.5
    for end in (one, two):
        assert float((end - start).std()) == pytest.approx(expected, rel=0.05)
    assert 1 <= programs() <= 3  # what is drawn in secret may outgrow the room of the first program


@pytest.mark.slow
def test_what_cannot_be_compiled_is_left_to_the_batched_engine(federation, caplog):
    def refuses(*_: object) -> None:
        raise ValueError("not this one")

    made, state, compiled = simulator(federation, plan(method="fed-cdp"))
    expected = after(made, state)
    compiled._backend = refuses  # type: ignore[assignment]
    made.local_engine = compiled
    with caplog.at_level(logging.WARNING, logger="fedcdp"):
        assert torch.equal(after(made, state), expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("using the batched engine: a local step cannot be compiled")


@pytest.mark.slow
def test_an_engine_that_is_asked_for_is_used(federation, monkeypatch):
    asked: list[int] = []

    class Watched(CompiledEngine):
        def __init__(self, *given: Any) -> None:
            asked.append(given[-1])
            super().__init__(*given, backend="aot_eager")

    monkeypatch.setattr(autotune, "CompiledEngine", Watched)
    model = fedcdp.models.networks.build("cnn", (1, 10, 10), 3)
    what = plan(method="fed-cdp", rounds=1, record_sampling="partition")
    one = simulate(model, federation, what, engine="compiled", chunk=4)
    other = simulate(model, federation, what, engine="functional")
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, other.model.state_dict()[name], rtol=0, atol=1e-5)
    assert asked == [3]  # six clients in two equal chunks
