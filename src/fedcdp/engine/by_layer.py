"""Engines that know the gradients of every example layer by layer, in the form of `gradients.Gradients`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedcdp.engine.base import Batch, Loss
from fedcdp.engine.functional import FunctionalEngine, all_finite, joined, sum_of_finite
from fedcdp.engine.gradients import Gradients
from fedcdp.engine.runtime import few_clients, keep_freed_memory
from fedcdp.files.tree import Group, Tree
from fedcdp.mechanism.clipping import clip_factors, norms_of_groups


class EngineByLayer(ABC):
    """What methods need of a batch, from the gradients of each tensor, which are formed only where nothing less will do."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._reference = FunctionalEngine(model, loss)
        self.model, self.layout, self.loss = model, self._reference.layout, self._reference.loss
        self.outputs = self._reference.outputs
        keep_freed_memory()

    def check(self, weights: Tree, batch: Batch, per_example: bool) -> None:
        """See `Engine`."""
        self._reference.check(weights, batch, per_example)

    @abstractmethod
    def gradients(self, weights: Tree, batch: Batch, real_only: bool = False) -> Iterator[Gradients]:
        """The gradients of every tensor, in any order; with `real_only`, zero for an empty slot."""

    @torch.no_grad()
    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        return self._in_order({each.name: each.formed() for each in self.gradients(weights, batch)})

    @torch.no_grad()
    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`. One product for each layer over all examples, unless some gradient is not finite."""
        summed = self.plain_sum(weights, batch)
        return summed if all_finite(summed) else sum_of_finite(self.per_example_gradients(weights, batch), batch.present)

    @torch.no_grad()
    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        return self._in_order({each.name: each.summed() for each in self.gradients(weights, batch, real_only=True)})

    @torch.no_grad()
    def clipped_sum(
        self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float, *, exact: bool = False
    ) -> Tree:
        """See `Engine`. Norms first, then one weighted sum for each layer; no control flow depends on a value."""
        gradients = {each.name: each.ready_to_clip() for each in self.gradients(weights, batch)}
        if not exact:
            return self._in_order(_clipped_sum(gradients, groups, bound, batch.present))
        held, present = sum(each.held for each in gradients.values()), batch.present
        parts = [
            _clipped_sum({name: each.in_float64(some) for name, each in gradients.items()}, groups, bound, present[some])
            for some in few_clients(len(present), held, self.layout.size, present.device)
        ]
        return self._in_order(joined(parts))

    def _in_order(self, tree: Tree) -> Tree:
        return {name: tree[name] for name in self.layout.shapes}


def _clipped_sum(gradients: dict[str, Gradients], groups: tuple[Group, ...], bound: float, present: Tensor) -> Tree:
    """The sum over each client's examples of the clipped gradients, by the name of the tensor."""
    norms = norms_of_groups({name: each.squared_norms() for name, each in gradients.items()}, groups)
    factors = clip_factors(norms, bound, present)
    of_name = {name: factor for group, factor in zip(groups, factors.of_groups, strict=True) for name in group}
    return {name: each.weighted_sum(of_name[name], factors.usable) for name, each in gradients.items()}
