"""Somebody else's training loop as a black box: a function that returns everything that leaves the client.

`function(model, inputs, labels)` trains on the given records, from the given weights, and returns what would be sent:
tensors by name, a list of tensors, or one tensor. Numbers, such as a loss or a count, are sent as well and belong to it.
Inputs are one tensor, or a dictionary of tensors by name. Every call gets a fresh copy of the network, so the function may
train it in place. It draws its noise as it always does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcdp.errors import DataError, ModelError, PlanError
from fedcdp.files.tree import Inputs, Tree, each_tensor, tensors_in

Released = Any
"""What the function returns: `Mapping[str, Tensor | float]`, `Sequence[Tensor]`, or a `Tensor`."""
Function = Callable[[nn.Module, Inputs, Tensor], Released]
MOST_IN_DOUBLE = 2_000_000
"""Numbers that are measured in float64; more of them are measured in float32, which takes half the memory."""


@dataclass
class BlackBox:
    """A function, the network it starts from, and the names and shapes of what it returns."""

    function: Function
    model: nn.Module
    name: str = "the function"
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Empty before the first call. All later calls must return the same."""
    calls: int = 0

    def call(self, inputs: Inputs, labels: Tensor) -> Tree:
        """Call the function once; everything that it returned, each tensor flat."""
        self.calls += 1
        try:
            returned = self.function(copy.deepcopy(self.model), each_tensor(inputs, torch.clone), labels.clone())
        except (Exception, SystemExit) as error:
            said = str(error).strip().partition("\n")[0]
            raise ModelError(f"{self.name} failed on {len(labels)} records: {type(error).__name__}: {said[:200]}") from error
        values = self._by_name(returned)
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        if not self.shapes:
            self.shapes.update(shapes)
        elif shapes != self.shapes:
            raise ModelError(
                f"{self.name} returned {_difference(self.shapes, shapes)}; every call must return the same shapes"
            )
        return {name: value.to("cpu", self.precision).reshape(-1) for name, value in values.items()}

    def finite(self, inputs: Inputs, labels: Tensor) -> Tree:
        """The same; a number that is not finite is refused."""
        seen = self.call(inputs, labels)
        for name, value in seen.items():
            if not bool(value.isfinite().all()):
                raise ModelError(f"{self.name} returned values in {name} that are not finite")
        return seen

    def with_weights(self, factor: float) -> BlackBox:
        """The same function, from weights that are `factor` times as large."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        return replace(self, model=model, calls=0)

    @property
    def values(self) -> int:
        """How many numbers a call returns."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def precision(self) -> torch.dtype:
        """The type in which the returned numbers are measured."""
        return torch.float64 if self.values <= MOST_IN_DOUBLE else torch.float32

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
                tensor = torch.as_tensor(value).detach()
                return tensor if tensor.is_floating_point() else tensor.to(torch.float64)
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


def checked_examples(examples: object) -> tuple[Inputs, Tensor]:
    """Inputs and labels of a client's batch: at least two records."""
    if not isinstance(examples, Sequence) or len(examples) != 2:
        raise PlanError("examples: give a pair of inputs and labels")
    inputs: Inputs
    if isinstance(examples[0], Mapping):  # also the BatchEncoding of a tokenizer
        inputs = {str(name): _records(value) for name, value in examples[0].items()}
        if not inputs:
            raise DataError("examples: the inputs are an empty dictionary")
    else:
        inputs = _records(examples[0])
    labels = _records(examples[1])
    tensors = tensors_in(inputs)
    if any(not each.dim() or len(each) < 2 or len(each) != len(tensors[0]) for each in (*tensors, labels)):
        told = inputs if isinstance(inputs, dict) else {"inputs": inputs}
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in told.items())
        raise DataError(f"examples: {shapes} and labels {list(labels.shape)} are not two or more records with labels")
    return inputs, labels


def _records(values: Any) -> Tensor:
    """A tensor of finite numbers; real numbers are float32."""
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise DataError("examples: inputs and labels must be tensors or arrays of numbers") from None
    found = found.float() if found.is_floating_point() else found
    if not bool(found.isfinite().all()):
        raise DataError("examples: inputs and labels must be finite")
    return found
