"""Attacks on what a function returned: the gradient that an adversary expects, and reconstruction without noise."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedcdp.attacks.api import attack
from fedcdp.attacks.leaks import finite
from fedcdp.checks.black_box import MOST_IN_DOUBLE, BlackBox
from fedcdp.engine import Loss
from fedcdp.errors import FedcdpError, ModelError
from fedcdp.files.tree import Inputs, Tree
from fedcdp.models.networks import outputs_of

_VICTIMS = 8
_SAME_DIRECTION = 0.9999  # cosine from which what was returned is the gradient of one step, up to a factor


def expected_gradient(box: BlackBox, inputs: Inputs, labels: Tensor, loss: Loss) -> Tree | None:
    """The gradient of the loss at the function's own weights, each tensor flat; None if there is none.

    An adversary knows the weights that the server sent, and computes it for a candidate. Only tensors that the function
    returns under the name and in the shape of a parameter are there.
    """
    network = copy.deepcopy(box.model).eval()
    try:
        loss(outputs_of(network, inputs), labels).backward()
    except Exception:  # another loss, or a network that takes other inputs: the fitted statistics remain
        return None
    gradient = {
        name: parameter.grad.reshape(-1).to("cpu", box.precision)
        for name, parameter in network.named_parameters()
        if parameter.grad is not None and tuple(parameter.grad.shape) == box.shapes.get(name)
    }
    total = length(gradient)
    return gradient if total and math.isfinite(total) else None


def length(tree: Tree) -> float:
    """The norm of all tensors together."""
    return math.sqrt(sum(float(value.square().sum(dtype=torch.float64)) for value in tree.values()))


def hostile_label(model: nn.Module, inputs: Inputs, label: Tensor, scale: float) -> Tensor:
    """A label that makes the loss of one record large: the class that the network finds least likely, or a far number."""
    if label.is_floating_point():
        return label + scale * (1 + label.abs())
    try:
        with torch.no_grad():
            scores = outputs_of(copy.deepcopy(model).eval(), inputs)
    except Exception:  # a network that takes other inputs
        return label
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < 2 or label.dim() != 1:
        return 1 - label if set(label.unique().tolist()) <= {0, 1} else label
    return scores.argmin(1).to(label)


def reconstruct(
    box: BlackBox, inputs: Inputs, labels: Tensor, loss: Loss, progress: Callable[[int, int], None] | None
) -> tuple[dict[str, Any] | None, str]:
    """Attack noiseless outputs: the summary of the strongest attack, or None and the reason why none was run.

    Single records are attacked, one by one. The function may return gradients, an update or new weights.
    """
    if isinstance(inputs, dict):
        names = ", ".join(inputs)
        return None, f"the attacks take inputs in one tensor, and the function takes a dictionary ({names})"
    if box.values > MOST_IN_DOUBLE:
        return None, f"the attacks on a function take up to {MOST_IN_DOUBLE:,} numbers, and it returns {box.values:,}"
    weights = _vector(box, box.model.state_dict())
    seen = []
    try:
        for at in range(min(_VICTIMS, len(inputs))):
            record, label = inputs[at : at + 1], labels[at : at + 1]
            gradient = expected_gradient(box, record, label, loss)
            if gradient is None:
                return None, "the gradient of the loss could not be computed; pass the loss that the function trains with"
            found = _as_gradient(_vector(box, box.finite(record, label)), weights, _vector(box, gradient))
            if found is None:
                return None, "what is returned for one record is not the gradient of one step"
            seen.append(found)
    except ModelError as error:
        return None, f"it does not take a single record ({error})"
    parts = torch.stack(seen).float().split([math.prod(shape) for shape in box.shapes.values()], dim=1)
    named = {
        name: part.unflatten(1, shape)
        for (name, shape), part in zip(box.shapes.items(), parts, strict=True)
        if name in dict(box.model.named_parameters())
    }
    truth = (inputs[: len(seen)], labels[: len(seen)])
    try:
        leaks = attack(named, model=box.model, truth=truth, loss=loss, progress=progress)
    except FedcdpError as error:
        return None, str(error)
    summary: dict[str, Any] = finite(leaks.summary())
    return summary, ""


def _as_gradient(seen: Tensor, weights: Tensor, gradient: Tensor) -> Tensor | None:
    """What was returned (a gradient, an update or new weights), in the scale of the gradient; None if it is none of them."""
    for candidate in (seen, seen - weights):
        known = torch.where(gradient != 0, candidate, 0.0)
        factor = float(torch.dot(known, gradient) / torch.dot(gradient, gradient))
        norm = float(known.norm())
        if factor and norm and abs(factor) * float(gradient.norm()) / norm > _SAME_DIRECTION:
            return candidate / factor
    return None


def _vector(box: BlackBox, tree: Tree) -> Tensor:
    """Some tensors as a vector like the function's outputs, with zeros in place of the others."""
    parts = []
    for name, shape in box.shapes.items():
        fits = name in tree and tree[name].numel() == math.prod(shape)
        parts.append(tree[name].reshape(-1).double().cpu() if fits else torch.zeros(math.prod(shape)).double())
    return torch.cat(parts)
