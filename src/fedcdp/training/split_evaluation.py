"""The metrics of a trained model on a split of a federation's data, and how they spread over the clients."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.engine.functional import on_targets
from fedcdp.errors import PlanError, RunError
from fedcdp.files.tree import Inputs, each_tensor
from fedcdp.models.networks import outputs_of
from fedcdp.training.evaluation import figures, figures_of_clients, is_binary, mean_loss, predictions, threshold_for
from fedcdp.training.loss_contract import loss_for
from fedcdp.training.metrics import Figures, OwnMetrics, main_figure, own_metric
from fedcdp.training.token_metrics import TokenCounts, sequences_at_once

_LOG = logging.getLogger("fedcdp")
_BATCH = 1000
_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


def evaluate_split(
    model: nn.Module,
    data: Splits | Federation,
    split: str,
    *,
    per_client: bool = False,
    loss: Loss | None = None,
    own: OwnMetrics | None = None,
) -> dict[str, Any]:
    """The metrics of a model on a split, as `Run.evaluate` returns them. The model is not changed.

    Without a `loss` it is that of the data's task, or of a logit where a network has a single output for two classes. For
    `per_client`, the data must be a federation.
    """
    examples = split_of(data, split)
    if examples.task == "language" and not own and not per_client:  # without keeping outputs, which may be large
        found = _language_figures(model, examples, on_targets(loss_for(examples, loss)))
        return {"split": split, "examples": len(examples), "accuracy": found.pop("accuracy"), "metrics": found}
    outputs = torch.cat(list(_outputs(model, examples)))
    loss = _loss_on(examples, outputs) if loss is None else on_targets(loss)
    found = figures(loss, outputs, examples)
    for name, function in (own or {}).items():
        try:
            found[name] = own_metric(name, function, outputs, examples)
        except PlanError as error:
            _LOG.warning("%s", error)
            found[name] = None
    result: dict[str, Any] = {"split": split, "examples": len(examples), "accuracy": found.pop("accuracy", None)}
    result["metrics"] = found
    if per_client and isinstance(data, Federation):
        rows = _clients(data, split, examples, outputs, loss)
        result["per_client"] = _spread([value for _, value in filter(None, map(main_figure, rows))])
        if data.names is not None:
            result["clients"] = rows
    return result


def reads_training_records(data: Splits | Federation, split: str, per_client: bool) -> bool:
    """Whether `evaluate_split` computes figures from training records, which no ε covers."""
    return split == "train" or (per_client and isinstance(data, Federation) and not _has_own(data, split))


def split_of(data: Splits | Federation, name: str) -> Dataset:
    """One of the splits; raises an error that lists them if the name is unknown."""
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    known = {each: part for each, part in parts.items() if part is not None}
    if not isinstance(name, str) or name not in known:
        named = data.name if isinstance(data, Splits) else "the federation"
        raise RunError(f"split: {named} has {', '.join(known)}, not {str(name)[:100]!r}")
    return known[name]


@torch.no_grad()
def _outputs(model: nn.Module, data: Dataset) -> Iterator[Tensor]:
    """The outputs for all examples, batch by batch. A copy computes them: a network may keep the records that it sees."""
    network = copy.deepcopy(model).eval()
    device = next(network.parameters()).device

    def outputs(inputs: Inputs) -> Tensor:
        return outputs_of(network, each_tensor(inputs, lambda value: value.to(device))).cpu()

    at_once = _BATCH
    if data.task == "language":
        at_once = min(_BATCH, sequences_at_once(outputs(each_tensor(data.inputs, lambda value: value[:1]))))
    for inputs, _ in data.batches(at_once):
        yield outputs(inputs)


def _language_figures(model: nn.Module, data: Dataset, loss: Loss) -> Figures:
    """The metrics of a language model, and the mean loss."""
    counts, total, done = TokenCounts(), 0.0, 0
    for outputs in _outputs(model, data):
        targets = data.targets[done : done + len(outputs)].cpu()
        counts += TokenCounts.of(outputs, targets)
        total += mean_loss(loss, outputs, targets) * len(targets)
        done += len(outputs)
    return counts.figures() | {"loss": total / done if math.isfinite(total) else None}


def _has_own(federation: Federation, split: str) -> bool:
    """Whether it is known which records of a split are a client's own."""
    return split == "train" or (split == "validation" and federation.validation_clients is not None)


def _clients(federation: Federation, split: str, data: Dataset, outputs: Tensor, loss: Loss) -> list[dict[str, Any]]:
    """The figures of each client, with its name."""
    own = _has_own(federation, split)
    if own and (federation.names is not None or not data.classes):
        return figures_of_clients(loss, outputs, data, federation, split)
    if not data.classes:
        raise RunError(f"per_client: the records of split {split} are nobody's; split train shows each client's own")
    right = predictions(outputs, threshold_for(loss, outputs, data)) == data.targets.cpu()
    shares = zip(range(federation.clients), _accuracies(right, data, federation, own), strict=True)
    return [{"client": federation.name(client), "accuracy": share} for client, share in shares if not math.isnan(share)]


def _loss_on(data: Dataset, outputs: Tensor) -> Loss:
    """The loss of the data's task; that of a logit where a network has a single output for two classes."""
    if data.classes == 2 and is_binary(outputs):
        return on_targets(F.binary_cross_entropy_with_logits)
    return on_targets(loss_for(data, None))


def _spread(values: list[float]) -> dict[str, float]:
    """The mean and some quantiles; empty if there are no values."""
    if not values:
        return {}
    return {"mean": float(np.mean(values))} | {name: float(np.quantile(values, q)) for name, q in _QUANTILES.items()}


def _accuracies(right: Tensor, data: Dataset, federation: Federation, own_records: bool) -> NDArray[np.float64]:
    """The accuracy of each client, on its own records or weighted by its classes; NaN where it has none."""
    accuracies = []
    classes, targets = data.classes, data.targets.cpu()
    by_class = torch.bincount(targets[right], minlength=classes) / torch.bincount(targets, minlength=classes)
    scores = (right.double() if own_records else by_class.double()[federation.train.targets.cpu()]).numpy()
    for clients in np.array_split(np.arange(federation.clients), -(-federation.clients // _BATCH)):
        table, sizes = federation.table(clients)
        held = np.arange(table.shape[1]) < sizes[:, None]
        # A class without examples in the split has no accuracy; it counts neither for nor against a client.
        counted = held & np.isfinite(scores[table])
        scored, judged = np.where(counted, scores[table], 0.0).sum(1), counted.sum(1)
        accuracies.append(np.where(judged > 0, scored / np.maximum(judged, 1), np.nan))
    return np.concatenate(accuracies)
