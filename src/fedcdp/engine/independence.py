"""Networks in which an example's gradient depends on other examples.

Clipping bounds what an example adds to a sum of gradients. It bounds nothing if the example also changes the gradients of
others: a network may keep values between calls of `forward` (a hidden state, a running mean), or mix the examples of a
batch in a function with a batching rule of its own. Buffers are safe: `torch.func` restores them. Layers such as BatchNorm
are refused earlier (`models.batch_norm`).

This is a trial on made-up examples: it finds dependence that shows on them, in two calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcdp.engine.base import Batch, Engine
from fedcdp.engine.made_up import made_up, moved
from fedcdp.errors import ModelError
from fedcdp.files.tree import Inputs, Tree, each_tensor

_ENDLESS = 1e30  # a clip bound that clips nothing
_CLOSE = 1e-4  # the largest difference, as a share of the gradient: a GPU may add in another order


def check_independent(engine: Engine, batch: Batch) -> None:
    """Raise a `ModelError` if an example's gradient changes with its neighbours in the batch, or with earlier batches.

    Records are read only if made-up values are out of the network's range. The engine must have accepted them
    (`Engine.check`).
    """
    for inputs in (made_up(batch.inputs), batch.inputs):
        try:
            found = [_gradient_beside(engine, batch, inputs, share) for share in (1, 0)]
        except Exception:  # noqa: S112  # nosec B112: the network may take only certain values
            continue
        return _compare(*found)
    raise ModelError("the gradient of one example beside others cannot be computed")


def _gradient_beside(engine: Engine, batch: Batch, inputs: Inputs, share: int) -> Tree:
    """The gradient of the first example, beside `share` times the others, which are no part of the sum.

    The shapes are those of the batch: what the network keeps of an earlier one must fit.
    """
    weights = {name: p.detach() for name, p in engine.model.named_parameters() if p.requires_grad}
    near = {name: value[None] for name, value in moved(weights, torch.Generator().manual_seed(1)).items()}
    first = torch.arange(batch.present.shape[1], device=batch.present.device)[None] == 0

    def beside(values: Tensor) -> Tensor:
        kept = first.view(first.shape + (1,) * (values.dim() - 2))
        return torch.where(kept, values, values * share).to(values.dtype)

    tried = Batch(each_tensor(inputs, beside), torch.zeros_like(batch.targets), first)
    return engine.clipped_sum(near, tried, engine.layout.groups("flat"), _ENDLESS)


def _compare(one: Tree, other: Tree) -> None:
    whole = torch.stack([value.double().norm() for value in one.values()]).norm()
    for name, value in one.items():
        if not bool((value - other[name]).double().norm() <= _CLOSE * (value.double().norm() + _CLOSE * whole)):
            raise ModelError(
                f"the gradient of {name} for one example depends on other examples, or on earlier calls of forward; under a "
                "private method a network must not mix examples, nor keep values from one call for the next"
            )
