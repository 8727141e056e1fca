"""A dataset: one array of inputs, one of labels, and the splits of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedcdp.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples as one tensor each of inputs [N, ...] (float32) and class labels [N] (int64, 0 ≤ label < classes)."""

    inputs: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)
    classes: int

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs)} inputs but {len(self.targets)} labels: each example needs one label")
        if len(self.targets) == 0:
            raise DataError("the dataset is empty")
        if self.inputs.dtype != torch.float32 or self.targets.dtype != torch.int64:
            raise DataError(f"inputs must be float32 and labels int64, not {self.inputs.dtype} and {self.targets.dtype}")
        low, high = int(self.targets.min()), int(self.targets.max())
        if low < 0 or high >= self.classes:
            raise DataError(f"labels run from {low} to {high}, outside 0 to {self.classes - 1}")

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.inputs.shape[1:])

    def take(self, indices: Tensor) -> Dataset:
        """The examples at `indices`, in that order."""
        return Dataset(self.inputs[indices], self.targets[indices], self.classes)


@dataclass(frozen=True, eq=False)
class Splits:
    """A dataset cut as a benchmark cuts it. `normalisation` says in a sentence how raw values became inputs."""

    name: str
    train: Dataset
    validation: Dataset
    test: Dataset | None
    normalisation: str
