"""What an engine promises to the methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from fedcdp.files.tree import Group, Layout, Tree

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

    model: nn.Module
    layout: Layout
    loss: Loss

    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """The gradient of each example's loss [clients, examples, ...]. What an empty slot holds is unspecified."""
        ...

    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """The sum over each client's real examples [clients, ...]. An example whose gradient is not finite is left out."""
        ...

    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        """The sum over each client's real examples [clients, ...]; not finite where one of them is not."""
        ...

    def clipped_sum(self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float) -> Tree:
        """The sum over each client's examples [clients, ...] of what `clipping.clip` makes of their gradients.

        Equal to that but for rounding, and cheaper where no example's gradient has to be looked at by itself.
        """
        ...

    def check(self, weights: Tree, batch: Batch, per_example: bool) -> None:
        """Try a batch of one client at the global weights; a network that cannot be trained is refused in a sentence."""
        ...

    def outputs(self, weights: Tree, inputs: Tensor) -> Tensor:
        """What the network with the global weights answers to each input."""
        ...


class Unquestioning:
    """An engine that sums gradients without first asking whether all are finite: a GPU need not wait for the answer."""

    def __init__(self, engine: Engine) -> None:
        self.model, self.layout, self.loss = engine.model, engine.layout, engine.loss
        self.per_example_gradients, self.outputs = engine.per_example_gradients, engine.outputs
        self.clipped_sum, self.check = engine.clipped_sum, engine.check
        self.summed_gradients = self.plain_sum = engine.plain_sum
