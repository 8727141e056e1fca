"""What was seen: the readers' releases as one value, with what a reader knows besides and the truth to score by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedcdp.engine.base import Engine
from fedcdp.plan import Plan
from fedcdp.tree import Tree

Leak = Literal["type0", "type1", "type2"]
LEAKS: tuple[Leak, ...] = get_args(Leak)

_BY_VICTIM = ("inputs", "targets", "present", "expected_batch", "slot")


@dataclass(frozen=True)
class Captured:
    """What was seen of N victims, what the reader knows besides, and the examples that it came from, to score by."""

    leak: Leak
    plan: Plan
    """As it was run: `local_steps` is the number of steps that the captured update is made of."""
    engine: Engine
    round: int
    seen: Tree
    """[victims, ...] in units of a gradient; the mean over the releases where there are several."""
    weights: Tree
    """[victims, ...]: where the gradient was taken, or the local training started."""
    weights_shared: bool
    """Whether these are the same for all victims."""
    inputs: Tensor
    """[victims, examples, ...]: the distinct examples behind what was seen."""
    targets: Tensor
    present: Tensor
    """[victims, examples]: a victim may have fewer examples than another."""
    uses: Tensor
    """[steps, victims, slots]: which of its examples a victim used in each step."""
    used: Tensor
    """[steps, victims, slots]: whether the slot was filled."""
    expected_batch: Tensor
    """[victims]: what the sum over a step is divided by (1 for a single example)."""
    deviation: float
    """Standard deviation of the noise on a coordinate of `seen` that the method promises there; 0 where it adds none."""
    releases: int
    current_clip: float | None
    slot: Tensor
    """[victims]: the place of the example in its client's batch, for `type2`."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def steps(self) -> int:
        """Local steps behind what was seen."""
        return len(self.uses)

    @property
    def means(self) -> Tensor:
        """[victims]: how many mean gradients of a victim's examples were added up: the steps, if every batch was full."""
        return self.used.sum((0, 2)) / self.expected_batch

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.inputs.device

    def take(self, who: Tensor) -> Captured:
        """What was seen of some of the victims, in that order."""
        taken: dict[str, Any] = {name: getattr(self, name)[who] for name in _BY_VICTIM}
        seen = {name: value[who] for name, value in self.seen.items()}
        if self.weights_shared:
            weights = {name: value[:1].expand(len(who), *value.shape[1:]) for name, value in self.weights.items()}
        else:
            weights = {name: value[who] for name, value in self.weights.items()}
        return replace(self, seen=seen, weights=weights, uses=self.uses[:, who], used=self.used[:, who], **taken)

    def clip_bound(self) -> float:
        """C where it was captured."""
        return self.plan.clip_at(self.round, self.current_clip)


def join(parts: list[Captured]) -> Captured:
    """The victims of all parts, in that order."""
    most = {name: max(getattr(part, name).shape[1] for part in parts) for name in ("inputs", "targets", "present")}
    slots = max(part.uses.shape[2] for part in parts)

    def cat(name: str) -> Tensor:
        values = [getattr(part, name) for part in parts]
        return torch.cat([widen(value, 1, most[name]) for value in values])

    lead: dict[str, Any] = {name: cat(name) for name in most}
    return replace(
        parts[0],
        **lead,
        seen={name: torch.cat([part.seen[name] for part in parts]) for name in parts[0].seen},
        weights={name: torch.cat([part.weights[name] for part in parts]) for name in parts[0].weights},
        weights_shared=all(part.weights_shared for part in parts),
        uses=torch.cat([widen(part.uses, 2, slots) for part in parts], dim=1),
        used=torch.cat([widen(part.used, 2, slots) for part in parts], dim=1),
        expected_batch=torch.cat([part.expected_batch for part in parts]),
        slot=torch.cat([part.slot for part in parts]),
    )


def widen(value: Tensor, axis: int, length: int) -> Tensor:
    """The value with zeros at the end of an axis, so that it has this length."""
    missing = length - value.shape[axis]
    if not missing:
        return value
    shape = list(value.shape)
    shape[axis] = missing
    return torch.cat([value, value.new_zeros(shape)], dim=axis)
