"""Batches computed a few examples at a time, where those of one client do not fit into memory.

Each example is clipped by itself, so the sum of the parts' sums is the sum of the batch, up to the rounding of additions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedcdp.engine.base import Batch, Engine
from fedcdp.files.tree import Group, Inputs, Tree, each_tensor


class MicrobatchEngine:
    """Another engine, which never gets more than `most` examples of a client at once."""

    def __init__(self, engine: Engine, most: int) -> None:
        self.whole, self.most = engine, most
        self.model, self.layout, self.loss = engine.model, engine.layout, engine.loss

    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`. The result is as large as that of the whole batch."""
        parts = [self.whole.per_example_gradients(weights, part) for part in self._parts(batch)]
        return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}

    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        return _added_up(self.whole.summed_gradients(weights, part) for part in self._parts(batch))

    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        return _added_up(self.whole.plain_sum(weights, part) for part in self._parts(batch))

    def clipped_sum(
        self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float, *, exact: bool = False
    ) -> Tree:
        """See `Engine`."""
        return _added_up(self.whole.clipped_sum(weights, part, groups, bound, exact=exact) for part in self._parts(batch))

    def check(self, weights: Tree, batch: Batch, per_example: bool) -> None:
        """See `Engine`. Errors name the batch that was tried: its first part."""
        self.whole.check(weights, next(self._parts(batch)), per_example)

    def outputs(self, weights: Tree, inputs: Inputs) -> Tensor:
        """See `Engine`."""
        return self.whole.outputs(weights, inputs)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        for first in range(0, batch.present.shape[1], self.most):
            some = slice(first, first + self.most)
            inputs = each_tensor(batch.inputs, lambda value: value[:, some])  # noqa: B023  (used at once)
            yield Batch(inputs, batch.targets[:, some], batch.present[:, some])


def _added_up(parts: Iterator[Tree]) -> Tree:
    """The sum of the trees, of which one at a time is held beside it."""
    total = dict(next(parts))
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value
    return total
