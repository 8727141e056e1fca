"""How well weights do on data that everybody may know."""

from __future__ import annotations

import math

import torch

from fedcdp.data.dataset import Dataset
from fedcdp.engine import Engine
from fedcdp.tree import Tree

_BATCH = 1000


def evaluate(engine: Engine, weights: Tree, data: Dataset, device: torch.device) -> dict[str, float | None]:
    """Accuracy and mean loss of the global weights on some data."""
    correct, loss = 0, 0.0
    for inputs, targets in zip(data.inputs.split(_BATCH), data.targets.split(_BATCH), strict=True):
        outputs = engine.outputs(weights, inputs.to(device))
        targets = targets.to(device)
        correct += int((outputs.argmax(-1) == targets).sum())
        loss += float(engine.loss(outputs.double(), targets)) * len(targets)
    # JSON has no NaN: a loss that is not finite is written as null.
    return {"accuracy": correct / len(data), "loss": loss / len(data) if math.isfinite(loss) else None}
