"""The reference engine: `torch.func` over any `nn.Module`.

`vmap` over clients of `vmap` over examples of `grad`. Slower than rules written for known layers, and the yardstick by
which those are judged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcdp.clipping import clip
from fedcdp.engine.base import Batch, Loss
from fedcdp.engine.diagnosis import refusal
from fedcdp.engine.losses import on_labels
from fedcdp.tree import Group, Layout, Tree, masked


class FunctionalEngine:
    """Per-example gradients of any module that `torch.func` can transform.

    The module's trainable parameters are the weights; its frozen parameters and buffers are constants. `loss(outputs,
    targets)` is the mean over a batch of any size, as in `torch.nn.functional.cross_entropy`.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.layout = Layout.of(model)
        self.model = model
        self.loss = on_labels(loss)
        parameters = dict(model.named_parameters())
        frozen = {name: p.detach() for name, p in parameters.items() if name not in self.layout.shapes}
        self._constants: Tree = frozen | dict(model.named_buffers())
        self._per_example = vmap(vmap(grad(self._example_loss), in_dims=(None, 0, 0)))
        self._summed = vmap(grad(self._summed_loss))

    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        gradients: Tree = self._per_example(weights, batch.inputs, batch.targets)
        return gradients

    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`. One backward pass a client, unless some gradient is not finite."""
        summed = self.plain_sum(weights, batch)
        return summed if all_finite(summed) else sum_of_finite(self.per_example_gradients(weights, batch), batch.present)

    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        summed: Tree = self._summed(weights, batch.inputs, batch.targets, batch.present)
        return summed

    def clipped_sum(self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float) -> Tree:
        """See `Engine`."""
        clipped = clip(self.per_example_gradients(weights, batch), groups, bound, batch.present).values
        return {name: value.sum(1) for name, value in clipped.items()}

    def outputs(self, weights: Tree, inputs: Tensor) -> Tensor:
        """See `Engine`."""
        with torch.no_grad():
            return self._call(weights, inputs)

    def check(self, weights: Tree, batch: Batch, per_example: bool) -> None:
        """See `Engine`."""
        single = {name: value[None] for name, value in weights.items()}
        gradients = self.per_example_gradients if per_example else self.summed_gradients
        nobody = Batch(torch.zeros_like(batch.inputs), torch.zeros_like(batch.targets), batch.present)
        for tried, are_records in ((nobody, False), (batch, True)):
            try:
                gradients(single, tried)
            except Exception as error:
                raise refusal(self.model, self.loss, tried, error, are_records) from (None if are_records else error)

    def _call(self, weights: Tree, inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.model, (weights, self._constants), (inputs,))
        return outputs

    def _example_loss(self, weights: Tree, example: Tensor, target: Tensor) -> Tensor:
        return self.loss(self._call(weights, example[None]), target[None])

    def _summed_loss(self, weights: Tree, inputs: Tensor, targets: Tensor, present: Tensor) -> Tensor:
        outputs = self._call(weights, inputs)
        losses = vmap(lambda output, target: self.loss(output[None], target[None]))(outputs, targets)
        if losses.dim() != 1:
            raise ValueError(f"the loss of one example has shape {list(losses.shape[1:])}; it must be one number")
        return (losses * present).sum()


def all_finite(tree: Tree) -> bool:
    """Whether every value is finite. A GPU waits for the answer: it is one question, for a sum is finite only if all are."""
    return bool(torch.isfinite(torch.stack([value.double().sum() for value in tree.values()]).sum()))


def sum_of_finite(gradients: Tree, present: Tensor) -> Tree:
    """Sum [clients, examples, ...] over the examples that are real and finite in every tensor."""
    lead = present.shape
    finite = [torch.isfinite(value.reshape(*lead, -1)).all(-1) for value in gradients.values()]
    usable = present & torch.stack(finite).all(0)
    return {name: masked(value, usable).sum(1) for name, value in gradients.items()}
