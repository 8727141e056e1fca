"""Convolutional networks between the paper's and one that reaches its accuracy on CIFAR-10: one change at a time.

| factory | change |
| --- | --- |
| `standardised` | the paper's network (`cnn`) behind a fixed layer that standardises each colour by published constants |
| `with_biases` | biases in every layer |
| `padded` | convolutions pad their inputs, so the dense layer reads 8×8 cells of a 32×32 image |
| `twice_as_wide` | twice as many channels |

Each network has the changes of the networks above it.
"""

from __future__ import annotations

import torch
from torch import nn

from fedcdp.errors import ModelError
from fedcdp.models.features import Standardised

_CHANNELS = (32, 64)
# Mean and standard deviation of each colour of CIFAR-10, as published with the dataset. They are statistics of its training
# images: public constants for a benchmark, but not a way to treat private data.
_MEANS, _DEVIATIONS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def standardised(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """See the table of the module."""
    return _network(input_shape, classes)


def with_biases(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """See the table of the module."""
    return _network(input_shape, classes, bias=True)


def padded(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """See the table of the module."""
    return _network(input_shape, classes, bias=True, padding=1)


def twice_as_wide(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """See the table of the module."""
    return _network(input_shape, classes, bias=True, padding=1, width=2)


def _network(shape: tuple[int, ...], classes: int, *, bias: bool = False, padding: int = 0, width: int = 1) -> nn.Sequential:
    if len(shape) != 3 or shape[0] != len(_MEANS):
        raise ModelError(f"these networks are for colour images, not for inputs of shape {list(shape)}")
    first, second = (width * channels for channels in _CHANNELS)
    height, width_ = (((side - 2 + 2 * padding) // 2 - 2 + 2 * padding) // 2 for side in shape[1:])
    scaling = Standardised(shape)
    scaling.mean.copy_(torch.tensor(_MEANS)[:, None, None].expand(shape))
    scaling.scale.copy_((1 / torch.tensor(_DEVIATIONS))[:, None, None].expand(shape))
    return nn.Sequential(
        scaling,
        nn.Conv2d(shape[0], first, 3, padding=padding, bias=bias), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=padding, bias=bias), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(second * height * width_, classes, bias=bias),
    )  # fmt: skip
