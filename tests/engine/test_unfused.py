"""Recurrent layers and attention give the gradients of a naive loop, without a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.engine.runtime import clients_within_budget
from fedcdp.engine.unfused import WrittenOut
from fedcdp.files.tree import Inputs, each_tensor
from fedcdp.models.networks import outputs_of, prepare
from tests.support import naive
from tests.support.own_models import CLASSES, VOCABULARY, Recurrent, Transformer, texts

# PyTorch's own LSTM, in the naive loop and in evaluation, announces a slower path for projections.
pytestmark = pytest.mark.filterwarnings("error", "ignore:LSTM with projections is not supported with oneDNN")


class Cells(nn.Module):
    """A recurrent cell, step by step."""

    def __init__(self, kind: type[nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(VOCABULARY, 8), kind(8, 5, **options), nn.Linear(5, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        state = None
        for word in self.words(ids).unbind(1):
            state = self.cell(word, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Attention(nn.Module):
    """Attention of the first token over all, and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(VOCABULARY, 8), nn.MultiheadAttention(8, 2, dropout=0.1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids).transpose(0, 1)
        return self.head(self.attention(words[:1], words, words)[0][0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "RNN": lambda: Recurrent(nn.RNN),
    "RNN with ReLU": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "GRU": lambda: Recurrent(nn.GRU),
    "GRU without biases": lambda: Recurrent(nn.GRU, bias=False),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "LSTM, two layers, both ways, dropout": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.1),
    "LSTM with projection": lambda: Recurrent(nn.LSTM, proj_size=2, num_layers=2),
    "LSTM with projection, without biases": lambda: Recurrent(nn.LSTM, proj_size=2, bias=False),
    "RNNCell": lambda: Cells(nn.RNNCell),
    "RNNCell with ReLU": lambda: Cells(nn.RNNCell, nonlinearity="relu"),
    "GRUCell": lambda: Cells(nn.GRUCell),
    "LSTMCell": lambda: Cells(nn.LSTMCell, bias=False),
    "attention": Attention,
    "encoder, batch first": Transformer,
    "encoder, batch second": lambda: Transformer(batch_first=False),
    "encoder, norm first": lambda: Transformer(norm_first=True),
    "encoder in evaluation mode": lambda: Transformer().eval(),
    "frozen encoder": lambda: frozen(Transformer().eval()),
}


def frozen(model: Transformer) -> nn.Module:
    model.encoder.requires_grad_(False)
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return MODELS[request.param]()


def batch_for(model: nn.Module) -> Batch:
    """Two clients with four examples each."""
    ids, mask, targets = texts(8)
    inputs: Inputs = {"input_ids": ids, "attention_mask": mask} if isinstance(model, Transformer) else ids
    shaped = each_tensor(inputs, lambda value: value.unflatten(0, (2, 4)))
    return Batch(shaped, targets.unflatten(0, (2, 4)), torch.ones(2, 4, dtype=torch.bool))


def test_gradients_equal_a_naive_loop(model: nn.Module) -> None:
    ready, batch = prepare(model, Plan(), "cpu"), batch_for(model)
    engine = FunctionalEngine(ready, nn.functional.cross_entropy)
    weights = {name: p.detach() for name, p in ready.named_parameters() if p.requires_grad}
    engine.check(weights, Batch(each_tensor(batch.inputs, lambda v: v[:1]), batch.targets[:1], batch.present[:1]), True)
    many = {name: value.expand(2, *value.shape) for name, value in weights.items()}
    single, summed = engine.per_example_gradients(many, batch), engine.summed_gradients(many, batch)
    for client in range(2):
        total = dict.fromkeys(weights, torch.zeros((), dtype=torch.float64))
        for place in range(4):
            example = each_tensor(batch.inputs, lambda value: value[client, place])  # noqa: B023
            expected = naive.gradient(ready, naive.trainable(ready), (example, batch.targets[client, place]))
            for name, value in expected.items():
                torch.testing.assert_close(single[name][client, place].double(), value, rtol=1e-4, atol=1e-5)
                total[name] = total[name] + value
        for name, value in total.items():
            torch.testing.assert_close(summed[name][client].double(), value, rtol=1e-4, atol=1e-5)


def test_outputs_are_the_same_in_evaluation_mode(model: nn.Module) -> None:
    ready = prepare(model, Plan(), "cpu")
    inputs = each_tensor(batch_for(model).inputs, lambda value: value[0])
    with torch.no_grad():
        torch.testing.assert_close(outputs_of(ready, inputs), outputs_of(ready.eval(), inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_written_out_layer_returns_outputs_and_states(kind: type[nn.RNNBase], batch_first: bool) -> None:
    layer = kind(3, 4, 2, bidirectional=True, batch_first=batch_first)  # type: ignore[call-arg]
    inputs = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0))
    expected, states = layer(inputs)
    with WrittenOut():
        found, ends = layer(inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ends, states)


def test_memory_grows_with_the_length_of_a_sequence() -> None:
    def clients(model: nn.Module, length: int) -> int:
        ids = torch.zeros(length, dtype=torch.int64)
        inputs: Inputs = {"input_ids": ids, "attention_mask": ids} if isinstance(model, Transformer) else ids
        return clients_within_budget(model, inputs, 100, per_example=True)

    for model in (Recurrent(nn.LSTM), Transformer()):
        assert clients(model, 200) < clients(model, 20) / 5
