"""Attacks on what a function returned: the gradient that an adversary expects, and reconstruction without noise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedcdp.attacks.api import attack
from fedcdp.attacks.leaks import finite
from fedcdp.checks.black_box import BlackBox
from fedcdp.engine import Loss
from fedcdp.errors import FedcdpError, ModelError

_VICTIMS = 8
_SAME_DIRECTION = 0.9999  # cosine from which what was returned is the gradient of one step, up to a factor


def expected_gradient(box: BlackBox, inputs: Tensor, labels: Tensor, loss: Loss) -> Tensor | None:
    """The gradient of the loss at the function's own weights, as a vector like its outputs; None if there is none.

    An adversary knows the weights that the server sent, and computes it for a candidate. Tensors that are no parameters
    have zeros.
    """
    network = copy.deepcopy(box.model).eval()
    try:
        loss(network(inputs), labels).backward()
    except Exception:  # another loss, or a network that takes other inputs: the fitted statistics remain
        return None
    grads = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    parts = []
    for name, shape in box.shapes.items():
        found = grads.get(name)
        fits = found is not None and tuple(found.shape) == shape
        parts.append(
            found.reshape(-1).double().cpu() if fits and found is not None else torch.zeros(shape).reshape(-1).double()
        )
    gradient = torch.cat(parts)
    return gradient if bool(gradient.isfinite().all()) and float(gradient.norm()) else None


def hostile_label(model: nn.Module, record: Tensor, label: Tensor, scale: float) -> Tensor:
    """A label that makes the loss large: the class that the network finds least likely; of numbers, one far away."""
    if label.is_floating_point():
        return label + scale * (1 + label.abs())
    try:
        with torch.no_grad():
            scores = copy.deepcopy(model).eval()(record[None])
    except Exception:  # a network that takes other inputs
        return label
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < 2 or label.dim():
        return 1 - label if set(label.unique().tolist()) <= {0, 1} else label
    return scores[0].argmin().to(label)


def reconstruct(
    box: BlackBox, inputs: Tensor, labels: Tensor, loss: Loss, progress: Callable[[int, int], None] | None
) -> tuple[dict[str, Any] | None, str]:
    """Attack noiseless outputs: the summary of the strongest attack, or None and the reason why none was run.

    Single records are attacked, one by one. The function may return gradients, an update or new weights.
    """
    weights = _vector(box)
    seen = []
    try:
        for at in range(min(_VICTIMS, len(inputs))):
            record, label = inputs[at : at + 1], labels[at : at + 1]
            gradient = expected_gradient(box, record, label, loss)
            if gradient is None:
                return None, "the gradient of the loss could not be computed; pass the loss that the function trains with"
            found = _as_gradient(box.finite(record, label), weights, gradient)
            if found is None:
                return None, "what is returned for one record is not the gradient of one step"
            seen.append(found)
    except ModelError as error:
        return None, f"it does not take a single record ({error})"
    named = {
        name: torch.stack([box.split(each)[name] for each in seen]).float().unflatten(1, shape)
        for name, shape in box.shapes.items()
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
        length = float(known.norm())
        if factor and length and abs(factor) * float(gradient.norm()) / length > _SAME_DIRECTION:
            return candidate / factor
    return None


def _vector(box: BlackBox) -> Tensor:
    """The network's own weights, as a vector like the function's outputs."""
    own = box.model.state_dict()
    parts = []
    for name, shape in box.shapes.items():
        fits = name in own and tuple(own[name].shape) == shape
        parts.append(own[name].reshape(-1).double().cpu() if fits else torch.zeros(shape).reshape(-1).double())
    return torch.cat(parts)
