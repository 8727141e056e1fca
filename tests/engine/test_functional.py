"""The reference engine against plain autograd: one client, one example at a time."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree


def own_weights(model: nn.Module, clients: int) -> Tree:
    """Different weights for every client."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: p.detach() + 0.1 * torch.randn(clients, *p.shape, generator=generator)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def by_autograd(model: nn.Module, weights: Tree, client: int, inputs: Tensor, target: Tensor, loss=F.cross_entropy) -> Tree:
    """The gradient of one example's loss at one client's weights."""
    network = copy.deepcopy(model)
    parameters = dict(network.named_parameters())
    for name, value in weights.items():
        parameters[name].data.copy_(value[client])
    loss(network(inputs[None]), target[None]).backward()
    return {name: parameters[name].grad for name in weights}


def batch_of(problem, clients: int, examples: int, present: Tensor | None = None) -> Batch:
    count = clients * examples
    inputs = problem.inputs[:count].unflatten(0, (clients, examples))
    targets = problem.targets[:count].unflatten(0, (clients, examples))
    return Batch(inputs, targets, torch.ones(clients, examples, dtype=torch.bool) if present is None else present)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("error:There is a performance drop")  # of attention that vmap computes example by example
@pytest.mark.parametrize("summed", [False, True])
def test_attention_is_computed_for_all_examples_at_once(summed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), nn.Flatten(), nn.Linear(40, 3))
    inputs, targets = torch.randn(2, 3, 5, 8), torch.arange(6).reshape(2, 3) % 3
    batch, weights = Batch(inputs, targets, torch.ones(2, 3, dtype=torch.bool)), own_weights(model, 2)
    engine = FunctionalEngine(model, F.cross_entropy)
    found = engine.summed_gradients(weights, batch) if summed else engine.per_example_gradients(weights, batch)
    for client in range(2):
        ones = [by_autograd(model, weights, client, inputs[client, at], targets[client, at]) for at in range(3)]
        for name, value in found.items():
            expected = torch.stack([one[name] for one in ones])
            assert_close(value[client], expected.sum(0) if summed else expected)


def test_each_examples_gradient_is_that_of_plain_autograd_at_its_clients_weights(problem):
    weights, batch = own_weights(problem.model, 3), batch_of(problem, 3, 4)
    gradients = FunctionalEngine(problem.model, F.cross_entropy).per_example_gradients(weights, batch)
    assert set(gradients) == set(weights)
    for client in range(3):
        for example in range(4):
            expected = by_autograd(
                problem.model, weights, client, batch.inputs[client, example], batch.targets[client, example]
            )
            for name, value in expected.items():
                assert_close(gradients[name][client, example], value)


def test_the_sum_is_that_of_the_real_examples_only(problem):
    present = torch.tensor([[True, True, True], [True, False, False], [False, True, True], [False, False, False]])
    weights, batch = own_weights(problem.model, 4), batch_of(problem, 4, 3, present)
    summed = FunctionalEngine(problem.model, F.cross_entropy).summed_gradients(weights, batch)
    for client in range(4):
        expected = {name: torch.zeros_like(value[client]) for name, value in weights.items()}
        for example in present[client].nonzero().flatten().tolist():
            found = by_autograd(
                problem.model, weights, client, batch.inputs[client, example], batch.targets[client, example]
            )
            expected = {name: expected[name] + found[name] for name in expected}
        for name, value in expected.items():
            assert_close(summed[name][client], value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_example_without_a_finite_gradient_is_left_out_of_the_sum(small, bad):
    weights, batch = own_weights(small.model, 2), batch_of(small, 2, 4)
    inputs = batch.inputs.clone()
    inputs[0, 1, 2] = bad
    left_out = torch.ones(2, 4, dtype=torch.bool)
    left_out[0, 1] = False
    engine = FunctionalEngine(small.model, F.cross_entropy)
    found = engine.summed_gradients(weights, Batch(inputs, batch.targets, batch.present))
    expected = engine.summed_gradients(weights, Batch(batch.inputs, batch.targets, left_out))
    for name, value in expected.items():
        assert torch.isfinite(found[name]).all()
        assert_close(found[name], value)


class Root(nn.Module):
    """At an input of zero the first layer's gradient is not finite, and the head's is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 3, bias=False), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.first(inputs).abs().sqrt())


def test_an_example_that_is_bad_in_one_layer_is_left_out_in_every_layer():
    model = Root()
    engine = FunctionalEngine(model, F.cross_entropy)
    weights = own_weights(model, 1)
    inputs = torch.tensor([[[1.0, 2, 3, 4], [0, 0, 0, 0], [4, 3, 2, 1]]])
    batch = Batch(inputs, torch.tensor([[0, 1, 2]]), torch.ones(1, 3, dtype=torch.bool))
    raw = engine.per_example_gradients(weights, batch)
    assert not torch.isfinite(raw["first.weight"][0, 1]).any()
    assert torch.isfinite(raw["head.bias"][0, 1]).all()
    assert raw["head.bias"][0, 1].abs().max() > 0.01
    summed = engine.summed_gradients(weights, batch)
    for name, value in summed.items():
        assert_close(value[0], raw[name][0, 0] + raw[name][0, 2])


def test_what_an_empty_slot_holds_does_not_matter(small):
    weights = own_weights(small.model, 1)
    batch = batch_of(small, 1, 3, torch.tensor([[True, True, False]]))
    inputs = batch.inputs.clone()
    inputs[0, 2] = math.nan
    engine = FunctionalEngine(small.model, F.cross_entropy)
    expected = engine.summed_gradients(weights, batch)
    found = engine.summed_gradients(weights, Batch(inputs, batch.targets, batch.present))
    for name, value in expected.items():
        assert_close(found[name], value)


def test_one_client_with_one_example(small):
    weights, batch = own_weights(small.model, 1), batch_of(small, 1, 1)
    engine = FunctionalEngine(small.model, F.cross_entropy)
    expected = by_autograd(small.model, weights, 0, batch.inputs[0, 0], batch.targets[0, 0])
    for name, value in expected.items():
        assert_close(engine.per_example_gradients(weights, batch)[name][0, 0], value)
        assert_close(engine.summed_gradients(weights, batch)[name][0], value)


def test_a_loss_of_the_users_own_is_differentiated(small):
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().sum(-1).mean() + F.cross_entropy(outputs, targets, label_smoothing=0.2)

    weights, batch = own_weights(small.model, 2), batch_of(small, 2, 2)
    engine = FunctionalEngine(small.model, loss)
    gradients, summed = engine.per_example_gradients(weights, batch), engine.summed_gradients(weights, batch)
    for client in range(2):
        found = [
            by_autograd(small.model, weights, client, batch.inputs[client, e], batch.targets[client, e], loss)
            for e in range(2)
        ]
        for name in weights:
            assert_close(gradients[name][client, 1], found[1][name])
            assert_close(summed[name][client], found[0][name] + found[1][name])


def test_outputs_are_those_of_the_model_at_the_given_weights(problem):
    weights = {name: value[0] for name, value in own_weights(problem.model, 1).items()}
    network = copy.deepcopy(problem.model)
    network.load_state_dict(weights, strict=False)
    outputs = FunctionalEngine(problem.model, F.cross_entropy).outputs(weights, problem.inputs)
    torch.testing.assert_close(outputs, network(problem.inputs).detach())
    assert not outputs.requires_grad


def test_the_model_and_its_gradients_are_left_alone(problem):
    before = copy.deepcopy(problem.model.state_dict())
    engine = FunctionalEngine(problem.model, F.cross_entropy)
    weights, batch = own_weights(problem.model, 2), batch_of(problem, 2, 2)
    engine.per_example_gradients(weights, batch)
    engine.summed_gradients(weights, batch)
    assert all(torch.equal(value, before[name]) for name, value in problem.model.state_dict().items())
    assert all(p.grad is None for p in problem.model.parameters())


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * self.scale


def test_buffers_are_constants(small):
    model = Buffered()
    engine = FunctionalEngine(model, F.cross_entropy)
    assert set(engine.layout.shapes) == {"layer.weight", "layer.bias"}
    weights, batch = own_weights(model, 1), batch_of(small, 1, 1)
    expected = by_autograd(model, weights, 0, batch.inputs[0, 0], batch.targets[0, 0])
    for name, value in engine.per_example_gradients(weights, batch).items():
        assert_close(value[0, 0], expected[name])


def test_the_chunk_of_clients_does_not_change_a_clients_gradient(problem):
    engine = FunctionalEngine(problem.model, F.cross_entropy)
    weights, batch = own_weights(problem.model, 4), batch_of(problem, 4, 3)
    together = engine.summed_gradients(weights, batch)
    for client in range(4):
        only = slice(client, client + 1)
        alone = engine.summed_gradients(
            {name: value[only] for name, value in weights.items()},
            Batch(batch.inputs[only], batch.targets[only], batch.present[only]),
        )
        for name, value in together.items():
            assert_close(alone[name][0], value[client])


# What cannot be trained ----------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) if float(inputs.sum()) > 0 else -self.layer(inputs)


@pytest.mark.parametrize(
    "model", [Branching(), nn.Linear(5, 3), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))],
    ids=["control flow on values", "wrong input shape", "dropout that is switched on"],
)  # fmt: skip
def test_a_network_that_cannot_be_differentiated_example_by_example_is_refused_in_one_sentence(model, small):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ModelError) as refused:
        FunctionalEngine(model, F.cross_entropy).check(weights, one_client(small), per_example=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("per_example", [True, False])
def test_a_check_tries_the_gradients_that_are_needed(problem, per_example, monkeypatch):
    """First those of zeros, whose error may be told in full; then those of the records."""
    weights = {name: p.detach() for name, p in problem.model.named_parameters() if p.requires_grad}
    engine, records = FunctionalEngine(problem.model, F.cross_entropy), one_client(problem)
    tried: list[Tensor] = []
    needed = "per_example_gradients" if per_example else "summed_gradients"
    real = getattr(engine, needed)

    def watched(given: Tree, batch: Batch) -> Tree:
        tried.append(batch.inputs)
        return real(given, batch)

    def not_needed(*_: object) -> Tree:
        raise AssertionError

    monkeypatch.setattr(engine, needed, watched)
    monkeypatch.setattr(engine, "summed_gradients" if per_example else "per_example_gradients", not_needed)
    engine.check(weights, records, per_example)
    assert len(tried) == 2
    assert not tried[0].any()
    assert torch.equal(tried[1], records.inputs)


def one_client(problem):
    return Batch(problem.inputs[None, :3], problem.targets[None, :3], torch.ones(1, 3, dtype=torch.bool))
