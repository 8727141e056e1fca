"""Every trainable tensor of every network that can be trained is clipped and noised; every other one stays as it was.

Over networks drawn at random from all layers that the engines know, and from modules of a user's own, in every engine. Where
no example has a gradient, each coordinate moves by noise of the stated deviation; where gradients are enormous, one example
moves each layer by no more than the clip bound.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import partition
from fedcdp.engine import Batch, BatchedEngine, Engine, FunctionalEngine
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree, repeat
from fedcdp.methods import METHODS, fedcdp
from fedcdp.models.networks import prepare
from fedcdp.training.local_engines import CompiledEngine
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State
from fedcdp.training.simulate import simulate

SIDE, CLASSES, CLIENTS = 6, 3, 40
Drawn = tuple[nn.Module, tuple[int, ...]]


class Residual(nn.Module):
    """A module of a user's own, which only `torch.func` can differentiate: a skip, a scalar, a weight that is used twice
    and, if `tied`, belongs to another module, too."""

    def __init__(self, features: int, tied: bool) -> None:
        super().__init__()
        first, self.scale = nn.Linear(features, features), nn.Parameter(torch.tensor(0.7))
        self.inner = nn.Sequential(first, nn.Tanh())
        self.mixing = nn.Linear(features, features)
        if tied:
            self.mixing.weight = first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        once = torch.tanh(self.mixing(inputs))
        return self.inner(inputs) + self.scale * self.mixing(once)


class Words(nn.Module):
    """An embedding of what the inputs round to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(5, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(inputs.clamp(0, 4).long()).flatten(1)


@st.composite
def networks(draw: st.DrawFn) -> Drawn:
    """A network and the shape of its inputs; some of its tensors may be frozen, some shared."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    layers: list[nn.Module]
    if draw(st.booleans()):
        shape: tuple[int, ...] = (draw(st.sampled_from([1, 2, 4])), SIDE, SIDE)
        channels, side = shape[0], SIDE
        layers = []
        for _ in range(draw(st.integers(1, 2))):
            groups = draw(st.sampled_from([g for g in (1, 2, 4) if channels % g == 0]))
            wide, stride, padding = 4, draw(st.integers(1, 2)), draw(st.integers(0, 1))
            bias = draw(st.booleans())
            layers.append(nn.Conv2d(channels, wide, 3 if side > 2 else 1, stride, padding, groups=groups, bias=bias))
            side = (side + 2 * padding - (3 if side > 2 else 1)) // stride + 1
            channels = wide
            layers.append(draw(st.sampled_from([nn.Identity(), nn.GroupNorm(2, wide), nn.LayerNorm([wide, side, side])])))
            layers.append(draw(st.sampled_from([nn.ReLU(), nn.Tanh(), nn.Sigmoid()])))
        layers.append(nn.Flatten())
        features = channels * side * side
    else:
        shape = (draw(st.integers(2, 5)),)
        features = shape[0]
        layers = []
        if draw(st.booleans()):
            layers, features = [Words(3)], 3 * features
    for _ in range(draw(st.integers(0, 2))):
        wide = draw(st.integers(2, 6))
        layers += [
            nn.Linear(features, wide, bias=draw(st.booleans())),
            draw(st.sampled_from([nn.Tanh(), nn.LayerNorm(wide)])),
        ]
        features = wide
    body: nn.Module = nn.Sequential(*layers, nn.Linear(features, features), nn.Tanh())
    if draw(st.booleans()):
        body = nn.Sequential(body, Residual(features, draw(st.booleans())))
    head = nn.Linear(features, CLASSES)
    network = nn.Sequential(body, nn.Sequential(head)) if draw(st.booleans()) else nn.Sequential(*body, head)
    for parameter in list(network.parameters())[:-1]:
        parameter.requires_grad_(not draw(st.booleans()) or draw(st.booleans()))
    return network, shape


def engines_of(network: nn.Module, loss: Any = F.cross_entropy) -> list[Engine]:
    """The reference, and the fast one where it knows every layer."""
    found: list[Engine] = [FunctionalEngine(network, loss)]
    with suppress(ModelError):
        found.append(BatchedEngine(network, loss))
    return found


def weights_of(network: nn.Module) -> Tree:
    return {name: p.detach().clone() for name, p in network.named_parameters() if p.requires_grad}


def without_gradient(outputs: Tensor, _: Tensor) -> Tensor:
    return (outputs * 0.0).sum()


def trained(engine: Engine, network: nn.Module, shape: tuple[int, ...], plan: Plan, compiled: bool = False) -> Tree:
    """How far each client's weights moved, over its learning rate."""
    data = Dataset(torch.rand(CLIENTS * 2, *shape), torch.zeros(CLIENTS * 2, dtype=torch.int64), CLASSES)
    federation = partition(Splits("dots", data, data, None, ""), clients=CLIENTS, scheme="iid")
    simulator = Simulator.stepwise(ClientData(federation, plan, torch.device("cpu")), engine, CLIENTS)
    if compiled:
        method = METHODS[plan.method]
        simulator.local_engine = CompiledEngine(method, plan, engine, simulator.data.examples, CLIENTS, backend="aot_eager")
    weights = weights_of(network)
    clients = torch.arange(CLIENTS)
    table, sizes = simulator.data.records_of(clients)
    at = simulator.moment(State(0, weights, None), clients, sizes)
    sent = simulator.local_engine(weights, simulator.data.draw(at, table, sizes), at)
    return sent.update


def plan(**changes: Any) -> Plan:
    usual = {"rounds": 1, "per_round": CLIENTS, "local_steps": 1, "batch_size": 1, "learning_rate": 1.0, "clip": 0.5}
    return Plan(**usual | {"noise_multiplier": 3.0, "record_sampling": "partition"} | changes)


def is_noise_of(deviation: float, moved: Tree, network: nn.Module) -> None:
    """Every coordinate of every trainable tensor, over the clients: mean 0, the stated deviation, six standard errors."""
    names = {name for name, p in network.named_parameters() if p.requires_grad}
    assert set(moved) == names
    for value in moved.values():
        drawn = value.double().reshape(CLIENTS, -1) / deviation
        assert bool((drawn != 0).all())
        assert float(drawn.mean(0).abs().max()) < 6.5 / math.sqrt(CLIENTS)
        assert float((drawn.square().mean(0) - 1).abs().max()) < 9 * math.sqrt(2 / CLIENTS)
        assert abs(float(drawn.square().mean()) - 1) < 6 * math.sqrt(2 / drawn.numel())


slow = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@slow
@given(networks(), st.sampled_from([("example", 1.5), ("batch", 1.5), ("cohort", 1.5 / CLIENTS)]))
def test_without_gradients_every_coordinate_of_every_trainable_tensor_moves_by_the_stated_noise(
    drawn: Drawn, convention: tuple[Any, float]
) -> None:
    network, shape = drawn
    chosen = plan(noise=convention[0])
    for engine in engines_of(prepare(network, chosen, "cpu"), without_gradient):
        is_noise_of(convention[1], trained(engine, network, shape, chosen), network)
    update = plan(method="fed-sdp", noise_at="client")
    is_noise_of(1.5, trained(FunctionalEngine(network, without_gradient), network, shape, update), network)


@slow
@given(networks(), st.sampled_from([0, 15]))
def test_with_noise_on_the_sum_every_coordinate_of_every_share_is_noised(drawn: Drawn, colluders: int) -> None:
    network, shape = drawn
    share = 3.0 * 2**24 / math.sqrt(CLIENTS - colluders)  # grid steps
    chosen = plan(noise="sum", secure_aggregation=True, colluders=colluders)
    for engine in engines_of(prepare(network, chosen, "cpu"), without_gradient):
        is_noise_of(share, trained(engine, network, shape, chosen), network)
    update = chosen.but(method="fed-sdp", noise_at="client")
    is_noise_of(share, trained(FunctionalEngine(network, without_gradient), network, shape, update), network)


@pytest.mark.slow
@settings(slow, max_examples=1)
@given(networks().filter(lambda drawn: len(engines_of(drawn[0])) == 2))
def test_a_compiled_program_noises_every_tensor_too(drawn: Drawn) -> None:
    network, shape = drawn
    torch.compiler.reset()
    engine = BatchedEngine(prepare(network, plan(), "cpu"), without_gradient)
    is_noise_of(1.5, trained(engine, network, shape, plan(), compiled=True), network)


def test_a_bias_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fedcdp.noised
    forgetful = {"0.bias"}
    monkeypatch.setattr(
        fedcdp, "noised", lambda total, noise: real(total, {n: v * (n not in forgetful) for n, v in noise.items()})
    )
    network = nn.Sequential(nn.Linear(4, CLASSES))
    moved = trained(FunctionalEngine(network, without_gradient), network, (4,), plan())
    with pytest.raises(AssertionError):
        is_noise_of(1.5, moved, network)
    forgetful.clear()
    is_noise_of(1.5, trained(FunctionalEngine(network, without_gradient), network, (4,), plan()), network)


@slow
@given(networks(), st.sampled_from([1.0, 1e3, 1e12]))
def test_no_example_moves_a_layer_by_more_than_the_clip_bound(drawn: Drawn, steepness: float) -> None:
    network, shape = drawn

    def steep(outputs: Tensor, targets: Tensor) -> Tensor:
        return steepness * F.cross_entropy(outputs, targets)

    batch = Batch(torch.rand(2, 3, *shape) * 4, torch.randint(CLASSES, (2, 3)), torch.ones(2, 3, dtype=torch.bool))
    sums = []
    for engine in engines_of(network, steep):
        for mode in ("layer", "flat"):
            groups = engine.layout.groups(mode)
            assert sorted(name for group in groups for name in group) == sorted(weights_of(network))
            weights = repeat(weights_of(network), 2)
            for one in range(3):
                alone = Batch(batch.inputs, batch.targets, torch.arange(3).eq(one).expand(2, 3))
                total = engine.clipped_sum(weights, alone, groups, 0.25)
                for group in groups:
                    norms = torch.stack([total[name].double().reshape(2, -1).norm(dim=1) for name in group]).norm(dim=0)
                    assert float(norms.max()) <= 0.25 * (1 + 1e-4)
            sums.append((mode, engine.clipped_sum(weights, batch, groups, 0.25)))
    for mode, total in sums[2:]:
        reference = next(each for which, each in sums if which == mode)
        for name, value in total.items():
            torch.testing.assert_close(value, reference[name], rtol=2e-3, atol=2e-3)


@settings(slow, max_examples=5)
@given(networks(), st.sampled_from(["fed-cdp", "fed-sdp"]))
def test_frozen_tensors_and_buffers_are_released_as_they_were(drawn: Drawn, method: str) -> None:
    network, shape = drawn
    network.register_buffer("constant", torch.arange(3.0))
    data = Dataset(torch.rand(12, *shape), torch.arange(12) % CLASSES, CLASSES)
    federation = partition(Splits("dots", data, data, None, ""), clients=3, scheme="iid")
    run = simulate(network, federation, plan(method=method, per_round=2, local_steps=2))
    moved = run.model.state_dict()
    trainable = {p.data_ptr() for p in network.parameters() if p.requires_grad}  # a tied weight has two names
    for name, value in network.state_dict().items():
        if value.data_ptr() in trainable:
            assert bool((moved[name] != value).all())
        else:
            assert torch.equal(moved[name], value)


class Keeps(nn.Module):
    """A network that keeps what it sees, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, CLASSES)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen.add_(inputs.detach().mean(0))
        elif self.how == "a count":
            self.seen += 1
        elif self.how == "assigned":
            self.seen = self.seen + inputs.detach().mean(0)
        return self.linear(inputs)


@pytest.mark.parametrize("method", ["fed-cdp", "fed-sdp"])
@pytest.mark.parametrize("how", ["in place", "a count", "assigned"])
def test_a_network_that_keeps_what_it_sees_is_refused_or_released_without_it(how: str, method: str) -> None:
    data = Dataset(torch.rand(12, 4), torch.arange(12) % CLASSES, CLASSES)
    federation = partition(Splits("dots", data, data, None, ""), clients=3, scheme="iid")
    if how == "assigned":  # which lasts as long as the call
        run = simulate(Keeps(how), federation, plan(method=method, per_round=2))
        assert not run.model.seen.any()
    else:
        with pytest.raises(ModelError, match="cannot be differentiated"):
            simulate(Keeps(how), federation, plan(method=method, per_round=2))


@pytest.mark.parametrize("method", ["fed-cdp", "fed-cdp-decay", "fed-sdp"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False, track_running_stats=False), nn.LazyBatchNorm2d(),
        nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, track_running_stats=True),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_a_layer_that_mixes_examples_is_refused(layer: nn.Module, method: str) -> None:
    network = nn.Sequential(layer, nn.Flatten(), nn.Linear(2 * 9, CLASSES))
    data = Dataset(torch.rand(12, 2, 3, 3), torch.arange(12) % CLASSES, CLASSES)
    federation = partition(Splits("dots", data, data, None, ""), clients=3, scheme="iid")
    clip = {"clip": None} if method == "fed-cdp-decay" else {}
    with pytest.raises(ModelError):
        simulate(network, federation, plan(method=method, per_round=2, **clip))
