"""Convolution for all clients and examples at once, as matrix products over the places where the kernel stands.

Activations keep the shape [clients, examples, channels, height, width] and lie in memory with the channels last, as the
products leave them: the copies in between are then of long runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine.gradients import Formed, Gradients, Products
from fedcdp.engine.rules import Back, Pair, Rule, pair_of
from fedcdp.tree import Tree


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
    """Kernel and stride of the pooling that follows, where it drops what does not fill a window: it is not computed."""

    @staticmethod
    def of(layer: nn.Conv2d, weight: str, bias: str | None, window: tuple[Pair, Pair] | None) -> Convolution:
        """The rule of a layer whose tensors have these names."""
        left, right, top, bottom = layer._reversed_padding_repeated_twice
        kernel, stride, dilation = (pair_of(each) for each in (layer.kernel_size, layer.stride, layer.dilation))
        return Convolution(weight, bias, kernel, stride, dilation, (left, right, top, bottom), layer.groups, window)

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
            # Outputs to the right, for a product with a short last axis is slow, and a first layer sees few values.
            gradients: list[Gradients] = [Products(self.weight, columns, grouped, self._shaped)]
            if self.bias is not None:
                gradients.append(Formed(self.bias, grouped.sum(3).transpose(1, 2).flatten(2)))
            return before, gradients

        return outputs, back

    def _columns(self, inputs: Tensor) -> tuple[Tensor, int, int]:
        """What the kernel sees at each place, and how many places there are down and across."""
        images = F.pad(inputs.flatten(0, 1), self.padding) if any(self.padding) else inputs.flatten(0, 1)
        seen = images.unflatten(0, inputs.shape[:2]).unflatten(2, (self.groups, -1))
        for axis, (size, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            seen = seen.unfold(4 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
            if self.window is not None:
                window, step = self.window[0][axis], self.window[1][axis]
                seen = seen.narrow(4 + axis, 0, (seen.shape[4 + axis] - window) // step * step + window)
        # [clients, examples, groups, channels, height, width, kernel height, kernel width]
        channels, height, width = seen.shape[3:6]
        if channels * self.kernel[1] < width:  # longer runs are copied if the places come last in memory
            rows = seen.permute(0, 2, 6, 7, 3, 1, 4, 5).flatten(5).flatten(2, 4)
            return rows.mT.unflatten(2, (seen.shape[1], -1)), height, width
        return seen.permute(0, 2, 1, 4, 5, 6, 7, 3).flatten(5).flatten(3, 4), height, width

    def _folded(self, deltas: Tensor, kernels: Tensor, shape: torch.Size, places: Pair) -> Tensor:
        """The derivative by the inputs: δ·K goes back to the pixels that `_columns` took, where it is added up.

        One row of the kernel after the other, and the values of a row together: both the products that are held and the
        sums over single pixels are a fraction of what they are for the whole kernel at once.
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
        """The same as a sum of shifted images, of which a compiler makes one pass and what comes next."""
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
    """The pixels that one value of the kernel meets along an axis."""
    start = first * dilation
    return slice(start, start + (places - 1) * stride + 1, stride)
