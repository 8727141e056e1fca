"""What an engine promises to the methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedcdp.tree import Layout, Tree

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of (outputs, targets) over a batch."""


@dataclass(frozen=True)
class Batch:
    """The examples of one local step of many clients: inputs [clients, examples, ...], targets, and which are real."""

    inputs: Tensor
    targets: Tensor
    present: Tensor


class Engine(Protocol):
    """Gradients of one network's loss at each client's own weights [clients, ...]."""

    layout: Layout
    loss: Loss

    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """The gradient of each example's loss [clients, examples, ...]. What an empty slot holds is unspecified."""
        ...

    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """The sum over each client's real examples [clients, ...]. An example whose gradient is not finite is left out."""
        ...

    def outputs(self, weights: Tree, inputs: Tensor) -> Tensor:
        """What the network with the global weights answers to each input."""
        ...
