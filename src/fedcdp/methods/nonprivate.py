"""Federated learning without privacy: the paper's baseline (FedSGD, McMahan et al., 2017)."""

from __future__ import annotations

from fedcdp.engine.base import Batch
from fedcdp.files.tree import Tree, masked
from fedcdp.methods.base import GradientSum, Method, Moment


class NonPrivate(Method):
    """Raw gradients and raw updates. Guarantees nothing: any adversary can invert what it sees."""

    def gradient_sum(self, weights: Tree, batch: Batch, at: Moment) -> GradientSum:
        """The plain sum of the gradients of the batch."""
        if at.tap is not None:
            gradients = at.engine.per_example_gradients(weights, batch)
            at.show("type2", {name: masked(value, batch.present) for name, value in gradients.items()})
        return GradientSum(at.engine.summed_gradients(weights, batch))
