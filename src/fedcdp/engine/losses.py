"""PyTorch's binary losses on class labels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine.base import Loss

_BINARY: tuple[object, ...] = (F.binary_cross_entropy_with_logits, F.binary_cross_entropy)


def on_labels(loss: Loss) -> Loss:
    """The loss as a function of outputs and class labels [examples], int64.

    PyTorch's binary losses expect targets in the shape and type of the outputs. A network with one output for each example
    may give [examples] or [examples, 1]. Every other loss is returned unchanged.
    """
    if loss not in _BINARY and not isinstance(loss, nn.BCEWithLogitsLoss | nn.BCELoss):
        return loss

    def binary(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.numel() != targets.numel():
            shape = list(outputs.shape[1:])
            raise ValueError(f"a binary loss needs one output for each example, and the network gives {shape}")
        return loss(outputs, targets.to(outputs.dtype).reshape(outputs.shape))

    return binary
