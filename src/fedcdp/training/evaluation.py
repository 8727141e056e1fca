"""Accuracy and loss of a model on public data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedcdp.data.dataset import Dataset
from fedcdp.engine import Engine, Loss
from fedcdp.files.tree import Tree, each_tensor

_BATCH = 1000
_MARGIN = 0.005  # of accuracy, above the share of the largest class


def evaluate(engine: Engine, weights: Tree, data: Dataset, device: torch.device) -> dict[str, float | None]:
    """Accuracy and mean loss of the global weights on a dataset."""
    correct, loss, threshold = 0, 0.0, None
    has_classes = data.task in ("classification", "binary")
    for inputs, targets in data.batches(_BATCH):
        outputs = engine.outputs(weights, each_tensor(inputs, lambda value: value.to(device)))
        targets = targets.to(device)
        if has_classes and is_binary(outputs) and threshold is None:
            threshold = threshold_of(engine.loss, outputs)
        correct += int((predictions(outputs, threshold or 0.0) == targets).sum()) if has_classes else 0
        loss += float(engine.loss(outputs.double(), targets)) * len(targets)
    # JSON has no NaN: a non-finite loss is written as null.
    return {
        "accuracy": correct / len(data) if has_classes else None,
        "loss": loss / len(data) if math.isfinite(loss) else None,
    }


def no_better_than_guessing(accuracy: float | None, data: Dataset | None) -> str | None:
    """A warning, where an accuracy on `data` is no better than that of always predicting their most frequent class.

    Only to be asked for data on which the accuracy is shown anyway. None where there is nothing to warn of.
    """
    if accuracy is None or data is None or not data.classes:
        return None
    share = int(torch.bincount(data.targets.flatten().cpu()).max()) / len(data)
    if accuracy > share + _MARGIN:
        return None
    return (
        f"validation accuracy {accuracy:.3f} is no better than always predicting the most frequent class ({share:.3f}): the "
        "model learned nothing useful; see docs/recommended.md"
    )


def predictions(outputs: Tensor, threshold: float = 0.0) -> Tensor:
    """The predicted class of each example [examples].

    For outputs [examples, classes], the class with the largest output. For a single output per example, [examples] or
    [examples, 1], class 1 if the output is above the threshold: 0 for a logit, 0.5 for a probability.
    """
    return (outputs.flatten() > threshold).long() if is_binary(outputs) else outputs.argmax(-1)


def is_binary(outputs: Tensor) -> bool:
    """Whether there is a single output per example, which can distinguish two classes."""
    return outputs.dim() == 1 or (outputs.dim() == 2 and outputs.shape[1] == 1)


def threshold_of(loss: Loss, outputs: Tensor) -> float:
    """The value at which a single output changes from class 0 to class 1, given the training loss.

    For logits and margins, an output of −1 fits class 0 better than an output of 0: the threshold is 0. For outputs on the
    scale of the labels (probabilities, regression on 0 and 1), −1 fits no better than 0, or has no loss: it is 0.5.
    """

    def at(output: float, label: int) -> float:
        labels = torch.full((1,), label, dtype=torch.int64, device=outputs.device)
        return float(loss(torch.full_like(outputs[:1], output, dtype=torch.float64), labels))

    try:
        return 0.0 if at(-1, 0) < at(0, 0) and math.isfinite(at(-1, 1)) else 0.5
    except Exception:  # the loss does not accept a number below 0
        return 0.5
