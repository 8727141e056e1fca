"""The contract between a network, its loss and the data's task, checked before training.

- The network returns one row of outputs for each example. The data's task says how many values a row has.
- `loss(outputs, targets)` returns one number: the mean over a batch of any size of the losses of its examples. fedcdp trains
  on batches of one example, outputs [1, ...] and targets [1, ...], and evaluates on batches of many.
- PyTorch's elementwise losses (`F.mse_loss`, `nn.BCEWithLogitsLoss`, ...) get targets in the shape and type of the outputs.
  Every other loss gets them as the `Dataset` holds them.

`Engine.check` tries the loss on single examples. Here it is tried on a made-up batch, never on records.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcdp.data.dataset import Dataset
from fedcdp.engine import Loss
from fedcdp.errors import ModelError, PlanError
from fedcdp.training.evaluation import is_binary

_FEWEST, _MOST = 3, 64  # examples of the made-up batch
_CLOSE = 1e-3


def loss_for(data: Dataset, loss: Loss | None) -> Loss:
    """The loss that was given, or that of the data's task."""
    chosen = loss or data.learning_task.loss
    if chosen is None:
        raise PlanError(f"loss: task {data.task} has no loss of its own; pass a function of outputs and targets")
    return chosen


def check_outputs(outputs: Tensor, data: Dataset, loss: Loss) -> None:
    """Raise if a network's outputs do not fit the data's task."""
    classes = data.classes
    if data.task != "classification":
        if data.outputs is not None and outputs[0].numel() != data.outputs:
            raise ModelError(
                f"the network returns {outputs[0].numel()} values for each example; the data's task, {data.task}, needs "
                f"{data.outputs}"
            )
        return
    if is_binary(outputs) and classes == 2 and loss is not F.cross_entropy:
        return
    if outputs.dim() != 2 or outputs.shape[-1] < classes:
        found = "x".join(map(str, outputs.shape[1:])) or "1"
        needed = "it needs one for each" + (", or a single one and a binary loss" if classes == 2 else "")
        raise ModelError(f"the network has {found} outputs for the {classes} classes of the data; {needed}")


def check_loss(loss: Loss, outputs: Tensor, data: Dataset) -> None:
    """Raise if the loss of a batch is not the mean of its examples' losses. Of the outputs, only the shape is used.

    Outputs and targets are made up. Nothing is said about a loss that rejects them, one example at a time, or that is not
    finite on them: it may expect other values.
    """
    given, targets = _made_up(outputs, data)
    count, came = len(given), f"outputs of shape {list(given.shape)} and targets of shape {list(targets.shape)}"
    try:
        alone = [float(loss(given[[at]], targets[[at]])) for at in range(count)]
    except Exception:
        return
    try:
        value = loss(given, targets)
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"the loss accepts a single example but fails on a batch, {came}; it must return the mean over a batch of any "
            f"size: {said}"
        ) from error
    if value.dim() != 0:
        raise ModelError(
            f"the loss returns shape {list(value.shape)} for {came}; it must return one number, the mean over the batch"
        )
    whole, mean = float(value), sum(alone) / count
    if not math.isfinite(whole + mean) or math.isclose(whole, mean, rel_tol=_CLOSE, abs_tol=_CLOSE * 1e-3):
        return
    if math.isclose(whole, sum(alone), rel_tol=_CLOSE):
        raise ModelError("the loss of a batch is the sum of its examples' losses; it must be their mean (reduction='mean')")
    why = "does the loss broadcast one against the other, or weigh examples by the rest of the batch?"
    raise ModelError(
        f"the loss of a batch is {whole:.3g} where the mean of its examples' losses is {mean:.3g}, on made-up {came}: {why} "
        "It must be the mean of a loss that each example has for itself"
    )


def _made_up(outputs: Tensor, data: Dataset) -> tuple[Tensor, Tensor]:
    """Outputs and targets of a batch whose length is none of their other lengths, so no axis fits another by accident."""
    shape = tuple(data.targets.shape[1:])
    count = max(_FEWEST, min(data.classes, _MOST))
    while count in (*outputs.shape[1:], *shape):
        count += 1
    generator = torch.Generator().manual_seed(0)
    given = 0.1 + 0.8 * torch.rand(count, *outputs.shape[1:], generator=generator)  # logits, probabilities or values
    if data.targets.dtype.is_floating_point and data.task != "multilabel":
        targets = 0.1 + 0.8 * torch.rand(count, *shape, generator=generator)
    else:  # every class; or zeros and ones
        targets = torch.arange(count * math.prod(shape)).reshape(count, *shape) % (data.classes or 2)
    return given.to(outputs), targets.to(outputs.device, data.targets.dtype)
