"""A dataset: one array of inputs, one of labels, and the splits of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedcdp.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled examples: one tensor of inputs and one of class labels.

    Raises:
        DataError: The tensors differ in length, are empty or of another type, or a label is outside 0 ≤ label < classes.

    Examples:
        >>> import torch, fedcdp
        >>> data = fedcdp.Dataset(torch.zeros(100, 30), torch.arange(100) % 2, classes=2)
        >>> len(data), data.shape
        (100, (30,))
    """

    inputs: Tensor = field(repr=False)
    """[N, ...], float32."""
    targets: Tensor = field(repr=False)
    """[N], int64: the class of each example."""
    classes: int
    """The number of classes."""

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
    """A dataset in parts: training, validation and, for some benchmarks, test.

    Examples:
        >>> import fedcdp
        >>> splits = fedcdp.load("cancer")
        >>> len(splits.train), len(splits.validation), splits.test
        (426, 143, None)
    """

    name: str
    """The benchmark's name, or the file's without its ending."""
    train: Dataset
    """The examples that clients hold."""
    validation: Dataset
    """The examples that the server evaluates on. No ε protects them."""
    test: Dataset | None
    """The benchmark's test set, if it has one."""
    normalisation: str
    """How raw values became inputs, in a sentence."""
