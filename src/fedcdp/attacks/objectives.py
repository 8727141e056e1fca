"""Objectives: what an adversary would observe for dummy examples, and its distance to the actual observation.

`predicted` computes the observation that the dummies would produce in place of the victim's examples. There are two kinds
of adversaries. One treats its observation as a plain gradient. The other knows the method and runs the method's own code,
without its noise and its pruning. `Objective` measures the distance between prediction and observation; `total_variation`
measures how smooth an image is, because natural images are smooth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedcdp.attacks.gradient_units import as_gradient
from fedcdp.attacks.observe import Captured
from fedcdp.engine.base import Batch, Unquestioning
from fedcdp.errors import ModelError, PlanError
from fedcdp.files.tree import Inputs, Tree, each_tensor, masked
from fedcdp.mechanism.noise import Silence
from fedcdp.methods import METHODS, Moment, take_part

Distance = Literal["squared", "cosine"]

_SHORTEST = 1e-12  # lower bound of the product of two lengths: a zero gradient has no direction


@dataclass(frozen=True)
class Objective:
    """`squared`: the sum over all coordinates; `cosine`: 1 − cos of the angle, blind to length (Geiping et al., 2020)."""

    distance: Distance = "squared"
    total_variation: float = 0.0
    """Weight of the mean absolute difference of neighbouring pixels; a small weight only chooses among those that fit."""
    shared_only: bool = False
    """Compare only non-zero coordinates of the observation: pruned coordinates carry little information."""
    tensors: tuple[str, ...] | None = None
    """Compare only these tensors; None: all tensors."""

    def __post_init__(self) -> None:
        if self.distance not in get_args(Distance):
            raise PlanError(f"distance: {self.distance!r} is not one of {', '.join(get_args(Distance))}")
        if not 0 <= self.total_variation < math.inf:
            raise PlanError(f"total_variation: {self.total_variation} is not allowed; it must be 0 or more, and finite")

    def only(self, *tensors: str) -> Objective:
        """The same objective over these tensors alone."""
        return replace(self, tensors=tensors)

    def between(self, shown: Tree, seen: Tree) -> Tensor:
        """[victims]: distance between two trees [victims, ...]."""
        pairs = self._pairs(shown, seen)
        if self.distance == "squared":
            return _total((here - there).square() for here, there in pairs)
        inner = _total(here * there for here, there in pairs)
        squares = [_total(each[side].square() for each in pairs) for side in (0, 1)]
        # Bound from below before taking the root, whose slope at 0 is infinite.
        return 1 - inner / (squares[0] * squares[1]).clamp(min=_SHORTEST**2).sqrt()

    def misfit(self, shown: Tree, seen: Tree) -> Tensor:
        """[victims]: the squared distance minus the squared norm of the observation. That norm is constant and mostly noise;
        included, it would use up float32's digits."""
        return _total(here * (here - 2 * there) for here, there in self._pairs(shown, seen))

    def _pairs(self, shown: Tree, seen: Tree) -> list[tuple[Tensor, Tensor]]:
        pairs = [(_rows(shown[name]), _rows(seen[name])) for name in self.tensors or tuple(seen)]
        if self.shared_only:
            pairs = [(torch.where(there != 0, here, 0.0), there) for here, there in pairs]
        return pairs


def _rows(value: Tensor) -> Tensor:
    """[victims, ...] as [victims, coordinates]; a scalar has one coordinate."""
    return value.reshape(len(value), -1)


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.sum(1) for part in parts]).sum(0)


def total_variation(images: Tensor) -> Tensor:
    """[victims]: the mean absolute difference of neighbouring pixels; 0 for vectors."""
    if images.dim() < 4:
        return images.new_zeros(len(images))
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().flatten(1).mean(1)
    across = (images[..., :, 1:] - images[..., :, :-1]).abs().flatten(1).mean(1)
    return down + across


Knows = Literal["gradient", "method"]

_SAME = 1e-2  # of the norm of the observation


def predicted(captured: Captured, knows: Knows, inputs: Inputs, targets: Tensor, present: Tensor) -> Tree:
    """The noiseless observation of examples [victims, examples, ...] at the captured weights, in units of a gradient."""
    if knows == "method":
        return _by_method(captured, inputs, targets)
    return _plain_gradient(captured, inputs, targets, present)


def check_reproduces(captured: Captured) -> None:
    """Raise if a noiseless capture is not reproduced from its own examples: an attack on it would prove nothing."""
    if captured.noisy or prunes(captured):
        return
    again = predicted(captured, "method", captured.inputs, captured.targets, captured.present)
    layout = captured.engine.layout
    seen, same = layout.flatten(captured.seen, lead=1), layout.flatten(again, lead=1)
    wrong = (seen - same).norm(dim=1) / seen.norm(dim=1).clamp(min=1e-12)
    if not bool((wrong < _SAME * min(captured.steps, 30)).all()):  # rounding errors grow with each step
        raise ModelError(
            f"the true examples do not give this gradient at these weights (they differ by {float(wrong.max()):.2g} of its "
            "norm): was the network in another mode, or were the data normalised differently?"
        )


def _plain_gradient(captured: Captured, inputs: Inputs, targets: Tensor, present: Tensor) -> Tree:
    """The mean gradient of the examples, times the number of means that the observation sums."""
    victims, examples = present.shape
    weights = captured.weights
    if captured.weights_shared:  # one client with many examples is faster than many clients with the same weights
        weights = {name: value[:1] for name, value in weights.items()}
        together = each_tensor(inputs, lambda value: value.flatten(0, 1)[None])
        batch = Batch(together, targets.flatten(0, 1)[None], present.reshape(1, -1))
    else:
        batch = Batch(inputs, targets, present)
    gradients = captured.engine.per_example_gradients(weights, batch)
    share = captured.means / present.sum(1)
    mean = {}
    for name, value in gradients.items():
        each = value.reshape(victims, examples, *value.shape[2:])
        total = each[:, 0] if examples == 1 else masked(each, present).sum(1)  # a single example is in slot 0
        mean[name] = total * share.view(-1, *(1,) * (total.dim() - 1))
    return mean


def _by_method(captured: Captured, inputs: Inputs, targets: Tensor) -> Tree:
    """The method's own release for the examples, without its noise and its pruning."""
    changes = {"noise": "batch", "noise_slots": "all", "attempts": 1, "mean_records": None}
    plan = captured.plan.but(compression=0.0, share_fraction=1.0, **changes)
    clients = torch.arange(len(targets), device=targets.device)
    engine = Unquestioning(captured.engine)
    at = Moment(plan, engine, Silence(engine.layout), captured.round, clients, captured.expected_batch)
    at = replace(at, current_clip=captured.current_clip, records=captured.client_weight, mean_records=1.0)
    rows = clients[:, None]
    uses = captured.uses.clamp(max=targets.shape[1] - 1)  # one dummy may stand for all examples
    batches = [
        Batch(each_tensor(inputs, lambda value: value[rows, used_here]), targets[rows, used_here], present)  # noqa: B023
        for used_here, present in zip(uses, captured.used, strict=True)
    ]
    if captured.leak == "type2":
        return _example_by_method(captured, batches[0], at)
    update = take_part(METHODS[plan.method], {name: v[0] for name, v in captured.weights.items()}, batches, at).update
    return as_gradient(update, at)


def _example_by_method(captured: Captured, batch: Batch, at: Moment) -> Tree:
    if not at.plan.per_example:  # all other methods release it raw; their code would compute the gradient twice
        return {name: value[:, 0] for name, value in captured.engine.per_example_gradients(captured.weights, batch).items()}
    told: list[Tree] = []
    tapped = replace(at, tap=lambda reader, _, tree: told.append(tree) if reader == "type2" else None)
    METHODS[at.plan.method].gradient_sum(captured.weights, batch, tapped)
    return {name: value[:, 0] for name, value in told[0].items()}


def prunes(captured: Captured) -> bool:
    """Whether parts of the observation were pruned."""
    shared = METHODS[captured.plan.method].shared_fraction(captured.plan)
    return captured.leak != "type2" and shared < 1
