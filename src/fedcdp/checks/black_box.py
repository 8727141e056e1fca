"""Somebody else's training loop as a black box: a function that returns everything that leaves the client.

`function(model, inputs, labels)` trains on the given records, from the given weights, and returns what would be sent:
tensors by name, a list of tensors, or one tensor. Numbers, such as a loss or a count, are sent as well and belong to it.
Every call gets a fresh copy of the network, so the function may train it in place. It draws its noise as it always does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcdp.errors import DataError, ModelError, PlanError

Released = Any
"""What the function returns: `Mapping[str, Tensor | float]`, `Sequence[Tensor]`, or a `Tensor`."""
Function = Callable[[nn.Module, Tensor, Tensor], Released]
MOST_VALUES = 2_000_000


@dataclass
class BlackBox:
    """A function, the network it starts from, and the names and shapes of what it returns."""

    function: Function
    model: nn.Module
    name: str = "the function"
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Empty before the first call. All later calls must return the same."""
    calls: int = 0

    def call(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Call the function once; everything that it returned, as one vector of float64."""
        self.calls += 1
        try:
            returned = self.function(copy.deepcopy(self.model), inputs.clone(), labels.clone())
        except (Exception, SystemExit) as error:
            said = str(error).strip().partition("\n")[0]
            raise ModelError(f"{self.name} failed on {len(inputs)} records: {type(error).__name__}: {said[:200]}") from error
        values = self._by_name(returned)
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        if not self.shapes:
            if sum(map(math.prod, shapes.values())) > MOST_VALUES:
                raise PlanError(f"{self.name} returned more than {MOST_VALUES:,} numbers; check a smaller network")
            self.shapes = shapes
        elif shapes != self.shapes:
            raise ModelError(
                f"{self.name} returned {_difference(self.shapes, shapes)}; every call must return the same shapes"
            )
        return torch.cat([value.reshape(-1) for value in values.values()])

    def finite(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The same; a number that is not finite is refused."""
        seen = self.call(inputs, labels)
        if not bool(seen.isfinite().all()):
            bad = next(name for name, value in self.split(seen).items() if not bool(value.isfinite().all()))
            raise ModelError(f"{self.name} returned values in {bad} that are not finite")
        return seen

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector, by tensor name, each flat."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        return dict(zip(self.shapes, vector.split(sizes, dim=-1), strict=True))

    def _by_name(self, returned: Released) -> dict[str, Tensor]:
        if isinstance(returned, nn.Module):
            raise ModelError(f"{self.name} returned a network; return what is sent, such as model.state_dict()")
        if isinstance(returned, Mapping):
            named = {str(name): value for name, value in returned.items() if value is not None}
        elif isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
            given = [value for value in returned if value is not None]
            named = dict(zip(names if len(names) == len(given) else map(str, range(len(given))), given, strict=True))
        else:
            named = {"returned": returned}
        values = {name: self._tensor(name, value) for name, value in named.items()}
        if not sum(value.numel() for value in values.values()):
            raise ModelError(f"{self.name} returned no tensor; return everything that leaves the client")
        return values

    def _tensor(self, name: str, value: object) -> Tensor:
        if isinstance(value, Tensor | np.ndarray | Real):
            try:
                return torch.as_tensor(value).detach().to("cpu", torch.float64)
            except (TypeError, ValueError, RuntimeError):
                pass
        raise ModelError(
            f"{self.name} returned {type(value).__name__} in {name}; it must return tensors by name, a list of tensors, "
            "or one tensor"
        )


def _difference(before: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]]) -> str:
    for name in (*before, *now):
        if name not in now:
            return f"no {name}"
        if name not in before:
            return f"another tensor, {name}"
        if now[name] != before[name]:
            return f"{name} of shape {list(now[name])}, and before of shape {list(before[name])}"
    return "the same tensors in another order"


def checked_examples(examples: object) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a client's batch: at least two records."""
    if not isinstance(examples, Sequence) or len(examples) != 2:
        raise PlanError("examples: give a pair of inputs and labels")
    try:
        inputs, labels = (torch.as_tensor(each) for each in examples)
    except (TypeError, ValueError, RuntimeError):
        raise DataError("examples: inputs and labels must be tensors or arrays of numbers") from None
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    labels = labels.float() if labels.is_floating_point() else labels
    if not inputs.dim() or not labels.dim() or len(inputs) != len(labels) or len(inputs) < 2:
        raise DataError(
            f"examples: inputs {list(inputs.shape)} and labels {list(labels.shape)} are not two or more records with labels"
        )
    if not bool(inputs.isfinite().all()) or not bool(labels.isfinite().all()):
        raise DataError("examples: inputs and labels must be finite")
    return inputs, labels
