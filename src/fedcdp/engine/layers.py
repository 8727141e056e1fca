"""Rules: how one layer works for all clients and all their examples at once, forward and backward.

Activations are [clients, examples, ...], and each client has its own weights [clients, ...]. A rule is called like
`torch.func.vjp`. It returns the layer's outputs and a function for the backward pass. That function takes the loss's
derivative with respect to the outputs; it returns the derivative with respect to the inputs and the gradients of the
layer's tensors. Autograd records nothing except inside layers without tensors of their own. No shape depends on a value, so
a compiler can compile a whole step at once.

A convolution is a matrix product over the positions of its kernel. Its activations have the shape [clients, examples,
channels, height, width] and the channels-last memory layout in which the products leave them, so copies in between are of
long runs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vjp

from fedcdp.engine.gradients import Formed, Gradients, Products
from fedcdp.files.tree import Tree

Back = Callable[[Tensor], tuple["Tensor | None", list[Gradients]]]

Pair = tuple[int, int]


def pair_of(value: int | tuple[int, ...]) -> Pair:
    """A pair (vertical, horizontal): the same number twice, or the two that are given."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _padding(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    """Zeros to the left, right, top and bottom; an odd number for `same` puts the larger half to the right or bottom."""
    if layer.padding == "same":
        height, width = ((size - 1) * far for size, far in zip(layer.kernel_size, layer.dilation, strict=True))
        return width // 2, width - width // 2, height // 2, height - height // 2
    height, width = (0, 0) if isinstance(layer.padding, str) else pair_of(layer.padding)
    return width, width, height, height


class Rule(ABC):
    """A layer for all clients at once. Its tensors are looked up by their names in the network."""

    @abstractmethod
    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:
        """The outputs and the backward pass: the derivative with respect to the inputs (None unless they matter), and the
        gradients."""


@dataclass(frozen=True)
class WithoutWeights(Rule):
    """A layer that treats every example of every client alike: an activation, a pooling, a frozen layer."""

    layer: Callable[[Tensor], Tensor]

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:  # noqa: ARG002
        """See `Rule`."""
        return _alike_for_all(self.layer, inputs, inputs_matter)


def _alike_for_all(layer: Callable[[Tensor], Tensor], inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:
    """The same layer for every example of every client, with autograd's backward pass."""
    lead, examples = inputs.shape[:2], inputs.flatten(0, 1)
    if not inputs_matter:
        return layer(examples).unflatten(0, lead), lambda _: (None, [])
    outputs, pull, *_ = vjp(layer, examples)

    def back(deltas: Tensor) -> tuple[Tensor, list[Gradients]]:
        return pull(deltas.flatten(0, 1))[0].unflatten(0, lead), []

    return outputs.unflatten(0, lead), back


# Most networks contain three such layers. Their derivatives are written out, because that takes a tenth of autograd's time.
# -----------------------------------------------------------------------------------------------------------------------


class Flatten(WithoutWeights):
    """The same values in another shape."""

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:  # noqa: ARG002
        """See `Rule`."""
        outputs = self.layer(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])

        def back(deltas: Tensor) -> tuple[Tensor | None, list[Gradients]]:
            if not inputs_matter:
                return None, []
            shaped = deltas.reshape(inputs.shape)
            # In the inputs' memory layout: elementwise operations are many times faster if all operands share one.
            alike = shaped.stride() == inputs.stride() or torch.compiler.is_compiling()
            return shaped if alike else torch.empty_like(inputs).copy_(shaped), []

        return outputs, back


class Relu(WithoutWeights):
    """max(0, x); the derivative at 0 is 0."""

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:  # noqa: ARG002
        """See `Rule`."""
        outputs = inputs.relu()
        threshold_backward = torch.ops.aten.threshold_backward
        return outputs, lambda deltas: (threshold_backward(deltas, outputs, 0) if inputs_matter else None, [])


class MaxPool(WithoutWeights):
    """The largest value in each window."""

    layer: nn.MaxPool2d

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:  # noqa: ARG002
        """See `Rule`."""
        pool, images, lead = self.layer, inputs.flatten(0, 1), inputs.shape[:2]
        pairs = (pair_of(each) for each in (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
        options = (*pairs, pool.ceil_mode)
        outputs, places = torch.ops.aten.max_pool2d_with_indices(images, *options)

        def back(deltas: Tensor) -> tuple[Tensor | None, list[Gradients]]:
            if not inputs_matter:
                return None, []
            before = torch.ops.aten.max_pool2d_with_indices_backward(deltas.flatten(0, 1), images, *options, places)
            return before.unflatten(0, lead), []

        return outputs.unflatten(0, lead), back


def without_weights(layer: nn.Module) -> WithoutWeights:
    """The rule of a layer without trained tensors."""
    if isinstance(layer, nn.Flatten):
        return Flatten(layer)
    if isinstance(layer, nn.ReLU):
        return Relu(layer)
    if isinstance(layer, nn.MaxPool2d):
        return MaxPool(layer)
    return WithoutWeights(layer)


@dataclass(frozen=True)
class Linear(Rule):
    """Outputs x·Wᵀ + b; a weight's gradient is the outer product of δ and x, summed over the positions of a sequence."""

    weight: str
    bias: str | None

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:
        """See `Rule`."""
        weight = weights[self.weight]
        flat = inputs.flatten(1, -2)
        outputs = flat @ weight.mT
        if self.bias is not None:
            outputs = outputs + weights[self.bias][:, None]

        def back(deltas: Tensor) -> tuple[Tensor | None, list[Gradients]]:
            rows = deltas.flatten(1, -2)
            before = (rows @ weight).view(inputs.shape) if inputs_matter else None
            places = (inputs.shape[1], -1)
            by_place = rows.unflatten(1, places)
            gradients: list[Gradients] = [
                Products(self.weight, by_place[:, None], flat.unflatten(1, places)[:, None], _linear_weight)
            ]
            if self.bias is not None:
                gradients.append(Formed(self.bias, by_place.sum(2)))
            return before, gradients

        return outputs.view(*inputs.shape[:-1], -1), back


def _linear_weight(values: Tensor) -> Tensor:
    """[..., 1, outputs, inputs] as [..., outputs, inputs]."""
    return values.squeeze(-3)


@dataclass(frozen=True)
class Scaled(Rule):
    """A normalisation x̂ without weights of its own, then x̂·γ + β on the axes of γ and β.

    With `channels_first` these are the first axis of an example (GroupNorm), otherwise the last ones (LayerNorm).
    """

    normalise: Callable[[Tensor], Tensor]
    weight: str
    bias: str | None
    channels_first: bool

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:
        """See `Rule`."""
        normal, pull = _alike_for_all(self.normalise, inputs, inputs_matter)
        scale = self._spread(weights[self.weight], normal)
        outputs = normal * scale
        if self.bias is not None:
            outputs = outputs + self._spread(weights[self.bias], normal)
        own = weights[self.weight].dim() - 1

        def gathered(values: Tensor) -> Tensor:
            others = range(3, values.dim()) if self.channels_first else range(2, values.dim() - own)
            return values.sum(tuple(others)) if len(others) else values

        def back(deltas: Tensor) -> tuple[Tensor | None, list[Gradients]]:
            gradients: list[Gradients] = [Formed(self.weight, gathered(deltas * normal))]
            if self.bias is not None:
                gradients.append(Formed(self.bias, gathered(deltas)))
            return pull(deltas * scale)[0], gradients

        return outputs, back

    def _spread(self, value: Tensor, like: Tensor) -> Tensor:
        """A tensor [clients, ...], reshaped to broadcast over activations [clients, examples, ...]."""
        spare = like.dim() - 1 - value.dim()
        if self.channels_first:
            return value.view(value.shape[0], 1, *value.shape[1:], *(1,) * spare)
        return value.view(value.shape[0], 1, *(1,) * spare, *value.shape[1:])


@dataclass(frozen=True)
class Embedding(Rule):
    """Rows of a table, looked up by number. Only the rows that an example used have a gradient."""

    weight: str
    padding: int | None

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:  # noqa: ARG002
        """See `Rule`."""
        table = weights[self.weight]
        rows, width = table.shape[1:]
        numbers = inputs.flatten(2)

        def back(deltas: Tensor) -> tuple[None, list[Gradients]]:
            parts = deltas.reshape(*numbers.shape, width)
            if self.padding is not None:
                parts = torch.where((numbers == self.padding)[..., None], 0.0, parts)
            found = parts.new_zeros(*numbers.shape[:2], rows, width)
            found.scatter_add_(2, numbers[..., None].expand_as(parts), parts)
            return None, [Formed(self.weight, found)]

        used = numbers.flatten(1)[..., None].expand(-1, -1, width)
        return table.gather(1, used).view(*inputs.shape, width), back


@dataclass(frozen=True)
class Convolution(Rule):
    """Conv2d with any stride, zero padding, dilation and groups."""

    weight: str
    bias: str | None
    kernel: Pair
    stride: Pair
    dilation: Pair
    padding: tuple[int, int, int, int]
    """Left, right, top, bottom."""
    groups: int
    window: tuple[Pair, Pair] | None = None
    """Kernel and stride of the pooling that follows, if it drops incomplete windows: their outputs are not computed."""

    @staticmethod
    def of(layer: nn.Conv2d, weight: str, bias: str | None, window: tuple[Pair, Pair] | None) -> Convolution:
        """The rule of a layer whose tensors have these names."""
        kernel, stride, dilation = (pair_of(each) for each in (layer.kernel_size, layer.stride, layer.dilation))
        return Convolution(weight, bias, kernel, stride, dilation, _padding(layer), layer.groups, window)

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:
        """See `Rule`."""
        clients, examples = inputs.shape[:2]
        columns, height, width = self._columns(inputs)  # [clients, groups, examples, places, values]
        kernels = self._kernels(weights[self.weight])  # [clients, groups, outputs, values]
        products = columns.flatten(2, 3) @ kernels.mT
        if self.bias is not None:
            products = products + weights[self.bias].unflatten(1, (self.groups, -1))[:, :, None]
        outputs = products.view(clients, self.groups, examples, height, width, -1).permute(0, 2, 1, 5, 3, 4).flatten(2, 3)

        def back(deltas: Tensor) -> tuple[Tensor | None, list[Gradients]]:
            grouped = deltas.unflatten(2, (self.groups, -1)).permute(0, 2, 1, 4, 5, 3).flatten(3, 4)
            before = None
            if inputs_matter:
                before = self._folded(grouped.flatten(2, 3), kernels, inputs.shape, (height, width))
            # Outputs on the right: a product with a short last axis is slow, and a first layer has few input values.
            gradients: list[Gradients] = [Products(self.weight, columns, grouped, self._shaped)]
            if self.bias is not None:
                gradients.append(Formed(self.bias, grouped.sum(3).transpose(1, 2).flatten(2)))
            return before, gradients

        return outputs, back

    def _columns(self, inputs: Tensor) -> tuple[Tensor, int, int]:
        """The values under the kernel at each position, and the numbers of positions vertically and horizontally."""
        images = F.pad(inputs.flatten(0, 1), self.padding) if any(self.padding) else inputs.flatten(0, 1)
        seen = images.unflatten(0, inputs.shape[:2]).unflatten(2, (self.groups, -1))
        for axis, (size, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            seen = seen.unfold(4 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
            if self.window is not None:
                window, step = self.window[0][axis], self.window[1][axis]
                seen = seen.narrow(4 + axis, 0, (seen.shape[4 + axis] - window) // step * step + window)
        # [clients, examples, groups, channels, height, width, kernel height, kernel width]
        channels, height, width = seen.shape[3:6]
        if channels * self.kernel[1] < width:  # longer runs are copied if the positions come last in memory
            rows = seen.permute(0, 2, 6, 7, 3, 1, 4, 5).flatten(5).flatten(2, 4)
            return rows.mT.unflatten(2, (seen.shape[1], -1)), height, width
        return seen.permute(0, 2, 1, 4, 5, 6, 7, 3).flatten(5).flatten(3, 4), height, width

    def _folded(self, deltas: Tensor, kernels: Tensor, shape: torch.Size, places: Pair) -> Tensor:
        """The derivative with respect to the inputs: δ·K is added back to the pixels that `_columns` read.

        This goes one kernel row at a time, with the values of a row together, so the products in memory and the sums over
        single pixels are a fraction of those for the whole kernel at once.
        """
        if torch.compiler.is_compiling() and self.stride == (1, 1):
            return self._folded_at_once(deltas @ kernels, shape, places)
        (left, right, top, bottom), (clients, examples, channels) = self.padding, shape[:3]
        lead, depth = (clients, examples), (self.groups, channels // self.groups)
        bands = deltas.new_zeros(*lead, shape[3] + top + bottom, places[1], self.groups, self.kernel[1] * depth[1])
        for down, row in enumerate(kernels.chunk(self.kernel[0], dim=-1)):
            products = (deltas @ row).view(clients, self.groups, examples, *places, -1)
            bands[:, :, _reach(down, places[0], self.stride[0], self.dilation[0])] += products.permute(0, 2, 3, 4, 1, 5)
        images = deltas.new_zeros(*lead, shape[3] + top + bottom, shape[4] + left + right, *depth)
        for across, band in enumerate(bands.chunk(self.kernel[1], dim=-1)):
            images[:, :, :, _reach(across, places[1], self.stride[1], self.dilation[1])] += band
        inner = images[:, :, top : top + shape[3], left : left + shape[4]]
        return inner.flatten(4).permute(0, 1, 4, 2, 3)

    def _folded_at_once(self, products: Tensor, shape: torch.Size, places: Pair) -> Tensor:
        """The same as a sum of shifted images, which a compiler fuses with the operations that follow."""
        parts = products.view(shape[0], self.groups, shape[1], *places, *self.kernel, -1).permute(0, 2, 3, 4, 5, 6, 1, 7)
        height, width = places
        left, _, top, _ = self.padding
        images: list[Tensor] = []
        for down in range(self.kernel[0]):
            for across in range(self.kernel[1]):
                above, before = down * self.dilation[0] - top, across * self.dilation[1] - left
                around = (before, shape[4] - width - before, above, shape[3] - height - above)
                images.append(F.pad(parts[:, :, :, :, down, across].flatten(4).permute(0, 1, 4, 2, 3), around))
        return functools.reduce(torch.add, images)

    def _kernels(self, weight: Tensor) -> Tensor:
        """A weight [clients, outputs, channels, height, width] as [clients, groups, outputs, values]."""
        grouped: Tensor = weight.unflatten(1, (self.groups, -1))
        return grouped.permute(0, 1, 2, 4, 5, 3).flatten(3)

    def _shaped(self, values: Tensor) -> Tensor:
        """[..., groups, values, outputs] in the shape of the weight, [..., outputs, channels, height, width]."""
        unrolled: Tensor = values.mT.flatten(-3, -2).unflatten(-1, (*self.kernel, -1))
        return unrolled.movedim(-1, -3)


def _reach(first: int, places: int, stride: int, dilation: int) -> slice:
    """The pixels that one kernel value covers along an axis."""
    start = first * dilation
    return slice(start, start + (places - 1) * stride + 1, stride)
