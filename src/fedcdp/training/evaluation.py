"""Evaluate a model on public data: a few figures after each round, all metrics at the end, also for each client."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.engine import Engine, Loss
from fedcdp.errors import PlanError
from fedcdp.files.tree import Tree, each_tensor
from fedcdp.training.metrics import Figures, OwnMetrics, original_unit, own_metric, task_metrics
from fedcdp.training.token_metrics import TokenCounts, most_frequent_token, sequences_at_once

_LOG = logging.getLogger("fedcdp")
_BATCH = 1000
_MARGIN = 0.005  # of accuracy, exact match or R², above that of a constant answer


def evaluate(engine: Engine, weights: Tree, data: Dataset, device: torch.device) -> Figures:
    """The main metric of the data's task, and the mean loss, of the global weights on a dataset."""
    right, error, loss, threshold = 0, 0.0, 0.0, None
    tokens = TokenCounts()
    for outputs, targets in _answers(engine, weights, data, device):
        loss += mean_loss(engine.loss, outputs, targets) * len(targets)
        if data.task == "regression":
            values, true = (original_unit(data, each) for each in (outputs.reshape(targets.shape), targets))
            error += float((values - true).abs().double().mean()) * len(targets)
        elif data.task == "language":
            tokens += TokenCounts.of(outputs, targets)
        elif data.task != "custom":
            threshold = threshold_for(engine.loss, outputs, data) if threshold is None else threshold
            right += int(_right(outputs, targets, threshold).sum())
    main: dict[str, Figures] = {
        "regression": {"mae": error / len(data)}, "multilabel": {"exact_match": right / len(data)},
        "language": tokens.figures(), "custom": {},
    }  # fmt: skip
    found = main.get(data.task, {"accuracy": right / len(data)}) | {"loss": loss / len(data)}
    # JSON has no NaN: a figure that is not finite is written as null.
    return {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}


def score(
    engine: Engine,
    weights: Tree,
    federation: Federation | None,
    validation: Dataset,
    device: torch.device,
    own: OwnMetrics,
) -> tuple[Figures, list[dict[str, Any]]]:
    """All metrics of the global weights on the validation split, and those of each client that has records in it.

    `validation` is the federation's, perhaps as features of frozen layers. Without a federation, no record is a client's. A
    metric of the user's own that fails here is None, and a warning says why: the model is trained by now.
    """
    clients = None if federation is None else federation.validation_clients
    if validation.task in ("custom", "language") and not own and clients is None:
        return evaluate(engine, weights, validation, device), []  # without keeping outputs, which may be large
    outputs = torch.cat([answer for answer, _ in _answers(engine, weights, validation, device)])
    found = figures(engine.loss, outputs, validation)
    for name, function in own.items():
        try:
            found[name] = own_metric(name, function, outputs, validation)
        except PlanError as error:
            _LOG.warning("%s", error)
            found[name] = None
    if federation is None or clients is None:
        return found, []
    return found, figures_of_clients(engine.loss, outputs, validation, federation)


def try_own_metrics(own: OwnMetrics, engine: Engine, weights: Tree, data: Dataset, device: torch.device) -> None:
    """Raise a `PlanError` if a metric of the user's own fails on the outputs of the untrained network."""
    outputs = torch.cat([answer for answer, _ in _answers(engine, weights, data, device)]) if own else torch.zeros(0)
    for name, function in own.items():
        own_metric(name, function, outputs, data)


def figures(loss: Loss, outputs: Tensor, data: Dataset) -> Figures:
    """All metrics of the data's task for the outputs of a network, and the mean loss."""
    threshold = 0.0 if data.task in ("regression", "language", "custom") else threshold_for(loss, outputs, data)
    at_once = sequences_at_once(outputs) if data.task == "language" else _BATCH
    parts = zip(outputs.split(at_once), data.targets.to(outputs.device).split(at_once), strict=True)
    total = sum(mean_loss(loss, answers, targets) * len(targets) for answers, targets in parts)
    return task_metrics(data, outputs, threshold) | {"loss": total / len(data) if math.isfinite(total) else None}


def figures_of_clients(
    loss: Loss, outputs: Tensor, data: Dataset, federation: Federation, split: str = "validation"
) -> list[dict[str, Any]]:
    """The metrics of each client on its own records of a split: its name, how many records they are, and the figures."""
    rows = []
    for client in range(federation.clients):
        own = np.flatnonzero(federation.validation_clients == client) if split != "train" else federation.indices(client)
        if len(own):
            records = torch.from_numpy(own)
            found = figures(loss, outputs[records.to(outputs.device)], data.take(records.to(data.targets.device)))
            rows.append({"client": federation.name(client), "examples": len(own)} | found)
    return rows


def no_better_than_guessing(scores: Mapping[str, float | None], data: Dataset | None) -> str | None:
    """A warning, where figures on `data` are no better than those of the best constant answer.

    That is the most frequent class, the most frequent set of labels, or the mean. Only to be asked for data on which the
    figures are shown anyway. None where there is nothing to warn of.
    """
    if data is None:
        return None
    if (accuracy := scores.get("accuracy")) is not None and data.classes:
        share = int(torch.bincount(data.targets.flatten().cpu()).max()) / len(data)
        return _warning("accuracy", accuracy, "predicting the most frequent class", share)
    if accuracy is not None and data.task == "language":
        return _warning("accuracy", accuracy, "predicting the most frequent token", most_frequent_token(data.targets))
    if (matched := scores.get("exact_match")) is not None and data.task == "multilabel":
        share = int(data.targets.unique(dim=0, return_counts=True)[1].max()) / len(data)
        ranks = (scores.get("auroc") or 0.5) > 0.5 + 10 * _MARGIN  # labels in the right order, if no threshold fits
        return None if ranks else _warning("exact match", matched, "predicting the most frequent set of labels", share)
    if (explained := scores.get("r2")) is not None and data.task == "regression":
        return _warning("R²", explained, "predicting the mean", 0.0)
    if (error := scores.get("mae")) is not None and data.task == "regression":  # a round's figures have no R²
        true = original_unit(data, data.targets.double())
        guess = float((true - true.mean(0)).abs().mean())
        return None if error < guess * (1 - _MARGIN) else _said("MAE", error, "predicting the mean", guess)
    return None


def _warning(metric: str, reached: float, guess: str, share: float) -> str | None:
    return None if reached > share + _MARGIN else _said(metric, reached, guess, share)


def _said(metric: str, reached: float, guess: str, share: float) -> str:
    return (
        f"validation {metric} {reached:.3f} is no better than always {guess} ({share:.3f}): the model learned nothing "
        "useful; see docs/recommended.md"
    )


def mean_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> float:
    """The loss of a batch, in float64 where the loss can compute with it."""
    try:
        return float(loss(outputs.double(), targets))
    except RuntimeError:  # the loss holds float32 tensors of its own
        return float(loss(outputs, targets))


def _answers(engine: Engine, weights: Tree, data: Dataset, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The outputs and targets of a dataset, batch by batch, on the device."""
    at_once = _BATCH
    if data.task == "language":
        first = each_tensor(data.inputs, lambda value: value[:1].to(device))
        at_once = min(_BATCH, sequences_at_once(engine.outputs(weights, first)))
    for inputs, targets in data.batches(at_once):
        yield engine.outputs(weights, each_tensor(inputs, lambda value: value.to(device))), targets.to(device)


def _right(outputs: Tensor, targets: Tensor, threshold: float) -> Tensor:
    """Which examples are answered rightly: their class, or all their labels."""
    if targets.dim() == 2:
        return ((outputs.reshape(targets.shape) > threshold) == (targets > 0)).all(1)
    return predictions(outputs, threshold) == targets


def threshold_for(loss: Loss, outputs: Tensor, data: Dataset) -> float:
    """The value above which an output means yes; 0 where outputs are not yes or no."""
    yes_or_no = data.task == "multilabel" or is_binary(outputs)
    return threshold_of(loss, outputs, data.targets) if yes_or_no else 0.0


def predictions(outputs: Tensor, threshold: float = 0.0) -> Tensor:
    """The predicted class of each example [examples].

    For outputs [examples, classes], the class with the largest output. For a single output per example, [examples] or
    [examples, 1], class 1 if the output is above the threshold: 0 for a logit, 0.5 for a probability.
    """
    return (outputs.flatten() > threshold).long() if is_binary(outputs) else outputs.argmax(-1)


def is_binary(outputs: Tensor) -> bool:
    """Whether there is a single output per example, which can distinguish two classes."""
    return outputs.dim() == 1 or (outputs.dim() == 2 and outputs.shape[1] == 1)


def threshold_of(loss: Loss, outputs: Tensor, targets: Tensor) -> float:
    """The value at which an output changes from no (class 0) to yes (class 1), given the training loss.

    For logits and margins, an output of −1 fits class 0 better than an output of 0: the threshold is 0. For outputs on the
    scale of the labels (probabilities, regression on 0 and 1), −1 fits no better than 0, or has no loss: it is 0.5.
    """

    def at(output: float, label: int) -> float:
        labels = torch.full_like(targets[:1], label, device=outputs.device)
        return float(loss(torch.full_like(outputs[:1], output, dtype=torch.float64), labels))

    try:
        return 0.0 if at(-1, 0) < at(0, 0) and math.isfinite(at(-1, 1)) else 0.5
    except Exception:  # the loss does not accept a number below 0
        return 0.5
