"""How much memory the training of one client takes: an estimate from above, to bound how many are trained at once."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fedcdp.tree import Layout

BUDGET = {"cpu": 2**29, "cuda": 8 * 2**30}  # bytes for all clients that are trained at once

_KEPT = 31 * 2**20  # bytes; just below the most that the GNU C library lets its threshold grow to

_COPIES = 4  # a value is held about so often: as it is, as what the way back needs, and while either is computed
_WORD = 4


def clients_within_budget(model: nn.Module, example: Tensor, slots: int, per_example: bool) -> int:
    """How many clients with so many examples in a step fit into the budget of the device; at least one."""
    gradients = Layout.of(model).size * (slots if per_example else 2)
    a_client = _COPIES * _WORD * (gradients + slots * _activations(model, example))
    return max(1, BUDGET.get(example.device.type, BUDGET["cpu"]) // a_client)


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next step, in this process and from now on.

    GNU's gives large blocks back to the system and asks for them anew, and every page of a new one costs a fault: up to a
    third of a step's time on a CPU. What "large" means grows with the largest block that was freed so far: this one, which
    is never written to. Elsewhere it does nothing.
    """
    torch.empty(_KEPT, dtype=torch.uint8)


def _activations(model: nn.Module, example: Tensor) -> int:
    """Values that one example has in the whole network: the outputs of its layers, and what a convolution's kernel sees."""
    counted = [example.numel()]

    def count(layer: nn.Module, _: Any, output: object) -> None:
        if isinstance(output, Tensor):
            counted.append(output.numel())
        if isinstance(layer, nn.Conv2d) and isinstance(output, Tensor):
            counted.append(output.numel() // layer.out_channels * layer.groups * layer.weight[0].numel())

    hooks = [layer.register_forward_hook(count) for layer in model.modules() if not list(layer.children())]
    try:
        with torch.no_grad(), suppress(Exception):  # what the network does not take, an engine's check refuses in a sentence
            model(torch.zeros_like(example)[None])  # no record: a network may keep what it sees, and is then released
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counted)
