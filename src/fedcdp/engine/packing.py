"""Packing of partly empty batches: only filled slots are computed, and all shapes stay fixed.

The filled slots of a client come first and are cut into short rows. The rows of all clients are concatenated, each with
the weights of its client. With packing, Poisson sampling with S = 3B slots costs little more than a fixed batch of B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.engine.base import Batch, Engine
from fedcdp.files.tree import Group, Tree, each_tensor, masked


def rows_needed(present: Tensor, width: int) -> Tensor:
    """How many rows of `width` slots hold the filled slots of all clients; `present` is [..., clients, slots]."""
    return ((present.sum(-1) + width - 1) // width).sum(-1)


@dataclass(frozen=True)
class _Packing:
    """The map from the clients' slots to rows, and back."""

    owner: Tensor
    """The client of each row."""
    slots: Tensor
    """The client's slots that are in each row [rows, width]."""
    present: Tensor
    """Which of these slots are filled."""
    sources: Tensor
    """The rows of each client [clients, most]; beyond its own rows, an arbitrary row."""
    own: Tensor
    """Which of these rows are the client's own."""

    @staticmethod
    def of(present: Tensor, rows: int, width: int) -> _Packing:
        counts = present.sum(1)
        lengths = (counts + width - 1) // width
        ends = lengths.cumsum(0)
        number = torch.arange(rows, device=present.device)
        owner = torch.searchsorted(ends, number, right=True).clamp(max=len(counts) - 1)
        slots = ((number - (ends - lengths)[owner]) * width)[:, None] + torch.arange(width, device=present.device)
        most = torch.arange(-(-present.shape[1] // width), device=present.device)
        own = most < lengths[:, None]
        # Rows that are not the client's own all point to one row, which stays in the cache.
        sources = torch.where(own, (ends - lengths)[:, None] + most, rows - 1).clamp(max=rows - 1)
        return _Packing(owner, slots.clamp(max=present.shape[1] - 1), slots < counts[owner][:, None], sources, own)

    def batch(self, batch: Batch) -> Batch:
        """The slots of a batch, arranged in rows."""
        place = self.owner[:, None], self.slots
        return Batch(each_tensor(batch.inputs, lambda value: value[place]), batch.targets[place], self.present)

    def weights(self, tree: Tree) -> Tree:
        """The weights of each row's client."""
        return {name: value[self.owner] for name, value in tree.items()}

    def sums(self, tree: Tree) -> Tree:
        """The sums of rows, added up for each client in a fixed order."""
        parts = zip(self.sources.unbind(1), self.own.unbind(1), strict=True)
        picked = [{name: masked(value[row], own) for name, value in tree.items()} for row, own in parts]
        return {name: torch.stack([part[name] for part in picked]).sum(0) for name in tree}


class PackedEngine:
    """An engine that computes sums over batches in at most `rows` rows of `width` slots. The caller must not need more."""

    def __init__(self, engine: Engine, rows: int, width: int) -> None:
        self.model, self.layout, self.loss = engine.model, engine.layout, engine.loss
        self.per_example_gradients, self.outputs, self.check = engine.per_example_gradients, engine.outputs, engine.check
        self._engine, self._rows, self._width = engine, rows, width

    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        packing = self._pack(batch)
        return packing.sums(self._engine.plain_sum(packing.weights(weights), packing.batch(batch)))

    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        packing = self._pack(batch)
        return packing.sums(self._engine.summed_gradients(packing.weights(weights), packing.batch(batch)))

    def clipped_sum(
        self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float, *, exact: bool = False
    ) -> Tree:
        """See `Engine`."""
        packing = self._pack(batch)
        rows = packing.weights(weights), packing.batch(batch)
        return packing.sums(self._engine.clipped_sum(*rows, groups, bound, exact=exact))

    def _pack(self, batch: Batch) -> _Packing:
        return _Packing.of(batch.present, self._rows, self._width)
