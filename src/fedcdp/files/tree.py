"""Weights, gradients and updates as named tensors ("trees"), and the order of their coordinates.

Leading axes mean the same everywhere: none for the global model, [clients] for local weights and updates,
[clients, examples] for per-example gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Tree = dict[str, Tensor]
Inputs = Tensor | Tree
"""The inputs of examples: one tensor, or several by name (`input_ids`, `attention_mask`), whose first axes are the same."""
Group = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The trainable tensors of a network: their names and shapes in a fixed order, and the layer of each.

    A *layer* is a module that owns trainable parameters, its weight and bias together. Frozen parameters are not part of
    a layout: they are never clipped, noised or sent.
    """

    shapes: Mapping[str, torch.Size]
    layers: tuple[Group, ...]

    @staticmethod
    def of(model: nn.Module) -> Layout:
        """Read the layout of a model. A parameter shared by several modules is counted once, at its first owner."""
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        layers: dict[str, list[str]] = {}
        for name in trainable:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        return Layout({name: p.shape for name, p in trainable.items()}, tuple(tuple(g) for g in layers.values()))

    def groups(self, mode: str) -> tuple[Group, ...]:
        """The groups of tensors that are clipped together: each layer, or (`flat`) all tensors."""
        return self.layers if mode == "layer" else (tuple(self.shapes),)

    @property
    def size(self) -> int:
        """The number of trainable weights."""
        return sum(shape.numel() for shape in self.shapes.values())

    def flatten(self, tree: Tree, lead: int) -> Tensor:
        """Join all coordinates of a tree with `lead` leading axes into one last axis, in the layout's order."""
        return torch.cat([tree[name].reshape(*tree[name].shape[:lead], -1) for name in self.shapes], dim=-1)

    def unflatten(self, flat: Tensor) -> Tree:
        """The inverse of `flatten`: views of `flat` in the layout's shapes."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        return {
            name: part.unflatten(-1, shape) if len(shape) else part.squeeze(-1)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def each_tensor(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with a function applied to their tensor, or to each of them."""
    return {name: function(value) for name, value in inputs.items()} if isinstance(inputs, dict) else function(inputs)


def tensors_in(inputs: Inputs) -> list[Tensor]:
    """The tensor of the inputs, or all of them."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def first_tensor(inputs: Inputs) -> Tensor:
    """The tensor of the inputs, or the first of them: for what all of them share, such as length and device."""
    return tensors_in(inputs)[0]


def masked(values: Tensor, usable: Tensor) -> Tensor:
    """Keep the values where `usable` holds; zero elsewhere, even in place of NaN. Its axes are the leading ones."""
    return torch.where(usable.view(usable.shape + (1,) * (values.dim() - usable.dim())), values, 0.0)


def combine(left: Tree, right: Tree, alpha: float | Tensor = 1.0) -> Tree:
    """left + alpha · right, tensor by tensor."""
    if isinstance(alpha, Tensor):  # an input of a compiled program; torch.add takes only a Python number
        return {name: left[name] + alpha * right[name] for name in left}
    return {name: torch.add(left[name], right[name], alpha=alpha) for name in left}


def repeat(tree: Tree, clients: int) -> Tree:
    """The global weights repeated for each client, without copying."""
    return {name: value.expand(clients, *value.shape) for name, value in tree.items()}
