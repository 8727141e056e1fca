"""Metrics of each task, from the outputs of a network and the targets, in NumPy and float64.

They agree with scikit-learn's functions of the same names. A metric that is undefined is None.

| task | metrics | main metric |
| --- | --- | --- |
| `classification` | `accuracy`, `balanced_accuracy`, `macro_f1`, `auroc` (one class against the rest, mean) | `accuracy` |
| `binary` | `accuracy`, `balanced_accuracy`, `f1` (of class 1), `auroc` | `accuracy` |
| `multilabel` | `exact_match` (all labels right), `macro_f1`, `auroc` (mean over labels) | `exact_match` |
| `regression` | `mae`, `rmse`, `r2` (mean over values), in the targets' original unit | `mae` |
| `language` | `accuracy` (of the next token), `perplexity`, over all predicted tokens | `accuracy` |
| `custom` | none but the loss | `loss` |

`auroc` is None where a class, or one side of a label, has no example. `r2` is None where a target is constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.data.dataset import Dataset
from fedcdp.errors import PlanError
from fedcdp.training.token_metrics import TokenCounts

Figures = dict[str, float | None]
"""Metrics by name; None where one is undefined."""
OwnMetric = Callable[[Tensor, Tensor], float | Tensor]
"""A metric of your own: a function of all outputs and all targets that returns one number."""
OwnMetrics = Mapping[str, OwnMetric]

MAIN_METRICS = ("accuracy", "mae", "exact_match", "loss")
"""The main metric of every task. Of several in a row of figures, the first is the task's."""
SHARES = ("accuracy", "exact_match")
"""Main metrics that count right answers."""
_TITLES = {
    "auroc": "AUROC", "balanced_accuracy": "balanced accuracy", "exact_match": "exact match", "f1": "F1", "mae": "MAE",
    "macro_f1": "macro-F1", "perplexity": "perplexity", "r2": "R²", "rmse": "RMSE",
}  # fmt: skip
_RESERVED = {"accuracy", "loss", "round", "examples", "client", *_TITLES}
_NAME = re.compile("[a-z][a-z0-9_]{0,63}")

Values = NDArray[np.float64]
Classes = NDArray[np.int64]
Marks = NDArray[np.bool_]


def metric_title(name: str) -> str:
    """A metric's name for people."""
    return _TITLES.get(name, name)


def metric_text(value: float) -> str:
    """A metric's value for people: four digits, or all digits before the point of a large one."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def main_figure(figures: Mapping[str, float | None]) -> tuple[str, float] | None:
    """The name and value of the task's main metric among some figures; None where it was not measured."""
    return next(((name, value) for name in MAIN_METRICS if (value := figures.get(name)) is not None), None)


def task_metrics(data: Dataset, outputs: Tensor, threshold: float) -> Figures:
    """The metrics of a dataset's task for outputs [examples, ...].

    A single output for two classes, and each output of a multi-label task, means yes if it is above the threshold.
    """
    if data.task == "language":
        return TokenCounts.of(outputs, data.targets.to(outputs.device)).figures()
    given, targets = outputs.detach().double().cpu(), data.targets.cpu()
    if data.task == "multilabel":
        return _multilabel(given.reshape(targets.shape).numpy(), targets.numpy() > 0, threshold)
    if data.task == "regression":
        return _regression(original_unit(data, given.reshape(targets.shape)), original_unit(data, targets.double()))
    if data.task not in ("classification", "binary"):
        return {}
    single = given.numel() == len(targets)
    predicted = (given.flatten() > threshold).long() if single else given.argmax(-1)
    figures = _of_classes(predicted.numpy(), targets.numpy())
    if data.task == "binary":
        true = targets.numpy() == 1
        return figures | {"f1": _f1(predicted.numpy() == 1, true), "auroc": _auroc(given.flatten().numpy(), true)}
    if data.classes == 2:  # one class against the rest is the other one mirrored
        scores = given.reshape(-1, 1) if single else given[:, 1:2] - given[:, :1]
    else:
        scores = given.softmax(-1)[:, : data.classes]
    kinds = [1] if data.classes == 2 else range(data.classes)
    return figures | {
        "macro_f1": _macro_f1(predicted.numpy(), targets.numpy()),
        "auroc": _mean([_auroc(scores[:, at].numpy(), targets.numpy() == kind) for at, kind in enumerate(kinds)]),
    }


def original_unit(data: Dataset, values: Tensor) -> Tensor:
    """Outputs or targets of a regression in the unit that they had before they were mapped to −1 to 1."""
    mapped: tuple[float, float] | None = getattr(data, "target_range", None)
    if mapped is None:
        return values
    low, high = (torch.as_tensor(end, dtype=values.dtype, device=values.device) for end in mapped)
    return low + (values + 1) / 2 * (high - low)


def check_own_metrics(own: OwnMetrics, data: Dataset | None) -> None:
    """Raise if metrics of the user's own are not functions under usable names, or there is nothing to measure."""
    for name, function in own.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
            raise PlanError(
                f"metrics: {name!r} is not allowed as a name; use lower-case letters, digits and _, and no name of a "
                "built-in metric"
            )
        if not callable(function):
            raise PlanError(f"metrics: {name} is a {type(function).__name__}, not a function of outputs and targets")
    if own and data is None:
        raise PlanError(f"metrics: there is no validation split on which to compute {', '.join(own)}")


def own_metric(name: str, function: OwnMetric, outputs: Tensor, data: Dataset) -> float | None:
    """The value of a metric of the user's own; None if it is not finite. A failure is a `PlanError` that names it.

    The function gets outputs and targets on the CPU; for a regression in the original unit and in the targets' shape.
    """
    given, targets = outputs.detach().cpu(), data.targets.cpu()
    if data.task == "regression":
        given, targets = original_unit(data, given.reshape(targets.shape)), original_unit(data, targets)
    try:
        value = function(given, targets)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"metrics: {name} fails on outputs of shape {list(given.shape)} and targets of shape {list(targets.shape)}: "
            f"{type(error).__name__}" + (f": {said}" if said else "")
        ) from error
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise PlanError(f"metrics: {name} returns {kind}; it must return one number") from None
    return number if math.isfinite(number) else None


def _of_classes(predicted: Classes, targets: Classes) -> Figures:
    right = predicted == targets
    recalls = [right[targets == kind].mean() for kind in np.unique(targets)]
    return {"accuracy": int(right.sum()) / len(targets), "balanced_accuracy": float(np.mean(recalls))}


def _multilabel(outputs: Values, targets: Marks, threshold: float) -> Figures:
    predicted = outputs > threshold
    labels = range(targets.shape[1])
    return {
        "exact_match": int((predicted == targets).all(1).sum()) / len(targets),
        "macro_f1": float(np.mean([_f1(predicted[:, label], targets[:, label]) for label in labels])),
        "auroc": _mean([_auroc(outputs[:, label], targets[:, label]) for label in labels]),
    }


def _regression(outputs: Tensor, targets: Tensor) -> Figures:
    predicted, true = outputs.reshape(len(targets), -1).numpy(), targets.reshape(len(targets), -1).numpy()
    if not np.isfinite(predicted).all():
        return {"mae": None, "rmse": None, "r2": None}
    errors = predicted - true
    squares, spread = (errors**2).sum(0), ((true - true.mean(0)) ** 2).sum(0)
    return {
        "mae": float(np.abs(errors).mean()),
        "rmse": float(np.sqrt((errors**2).mean(0)).mean()),
        "r2": float(np.mean(1 - squares / spread)) if (spread > 0).all() else None,
    }


def _macro_f1(predicted: Classes, targets: Classes) -> float:
    """The mean over the classes that are predicted or true for some example."""
    return float(np.mean([_f1(predicted == kind, targets == kind) for kind in np.union1d(predicted, targets)]))


def _f1(predicted: Marks, true: Marks) -> float:
    counted = int(predicted.sum()) + int(true.sum())
    return 2 * int((predicted & true).sum()) / counted if counted else 0.0


def _auroc(scores: Values, true: Marks) -> float | None:
    """The probability that an example of the class has a larger score than another one; a tie counts half."""
    members = int(true.sum())
    others = len(true) - members
    if not members or not others or not np.isfinite(scores).all():
        return None
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places.reshape(-1)]
    return float((ranks[true].sum() - members * (members + 1) / 2) / (members * others))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if values and len(known) == len(values) else None
