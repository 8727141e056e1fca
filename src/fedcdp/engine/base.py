"""The interface between engines and methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from fedcdp.files.tree import Group, Inputs, Layout, Tree

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of (outputs, targets) over a batch."""


@dataclass(frozen=True)
class Batch:
    """The examples of one local step of many clients: inputs [clients, examples, ...], targets, and the filled slots."""

    inputs: Inputs
    targets: Tensor
    present: Tensor


class Engine(Protocol):
    """Gradients of one network's loss at each client's own weights [clients, ...]."""

    model: nn.Module
    layout: Layout
    loss: Loss

    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """The gradient of each example's loss [clients, examples, ...]. The content of an empty slot is unspecified."""
        ...

    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """The sum over the filled slots of each client [clients, ...], leaving out gradients that are not finite."""
        ...

    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        """The sum over the filled slots of each client [clients, ...]; not finite where any gradient is not."""
        ...

    def clipped_sum(
        self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float, *, exact: bool = False
    ) -> Tree:
        """The sum over each client's examples [clients, ...] of the gradients that `clipping.clip` returns.

        Equal up to rounding, and cheaper when single gradients need not be formed. With `exact`, norms and sums are computed
        in float64, and the sum is returned in it.
        """
        ...

    def check(self, weights: Tree, batch: Batch, per_example: bool) -> None:
        """Try a batch of one client at the global weights; a `ModelError` explains why a network cannot be trained."""
        ...

    def outputs(self, weights: Tree, inputs: Inputs) -> Tensor:
        """The network's output for each input, at the global weights."""
        ...


class Unquestioning:
    """An engine that sums gradients without checking that all are finite, so a GPU need not synchronise with the host."""

    def __init__(self, engine: Engine) -> None:
        self.model, self.layout, self.loss = engine.model, engine.layout, engine.loss
        self.per_example_gradients, self.outputs = engine.per_example_gradients, engine.outputs
        self.clipped_sum, self.check = engine.clipped_sum, engine.check
        self.summed_gradients = self.plain_sum = engine.plain_sum
