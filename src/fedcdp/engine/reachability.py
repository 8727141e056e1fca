"""Trainable tensors that no output depends on.

Such a tensor would still be clipped, noised and sent. Under layer clipping it would also count as a group, and raise the
sensitivity of all the others. The answer is read from the graph of operations on made-up examples, so it says nothing about
records: a tensor counts as used if it can receive a gradient, even one that is zero (the first factor of LoRA at the start).
"""

from __future__ import annotations

import copy

import torch

from fedcdp.engine.base import Batch, Engine
from fedcdp.errors import ModelError
from fedcdp.files.tree import each_tensor
from fedcdp.models.networks import outputs_of

_NAMED = 3  # the first few in a message


def check_all_used(engine: Engine, batch: Batch) -> None:
    """Raise a `ModelError` that names the trainable tensors without influence on the loss of a batch of one client.

    Of the batch, only shapes and types are read. The engine must have accepted it (`Engine.check`).
    """
    model = copy.deepcopy(engine.model)  # because a forward pass may change its buffers
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    nothing = each_tensor(batch.inputs, lambda value: torch.zeros_like(value[0]))
    with torch.enable_grad():
        value = engine.loss(outputs_of(model, nothing), torch.zeros_like(batch.targets[0]))
        slopes = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    unused = [name for name, slope in zip(trained, slopes, strict=True) if slope is None]
    if unused:
        several = len(unused) > 1
        raise ModelError(
            f"{named_briefly(unused)} {'are' if several else 'is'} trainable, but no output depends on "
            f"{'them' if several else 'it'}; freeze {'them' if several else 'it'} (requires_grad_(False)) or use "
            f"{'them' if several else 'it'} in forward"
        )


def named_briefly(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
