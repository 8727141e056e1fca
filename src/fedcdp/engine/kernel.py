"""All local steps of many clients in one GPU kernel, for the paper's CNN: one client on one multiprocessor.

An engine computes a step of all clients, writes their gradients to memory, and computes the next step. Here a client's
weights, activations and sums stay in the caches of the multiprocessor that trains it, from its first step to its last. The
results equal those of `Method.local_step` under any engine, up to rounding, and the noise is the same draw.

`fits` says whether the kernel can train a network; engines train the others. Triton is imported only when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine.base import Loss
from fedcdp.engine.batched import chain_of
from fedcdp.engine.layers import pair_of
from fedcdp.errors import ModelError
from fedcdp.files.tree import Layout, Tree

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
_CHANNELS = ((16, 32), (16, 32, 64))  # allowed in the first and the second convolution
_MOST_WINDOWS = 64  # in the second pooling; more do not fit into the registers
_MOST_CLASSES = 128
_MOST_COLOURS = 3
_WARPS_ALONE = 8  # for a client that has a multiprocessor to itself
_GROUP = 16  # examples that the dense layer processes at once: the minimum for Triton's products


@dataclass(frozen=True)
class Work:
    """The clients' training data: their records, as indices into the data, and their counts."""

    records: Tensor
    """[clients, steps, slots], filled slots first."""
    counts: Tensor
    """[clients, steps]: the number of filled slots in a step. Empty slots cost nothing."""
    clients: Tensor
    """[clients]: the client numbers, which select the noise."""
    expected_batch: Tensor
    """[clients]: the divisor of a step's sum."""


@dataclass(frozen=True)
class StepRule:
    """How a local step moves the weights: W ← W − η (Σ clipped gradients + noise) / expected batch."""

    learning_rate: float
    clip_bound: float | None = None
    """C for every example and layer; None: no clipping."""
    flat: bool = False
    """Clip the whole gradient at once."""
    deviation: float = 0.0
    """Standard deviation of the noise on a step's sum."""
    noise_key: int = 0
    """`stream_key(seed, "step-noise", round)`."""
    tf32: bool = False
    """Round the factors of products to 10 bits of mantissa, as `torch.backends.cuda.matmul.allow_tf32` does."""


@dataclass(frozen=True)
class Tuning:
    """How the work is laid out on a multiprocessor; changes results only by rounding."""

    warps: int = 4
    programs: int = 4
    """Programs started for each multiprocessor; each has scratch memory and trains clients in turn."""
    first_tile: int = 64
    """Pooling windows of the first layer that are computed at once."""
    back_tile: int = 64
    """The same, in the backward pass."""
    dense_tile: int = 128
    """Features that the dense layer processes at once."""
    stages: int = 2
    """The number of products whose operands are prefetched at once."""
    registers: int | None = None
    """The maximum number of registers for each thread; None: no limit."""
    exact: str = "tf32x3"
    """Triton's name for the product precision to use when tf32 is not allowed."""


@dataclass(frozen=True)
class Cnn:
    """The sizes of a network that the kernel can train, except the image size."""

    layout: Layout
    channels: int
    first: int
    second: int
    classes: int
    features: int
    activation: str

    def check(self, inputs: Tensor) -> None:
        """Raise `ModelError` if the network does not accept inputs of this shape."""
        shape = tuple(inputs.shape[1:])
        rest = [((side - 2) // 2 - 2) // 2 for side in shape[1:]]
        if len(shape) != 3 or shape[0] != self.channels or rest[0] * rest[1] * self.second != self.features:
            raise ModelError(f"the network does not accept inputs of shape {list(shape)}")

    def packed(self, weights: Tree) -> Tensor:
        """Weights [...] in the kernel's order: the inverse of `unpacked`, for one client."""
        first, second, dense = (weights[name].detach() for name in self.layout.shapes)
        parts = first.flatten(1).T, second.flatten(2).permute(2, 0, 1), dense
        return torch.cat([part.flatten() for part in parts])

    def unpacked(self, flat: Tensor) -> Tree:
        """The weights [clients, ...] from the kernel's result [clients, size]."""
        sizes = [shape.numel() for shape in self.layout.shapes.values()]
        first, second, dense = flat.split(sizes, dim=1)
        parts = (
            first.view(-1, self.channels * 9, self.first).mT,
            second.view(-1, 9, self.second, self.first).permute(0, 2, 3, 1),
            dense,
        )
        named = zip(self.layout.shapes.items(), parts, strict=True)
        return {name: part.reshape(len(flat), *shape) for (name, shape), part in named}


def fits(model: nn.Module, loss: Loss) -> str | None:
    """Why the kernel cannot train a network, or None if it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if loss is not F.cross_entropy:
        return "the loss is not torch.nn.functional.cross_entropy"
    try:
        cnn_of(model)
    except ModelError as reason:
        return str(reason)
    return None


def cnn_of(model: nn.Module) -> Cnn:
    """The sizes of a network, or a `ModelError` that says why the kernel cannot train it."""
    chain_of(model)  # refuses hooks, shared tensors and unknown layers
    layers = [layer for layer in model.modules() if not isinstance(layer, nn.Sequential)]
    match layers:
        case [nn.Conv2d() as one, act, nn.MaxPool2d() as half, nn.Conv2d() as two, again, nn.MaxPool2d() as quarter,
              nn.Flatten() as flatten, nn.Linear() as dense]:  # fmt: skip
            pass
        case _:
            raise ModelError("the network is not convolution, activation, pooling, twice, then one dense layer")
    if type(act) not in _ACTIVATIONS or type(act) is not type(again):
        raise ModelError("its activations are not both ReLU, both tanh or both sigmoid")
    for convolution, allowed in zip((one, two), _CHANNELS, strict=True):
        plain = (convolution.kernel_size, convolution.stride, convolution.dilation) == ((3, 3), (1, 1), (1, 1))
        if not plain or convolution.padding not in ((0, 0), "valid") or convolution.groups != 1:
            raise ModelError("a convolution is not a plain 3×3 convolution")
        if convolution.out_channels not in allowed:
            raise ModelError(f"a convolution has {convolution.out_channels} channels, not one of {allowed}")
    for pool in (half, quarter):
        pairs = [pair_of(each) for each in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
        if pairs != [(2, 2), (2, 2), (0, 0), (1, 1)] or pool.ceil_mode:
            raise ModelError("a pooling is not a plain 2×2 pooling")
    if (flatten.start_dim, flatten.end_dim) != (1, -1):
        raise ModelError("the dense layer does not receive all features of an example")
    if any(layer.bias is not None for layer in (one, two, dense)):
        raise ModelError("a layer has a bias")
    if not all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters()):
        raise ModelError("a tensor is frozen or not float32")
    if (
        dense.in_features > _MOST_WINDOWS * two.out_channels
        or dense.out_features > _MOST_CLASSES
        or one.in_channels > _MOST_COLOURS
    ):
        raise ModelError("the images are too large, or the classes or colours too many, for one multiprocessor")
    return Cnn(
        Layout.of(model), one.in_channels, one.out_channels, two.out_channels, dense.out_features, dense.in_features,
        _ACTIVATIONS[type(act)],
    )  # fmt: skip


@torch.no_grad()
def train(
    network: Cnn, weights: Tree, inputs: Tensor, targets: Tensor, work: Work, rule: StepRule, tuning: Tuning | None = None
) -> Tree:
    """The weights [clients, ...] after all steps of the work; each client starts from the global `weights`.

    `inputs` [examples, ...] and `targets` [examples] are the data, on the device. Guarantees: an example's gradient enters
    the sum with norm at most C in each layer, up to rounding; a gradient that is not finite does not enter it at all; the
    noise is that of `SeededNoise.for_step`.
    """
    from fedcdp.engine.kernel_cnn import train_cnn

    network.check(inputs)
    clients, steps, slots = work.records.shape
    tuning = tuning or Tuning(warps=_WARPS_ALONE if clients <= _multiprocessors(inputs.device) else Tuning.warps)
    height, width = inputs.shape[2:]
    windows = ((height - 2) // 2) * ((width - 2) // 2)
    padded_classes = _padded(network.classes)
    kernels = sum(weights[name].numel() for name in list(network.layout.shapes)[:2])
    second = 9 * network.first * network.second
    shared = max(kernels, slots * windows * network.first)  # noise and activations use the same memory in turn
    scratch_size = _aligned(second + 4 * network.features + slots * (2 * network.features + padded_classes) + shared)
    programs = max(1, min(clients, tuning.programs * _multiprocessors(inputs.device)))
    flat = network.packed(weights).expand(clients, -1).contiguous()
    launch: Callable[..., Any] = train_cnn[(programs,)]
    launch(
        flat, inputs.contiguous(), targets.contiguous(), work.records.contiguous(), work.counts.contiguous(),
        work.clients.contiguous(), work.expected_batch.contiguous(),
        torch.empty(programs, scratch_size, device=inputs.device),
        clients, steps, slots, scratch_size,
        rule.learning_rate, rule.clip_bound or 0.0, rule.deviation, *_halves(rule.noise_key),
        channels=network.channels, height=height, width=width, first=network.first, second=network.second,
        classes=network.classes, activation=network.activation, clipped=rule.clip_bound is not None, flat=rule.flat,
        noisy=rule.deviation > 0, precision="tf32" if rule.tf32 else tuning.exact,
        patch=_padded(9 * network.channels), windows=_padded(network.features // network.second),
        padded_classes=padded_classes, first_tile=tuning.first_tile, back_tile=tuning.back_tile,
        dense_tile=tuning.dense_tile, group=_GROUP, stages=tuning.stages,
        num_warps=tuning.warps, num_stages=1, maxnreg=tuning.registers,
    )  # fmt: skip
    return network.unpacked(flat)


def _padded(size: int) -> int:
    """The next power of two, at least 16, as Triton's products require."""
    return max(16, 1 << (size - 1).bit_length())


def _aligned(size: int) -> int:
    return -(-size // 32) * 32


def _halves(key: int) -> tuple[int, int]:
    """A 64-bit key as two signed 32-bit words, low first: arguments of another type would recompile the kernel."""
    words = key & 0xFFFFFFFF, key >> 32
    low, high = (word - 2**32 if word >= 2**31 else word for word in words)
    return low, high


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
