"""Trainings of every task and kind of input give the weights that the naive loop gives, by both engines."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import partition
from fedcdp.files.tree import Inputs
from fedcdp.training.simulate import simulate
from tests.methods.test_against_naive_loop import assert_close, small_plan, train_naively
from tests.support import naive

SIZES = [6, 8, 5, 5]
RECORDS = sum(SIZES)
FEATURES, TOKENS, VOCABULARY = 5, 4, 9
METHODS: dict[str, dict[str, Any]] = {
    "nonprivate": {"method": "nonprivate"},
    "fed-sdp": {"method": "fed-sdp", "noise_at": "client", "clip": 0.1, "noise_multiplier": 0.7},
    "fed-cdp": {"method": "fed-cdp", "noise_multiplier": 0.7},
}


class Tagger(nn.Module):
    """The mean of the embeddings of the tokens that a mask keeps, and a linear layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 3), nn.Linear(3, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask[..., None].to(self.head.weight.dtype)
        return self.head((self.embedding(input_ids) * kept).sum(-2) / kept.sum(-2).clamp(min=1))


class Wrapped(Tagger):
    """Returns an object with logits, as the networks of transformers do."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(input_ids, attention_mask), hidden_states=None)


@dataclass(frozen=True)
class Case:
    """A task: its data, a network, the loss that is given to `simulate`, and the loss of one example written out."""

    data: Dataset
    network: nn.Module
    naive_loss: naive.ExampleLoss | None = None
    loss: Any = None
    batched: bool = True
    """Whether the engine of hand-written rules applies."""


def one_logit(outputs: Tensor, target: Tensor) -> Tensor:
    chance = torch.sigmoid(outputs.reshape(()))
    return -torch.log(chance if int(target) else 1 - chance)


def labels(outputs: Tensor, target: Tensor) -> Tensor:
    chances = torch.sigmoid(outputs)
    return -torch.stack([torch.log(p if t else 1 - p) for p, t in zip(chances, target.tolist(), strict=True)]).mean()


def squares(outputs: Tensor, target: Tensor) -> Tensor:
    return ((outputs.flatten() - target.double().flatten()) ** 2).mean()


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of the user's own, on targets [N, 2, 2]."""
    return (outputs.unflatten(1, (2, 2)) - targets).abs().pow(1.5).mean()


def absolute_of_one(outputs: Tensor, target: Tensor) -> Tensor:
    return sum((abs(o - t) ** 1.5 for o, t in zip(outputs, target.double().flatten(), strict=True)), torch.tensor(0.0)) / 4


def cases() -> dict[str, Case]:
    torch.manual_seed(3)
    features, ids = torch.randn(RECORDS, FEATURES), torch.randint(VOCABULARY, (RECORDS, TOKENS))
    named: Inputs = {"input_ids": ids, "attention_mask": torch.randint(2, (RECORDS, TOKENS))}
    bits, classes, numbers = torch.randint(2, (RECORDS,)), torch.randint(3, (RECORDS,)), torch.randn(RECORDS)

    def layers(outputs: int, *last: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, outputs), *last)

    words = nn.Sequential(nn.Embedding(VOCABULARY, 3), nn.Flatten(), nn.Linear(3 * TOKENS, 3))
    several, shaped = torch.randn(RECORDS, 2), torch.randn(RECORDS, 2, 2)
    return {
        "one logit": Case(Dataset(features, bits, task="binary"), layers(1), one_logit),
        "one logit without an axis": Case(
            Dataset(features, bits, task="binary"), layers(1, nn.Flatten(0)), one_logit, batched=False
        ),
        "regression": Case(Dataset(features, numbers, task="regression"), layers(1), squares),
        "regression of several values": Case(Dataset(features, several, task="regression"), layers(2), squares),
        "multilabel": Case(Dataset(features, (several > 0).float(), task="multilabel"), layers(2), labels),
        "own loss": Case(Dataset(features, shaped, task="custom"), layers(4), absolute_of_one, absolute),
        "token ids": Case(Dataset(ids, classes, 3), words),
        "token ids, regression": Case(
            Dataset(ids, numbers, task="regression"),
            nn.Sequential(nn.Embedding(VOCABULARY, 3), nn.Flatten(), nn.Linear(3 * TOKENS, 1)), squares,
        ),
        "named inputs": Case(Dataset(named, classes, 3), Tagger(3), batched=False),
        "named inputs, one logit": Case(Dataset(named, bits, task="binary"), Tagger(1), one_logit, batched=False),
        "an object with logits": Case(Dataset(named, classes, 3), Wrapped(3), batched=False),
    }  # fmt: skip


CASES = cases()
ENGINES = [(name, engine) for name, case in CASES.items() for engine in ("functional", "batched") if
           case.batched or engine == "functional"]  # fmt: skip


def plan_of(method: str, **fields: Any) -> Plan:
    return small_plan(**METHODS[method], **fields, rounds=2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_every_task_and_input_equals_the_naive_loop(name: str, engine: Any, method: str) -> None:
    case = CASES[name]
    starts = [sum(SIZES[:client]) for client in range(len(SIZES))]
    federation = partition(case.data, indices=[range(a, a + size) for a, size in zip(starts, SIZES, strict=True)])
    plan = plan_of(method)
    expected = train_naively(case.network, federation, plan, loss=case.naive_loss)
    run = simulate(case.network, federation, plan, loss=case.loss, engine=engine)
    before = naive.trainable(case.network)
    assert run.engine == ("functional" if engine == "functional" else "batched")
    assert all(not torch.allclose(expected[name], before[name], atol=1e-3) for name in expected)
    assert_close(dict(run.model.named_parameters()), expected)


def test_the_written_out_losses_are_the_tasks() -> None:
    outputs, target = torch.tensor([0.7, -1.2]), torch.tensor([1.0, 0.0])
    torch.testing.assert_close(labels(outputs, target), F.binary_cross_entropy_with_logits(outputs, target))
    torch.testing.assert_close(one_logit(outputs[:1], target[0]), F.binary_cross_entropy_with_logits(outputs[0], target[0]))
