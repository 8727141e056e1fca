"""The fast engine: rules written out for the layers that people use, for all clients and examples at once.

Per-example gradients are formed directly, or not at all where only their norms and a sum are needed. A network with any
other layer is for the reference engine (`functional`), whose numbers these are to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedcdp.clipping import clip_factors, norms_of_groups
from fedcdp.engine.base import Batch, Loss
from fedcdp.engine.chain import chain_of
from fedcdp.engine.functional import FunctionalEngine, all_finite, sum_of_finite
from fedcdp.engine.gradients import Gradients
from fedcdp.engine.memory import keep_freed_memory
from fedcdp.tree import Group, Tree, masked

LossGradients = Callable[[Tensor, Tensor], Tensor]


class BatchedEngine:
    """Gradients of an `nn.Sequential` of known layers. `ModelError` if a layer is not known: it names the layer."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._chain = chain_of(model)
        self._reference = FunctionalEngine(model, loss)
        self.model, self.layout, self.loss = model, self._reference.layout, self._reference.loss
        self.outputs, self.check = self._reference.outputs, self._reference.check
        self._loss_gradients = _of_cross_entropy if loss is F.cross_entropy else _by_autograd(self.loss)
        keep_freed_memory()

    @torch.no_grad()
    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        return self._in_order({each.name: each.formed() for each in self._gradients(weights, batch)})

    @torch.no_grad()
    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`. One product a layer over all examples, unless some gradient is not finite."""
        summed = self.plain_sum(weights, batch)
        return summed if all_finite(summed) else sum_of_finite(self.per_example_gradients(weights, batch), batch.present)

    @torch.no_grad()
    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        return self._in_order({each.name: each.summed() for each in self._gradients(weights, batch, real_only=True)})

    @torch.no_grad()
    def clipped_sum(self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float) -> Tree:
        """See `Engine`. Norms first, then one weighted sum a layer; nothing here depends on a value but by arithmetic."""
        gradients = {each.name: each.ready_to_clip() for each in self._gradients(weights, batch)}
        norms = norms_of_groups({name: each.squared_norms() for name, each in gradients.items()}, groups)
        factors = clip_factors(norms, bound, batch.present)
        of_name = {name: factor for group, factor in zip(groups, factors.of_groups, strict=True) for name in group}
        return self._in_order({n: each.weighted_sum(of_name[n], factors.usable) for n, each in gradients.items()})

    def _gradients(self, weights: Tree, batch: Batch, real_only: bool = False) -> Iterator[Gradients]:
        """The gradients of every tensor, from the last layer to the first; with `real_only`, zero for an empty slot."""
        outputs, back = self._chain(weights, batch.inputs)
        deltas = self._loss_gradients(outputs.flatten(0, 1), batch.targets.flatten(0, 1)).unflatten(0, outputs.shape[:2])
        return back(masked(deltas, batch.present) if real_only else deltas)

    def _in_order(self, tree: Tree) -> Tree:
        return {name: tree[name] for name in self.layout.shapes}


def _by_autograd(loss: Loss) -> LossGradients:
    """The derivative of each example's loss by its outputs."""
    derive: LossGradients = vmap(grad(lambda output, target: loss(output[None], target[None])))
    return derive


def _of_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Softmax less the target, for classes; written out, for it takes a tenth of the time."""
    if outputs.dim() != 2 or targets.dim() != 1:
        return _by_autograd(F.cross_entropy)(outputs, targets)
    return outputs.softmax(1) - F.one_hot(targets, outputs.shape[1])
