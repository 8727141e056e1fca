"""Networks in which one example's gradient depends on others are refused under private methods."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.data.partition import partition
from fedcdp.engine import Batch, BatchedEngine, Engine, FunctionalEngine
from fedcdp.engine.independence import check_independent
from fedcdp.engine.microbatches import MicrobatchEngine
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.errors import ModelError
from tests.methods.test_against_naive_loop import small_plan
from tests.support.own_models import images

WIDTH = 64
FEDERATION = partition(images(24), clients=4, scheme="iid")


class Mixing(torch.autograd.Function):
    """With a batching rule of its own: adds what an example differs from the mean of its batch, nothing if it is alone."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # noqa: ARG004
        return slope

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], values: Tensor) -> tuple[Tensor, int]:  # noqa: ARG004
        return 2 * values - values.mean(in_dims[0], keepdim=True), in_dims[0]


class Network(nn.Module):
    """A hidden layer, and something done to it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.hidden, self.head = how, nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.state: Any = None
        self.states: list[Tensor] = []
        self.register_buffer("kept", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(inputs.flatten(1)))
        match self.how:
            case "hidden state":
                before, self.state = self.state, hidden.detach()
                hidden = hidden if before is None else hidden + before
            case "running mean":
                hidden = hidden - (0.0 if self.state is None else self.state)
                self.state = 0.01 * hidden.mean(0).detach()
            case "list":
                hidden = hidden * (1 + sum(each.mean() for each in self.states))
                self.states = [*self.states, hidden.detach()]
            case "mixed":
                hidden = Mixing.apply(hidden)
            case "buffer":
                hidden = hidden + self.kept
                self.kept = hidden[0].detach()
            case "shown":
                self.state = hidden.detach()
            case "cached":
                if self.state is None or self.state.shape != inputs.shape[1:]:
                    self.state = torch.ones(inputs.shape[1:])
                hidden = hidden + self.state.mean()
        return self.head(hidden)


def engines(model: nn.Module) -> list[Engine]:
    functional = FunctionalEngine(model, F.cross_entropy)
    return [functional, MicrobatchEngine(FunctionalEngine(copy.deepcopy(model), F.cross_entropy), 1)]


def batch() -> Batch:
    return Batch(torch.randn(1, 4, 1, 8, 8), torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("how", ["hidden state", "running mean", "list", "mixed"])
def test_gradients_that_depend_on_others_are_refused(how: str) -> None:
    whole, parts = engines(Network(how))
    for engine in (whole, *([parts] if how != "mixed" else [])):  # parts of one example mix nothing
        with pytest.raises(ModelError, match="depends on other examples, or on earlier calls of forward"):
            check_independent(engine, batch())


@pytest.mark.parametrize("how", ["", "buffer", "shown", "cached"])
def test_values_that_no_gradient_reads_may_be_kept(how: str) -> None:
    for engine in engines(Network(how)):
        check_independent(engine, batch())


def test_mixing_that_vanishes_alone_is_found_in_the_recorded_engine_too() -> None:
    engine = RecordedEngine(Network("mixed"), F.cross_entropy, torch.zeros(1, 1, 8, 8))  # one example shows nothing
    with pytest.raises(ModelError, match="depends on other examples"):
        check_independent(engine, batch())


def test_networks_of_known_layers_pass() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 3))
    check_independent(BatchedEngine(model, F.cross_entropy), batch())


@pytest.mark.parametrize("method", ["fed-cdp", "fed-sdp"])
@pytest.mark.parametrize("engine", ["auto", "functional", "recorded"])
def test_a_private_training_refuses_them(method: str, engine: Any) -> None:
    with pytest.raises(ModelError, match="must not mix examples, nor keep values"):
        fedcdp.simulate(Network("hidden state"), FEDERATION, small_plan(method=method), engine=engine)


def test_a_training_without_privacy_allows_what_it_allowed() -> None:
    assert fedcdp.simulate(Network("mixed"), FEDERATION, small_plan(method="nonprivate")).rounds == 1
