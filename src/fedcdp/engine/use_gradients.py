"""The gradients of all examples, from what the recorded operations read and the derivatives behind them.

| operation | gradient of an example |
| --- | --- |
| dense layer, product of matrices | Σ over tokens of derivative ⊗ input |
| embedding | derivatives, added up by row |
| layer norm, RMS norm, group norm, product with a vector | derivative · normalised input, summed over tokens |
| convolution in one or two dimensions | Σ over places of derivative ⊗ input under the kernel |
| sum with a vector | derivative, summed over tokens |
| view or copy | derivative, traced back through the view |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fedcdp.engine.gradients import Formed, Gradients, Products
from fedcdp.engine.recorder import Use
from fedcdp.engine.token_gradients import TokenProducts, TokenRows


def gradients_of(use: Use, delta: Tensor, read: Tensor, shapes: Mapping[str, torch.Size]) -> Iterator[Gradients]:
    """The gradients of the tensors of one use, from the derivative behind it and what it read [clients, examples, ...]."""
    lead = delta.shape[:2]
    if read.is_floating_point():  # a network may compute in another precision than it is trained in
        read = read.to(delta.dtype)
    if use.rule in ("dense", "turned"):
        behind, before = (value.reshape(*lead, -1, value.shape[-1]) for value in (delta, read))
        if use.weight is not None:
            left, right = (behind, before) if use.rule == "dense" else (before, behind)
            yield TokenProducts(use.weight, left[:, None], right[:, None], _matrix)
        if use.bias is not None:
            yield Formed(use.bias, behind.sum(2))
    elif use.rule == "table":
        assert use.weight is not None
        numbers, values = read.reshape(*lead, -1), delta.reshape(*lead, -1, delta.shape[-1])
        if use.padding is not None:
            values = torch.where((numbers == use.padding)[..., None], 0.0, values)
        yield TokenRows(use.weight, numbers, values, shapes[use.weight][0])
    elif use.rule == "convolution":
        assert use.weight is not None
        # [clients, examples, images, outputs, ...] as [clients, examples, places, outputs]
        behind, shape = delta.flatten(4).mT.flatten(2, 3), shapes[use.weight]
        columns = read.flatten(2, 3)
        yield Products(use.weight, behind[:, None], columns[:, None], lambda value: _matrix(value).unflatten(-1, shape[1:]))
        if use.bias is not None:
            yield Formed(use.bias, behind.sum(2))
    elif use.rule == "view":
        assert use.weight is not None
        assert use.view is not None
        yield Formed(use.weight, _through(use.view, delta, shapes[use.weight]))
    else:
        channels = use.rule == "scaled channels"
        if use.weight is not None:
            yield Formed(use.weight, _gathered(delta * read, shapes[use.weight], channels))
        if use.bias is not None:
            yield Formed(use.bias, _gathered(delta, shapes[use.bias], channels))


def _matrix(values: Tensor) -> Tensor:
    """[..., 1, outputs, inputs] as [..., outputs, inputs]."""
    return values.squeeze(-3)


def _through(view: Callable[[Tensor], Tensor], delta: Tensor, shape: torch.Size) -> Tensor:
    """Derivatives behind a view as those of the tensor itself. A view is linear, so the tensor's values do not matter."""
    pulled: Any = vjp(view, delta.new_zeros(shape))
    result, back = pulled
    found: Tensor = vmap(vmap(lambda each: back(each.to(result.dtype))[0]))(delta)
    return found


def _gathered(values: Tensor, shape: torch.Size, channels: bool) -> Tensor:
    """Values [clients, examples, ...], summed over all axes but those of a tensor: the last ones, or the channels."""
    lead = values.shape[:2]
    if channels:  # [clients, examples, 1, channels, ...]
        return values.reshape(*lead, -1, shape.numel(), math.prod(values.shape[4:])).sum((2, 4)).view(*lead, *shape)
    return values.reshape(*lead, -1, *shape).sum(2)


def together(parts: list[Gradients]) -> Gradients:
    """The gradient of a tensor that is used once or several times."""
    first, *others = parts
    if not others:
        return first
    if all(type(each) is TokenProducts and _alike(each, first) for each in parts):
        left, right = (torch.cat([getattr(each, side) for each in parts], 3) for side in ("left", "right"))
        return TokenProducts(first.name, left, right, _matrix)
    if all(type(each) is TokenRows for each in parts):
        numbers = torch.cat([each.numbers for each in parts], 2)  # type: ignore[attr-defined]
        values = torch.cat([each.values for each in parts], 2)  # type: ignore[attr-defined]
        return TokenRows(first.name, numbers, values, first.rows)  # type: ignore[attr-defined]
    total = first.formed()
    for each in others:
        total = total + each.formed()
    return Formed(first.name, total)


def _alike(one: Any, other: Any) -> bool:
    """Whether two products have the same outputs on the left."""
    return bool(one.left.shape[-1] == other.left.shape[-1] and one.right.shape[-1] == other.right.shape[-1])
