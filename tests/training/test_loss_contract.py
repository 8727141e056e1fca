"""A loss that breaks its contract is refused in one sentence that says what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.data.dataset import Dataset
from fedcdp.engine.functional import on_targets
from fedcdp.errors import ModelError, PlanError
from fedcdp.training.loss_contract import check_loss

PLAN = fedcdp.Plan(rounds=1, per_round=2, local_steps=1, batch_size=4, noise_multiplier=0.5)
WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def numbers(shape: tuple[int, ...] = ()) -> Dataset:
    return Dataset(torch.rand(24, 4), torch.rand(24, *shape), task="regression" if len(shape) < 2 else "custom")


def classes() -> Dataset:
    return Dataset(torch.rand(24, 4), torch.arange(24) % 3, 3)


def own(dtype: torch.dtype) -> Dataset:
    return Dataset(torch.rand(24, 4), torch.zeros(24, 2, dtype=dtype), task="custom")


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=WEIGHTS.to(outputs.dtype))


def only_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(2) - targets.reshape(2)).square().mean()


def tiny(outputs: Tensor, targets: Tensor) -> Tensor:
    return squares(outputs, targets) * 1e-3


def only_many(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).var(dim=1)[3]


def reduction_none(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="none")


def to_the_median(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets - (outputs - targets).median()).abs().mean()


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


BROKEN: dict[str, tuple[Callable[[], Dataset], int, Any, str]] = {
    "outputs [N, 1] against targets [N]": (
        numbers, 1, squares,
        r"the loss of a batch is .* where the mean of its examples' losses is .*, on made-up outputs of shape "
        r"\[3, 1\] and targets of shape \[3\]: does the loss broadcast"),
    "the same with small values": (numbers, 1, tiny, "does the loss broadcast"),
    "a sum": (
        lambda: numbers((2,)), 2, lambda o, t: (o - t).square().sum(), "is the sum of .* it must be their mean"),
    "weights of classes that cancel": (classes, 3, weighted, "weigh examples by the rest of the batch"),
    "examples compared with each other": (lambda: numbers((2,)), 2, to_the_median, "weigh examples by the rest"),
    "a single example only": (
        lambda: own(torch.float32), 2, only_one,
        r"accepts a single example but fails on a batch, outputs of shape \[3, 2\] .*; it must return the mean"),
    "a whole batch only": (
        lambda: own(torch.float32), 2, only_many,
        r"the loss fails on a single example, with float32 outputs of shape \[1, 2\] and float32 targets of shape \[1, 2\]"),
    "no mean": (lambda: numbers((2,)), 2, reduction_none, r"the loss returns shape \[4, 2\], not one number, the mean"),
    "another type of targets": (
        lambda: own(torch.float32), 2, lambda o, t: F.nll_loss(o, t[:, 0]),
        r"the loss fails on a batch of 4, with float32 outputs of shape \[4, 2\] and float32 targets of shape \[4, 2\]: "),
    "another shape of targets": (
        lambda: own(torch.int64), 3, entropy,
        r"the loss fails on a batch of 4, with float32 outputs of shape \[4, 3\] and int64 targets of shape \[4, 2\]: "),
}  # fmt: skip


@pytest.mark.parametrize("method", ["fed-cdp", "nonprivate"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_loss_that_breaks_the_contract_is_refused(name: str, method: str) -> None:
    data, outputs, loss, said = BROKEN[name]
    federation = fedcdp.partition(data(), indices=[range(12), range(12, 24)])
    with pytest.raises(ModelError, match=said) as refused:
        fedcdp.simulate(nn.Linear(4, outputs), federation, PLAN.but(method=method), loss=loss)
    assert "\n" not in str(refused.value)


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - (2 * targets - 1) * outputs.reshape(-1)).clamp(min=0).mean()


def per_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def gaussian(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1].exp())


def task(name: str, targets: Tensor, classes: int = 0) -> Dataset:
    return Dataset(torch.zeros(len(targets), 1), targets, classes, name)  # type: ignore[arg-type]


KEPT: dict[str, tuple[Any, Tensor, Dataset]] = {
    "cross-entropy": (F.cross_entropy, torch.zeros(3, 5), task("classification", torch.arange(5), 5)),
    "many classes": (F.cross_entropy, torch.zeros(3, 200), task("classification", torch.arange(200))),
    "smooth labels": (nn.CrossEntropyLoss(label_smoothing=0.1), torch.zeros(3, 5), task("classification", torch.arange(5))),
    "one logit": (F.binary_cross_entropy_with_logits, torch.zeros(3, 1), task("binary", torch.arange(2))),
    "one logit without an axis": (F.binary_cross_entropy_with_logits, torch.zeros(3), task("binary", torch.arange(2))),
    "probabilities": (nn.BCELoss(), torch.zeros(3, 1), task("binary", torch.arange(2))),
    "hinge": (hinge, torch.zeros(3, 1), task("binary", torch.arange(2))),
    "labels": (F.binary_cross_entropy_with_logits, torch.zeros(3, 2), task("multilabel", torch.eye(2))),
    "regression": (F.huber_loss, torch.zeros(3, 1), task("regression", torch.rand(9))),
    "several values": (squares, torch.zeros(3, 2), task("regression", torch.rand(9, 2))),
    "mean and variance": (gaussian, torch.zeros(3, 2), task("custom", torch.rand(9))),
    "tokens": (per_token, torch.zeros(3, 6, 11), task("custom", torch.zeros(9, 6, dtype=torch.int64))),
    "values that made-up ones are not": (
        lambda o, t: F.cross_entropy(o, t - 5), torch.zeros(3, 4), task("custom", torch.arange(5, 9))),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_losses_that_keep_the_contract_pass(name: str) -> None:
    loss, outputs, data = KEPT[name]
    check_loss(on_targets(loss), outputs, data)


def test_a_task_without_a_loss_needs_one() -> None:
    federation = fedcdp.partition(own(torch.int64), indices=[range(12), range(12, 24)])
    with pytest.raises(PlanError, match="task custom has no loss of its own; pass a function of outputs and targets"):
        fedcdp.simulate(nn.Linear(4, 2), federation, PLAN)


def test_outputs_that_do_not_fit_the_task_are_refused() -> None:
    federation = fedcdp.partition(numbers((2,)), indices=[range(12), range(12, 24)])
    with pytest.raises(ModelError, match="returns 3 values for each example; the data's task, regression, needs 2"):
        fedcdp.simulate(nn.Linear(4, 3), federation, PLAN, loss=lambda o, _: o.mean())
