"""What a reader would see if the victim's examples were these: what an attack compares with what it saw.

Two readers: one who takes what it sees for a plain gradient, and one who knows the method and runs its own code, without
the noise and without the pruning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedcdp.attacks.captured import Captured
from fedcdp.engine.base import Batch, Unquestioning
from fedcdp.errors import ModelError
from fedcdp.methods import METHODS, Moment, take_part
from fedcdp.noise import Silence
from fedcdp.tree import Tree, masked

Knows = Literal["gradient", "method"]

_SAME = 1e-2  # of the norm of what was seen


def predicted(captured: Captured, knows: Knows, inputs: Tensor, targets: Tensor, present: Tensor) -> Tree:
    """What would be seen of examples [victims, examples, ...] in the captured place, in units of a gradient."""
    if knows == "method":
        return _by_method(captured, inputs, targets)
    return _plain_gradient(captured, inputs, targets, present)


def check_reproduces(captured: Captured) -> None:
    """Refuse a capture without noise that its own examples do not reproduce: an attack on it would prove nothing."""
    if captured.deviation or prunes(captured):
        return
    again = predicted(captured, "method", captured.inputs, captured.targets, captured.present)
    layout = captured.engine.layout
    seen, same = layout.flatten(captured.seen, lead=1), layout.flatten(again, lead=1)
    wrong = (seen - same).norm(dim=1) / seen.norm(dim=1).clamp(min=1e-12)
    if not bool((wrong < _SAME * min(captured.steps, 30)).all()):  # rounding errors grow from step to step
        raise ModelError(
            f"the true examples do not give this gradient at these weights (they differ by {float(wrong.max()):.2g} of its "
            "norm): was the network in another mode, or were the data normalised otherwise?"
        )


def _plain_gradient(captured: Captured, inputs: Tensor, targets: Tensor, present: Tensor) -> Tree:
    """The mean gradient of the examples, as often as what was seen is a sum of such means."""
    victims, examples = present.shape
    weights = captured.weights
    if captured.weights_shared:  # one client with many examples is faster than many clients with the same weights
        weights = {name: value[:1] for name, value in weights.items()}
        batch = Batch(inputs.flatten(0, 1)[None], targets.flatten(0, 1)[None], present.reshape(1, -1))
    else:
        batch = Batch(inputs, targets, present)
    gradients = captured.engine.per_example_gradients(weights, batch)
    share = captured.means / present.sum(1)
    mean = {}
    for name, value in gradients.items():
        each = value.reshape(victims, examples, *value.shape[2:])
        total = each[:, 0] if examples == 1 else masked(each, present).sum(1)  # whoever has one example has its first
        mean[name] = total * share.view(-1, *(1,) * (total.dim() - 1))
    return mean


def _by_method(captured: Captured, inputs: Tensor, targets: Tensor) -> Tree:
    """What the method's own code releases of the examples, but for its noise and its pruning."""
    plan = captured.plan.but(compression=0.0, share_fraction=1.0, noise="batch")
    clients = torch.arange(len(inputs), device=inputs.device)
    engine = Unquestioning(captured.engine)
    at = Moment(plan, engine, Silence(engine.layout), captured.round, clients, captured.expected_batch)
    at = replace(at, current_clip=captured.current_clip)
    rows = clients[:, None]
    uses = captured.uses.clamp(max=inputs.shape[1] - 1)  # one dummy may stand for all examples
    batches = [
        Batch(inputs[rows, used_here], targets[rows, used_here], present)
        for used_here, present in zip(uses, captured.used, strict=True)
    ]
    if captured.leak == "type2":
        return _example_by_method(captured, batches[0], at)
    update = take_part(METHODS[plan.method], {name: v[0] for name, v in captured.weights.items()}, batches, at).update
    rate = plan.learning_rate_at(captured.round)
    return {name: value / -rate for name, value in update.items()}


def _example_by_method(captured: Captured, batch: Batch, at: Moment) -> Tree:
    if not at.plan.per_example:  # raw in every other method; its code would compute the gradient twice
        return {name: value[:, 0] for name, value in captured.engine.per_example_gradients(captured.weights, batch).items()}
    told: list[Tree] = []
    tapped = replace(at, tap=lambda reader, _, tree: told.append(tree) if reader == "type2" else None)
    METHODS[at.plan.method].gradient_sum(captured.weights, batch, tapped)
    return {name: value[:, 0] for name, value in told[0].items()}


def prunes(captured: Captured) -> bool:
    """Whether a part of what was seen was left out."""
    shared = METHODS[captured.plan.method].shared_fraction(captured.plan)
    return captured.leak != "type2" and shared < 1
