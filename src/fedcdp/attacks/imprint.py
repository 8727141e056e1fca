"""Imprint: a layer that sorts inputs into bins, so that each bin's gradient holds few inputs, often a single one.

Fowl, Geiping, Czaja, Goldblum, Goldstein: "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with
Modified Models", ICLR 2022. All rows of the layer measure the same quantity, here the mean of an input's values, and the
biases are at its quantiles among public inputs.

| network | what is sent | how a bin is read |
| --- | --- | --- |
| begins with a dense layer and a ReLU | crafted weights: its units are the bins | difference of neighbouring rows |
| any other | a changed network: the layer in front of it, with one step per bin (the paper's sparse variant) | the row |
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedcdp.attacks.active import Stage, awake
from fedcdp.attacks.first_layer import Baited, FirstLayer, RowAttack
from fedcdp.errors import ModelError

_BINS_PER_EXAMPLE, _FEWEST_BINS = 10, 64
_MOST_VALUES = 2**28  # in the gradients of one client's examples, by default
_STEP = 1e-4  # height of a bin's step


@dataclass(frozen=True)
class Imprint(RowAttack):
    """The attack `imprint`; `bins` is the number of bins in front of a network that has no layer for them."""

    name: ClassVar[str] = "imprint"
    bins: int | None = None

    def why_not(self, stage: Stage) -> str | None:
        """It fits every network of real-valued inputs."""
        return None if len(stage.public) > 1 else "needs public examples to place its bins"

    def craft(self, stage: Stage) -> Baited:
        """See `RowAttack`."""
        public, shape, network = stage.public.tensor, stage.scene.shape, stage.scene.network
        try:
            layer = FirstLayer.of(network, shape)
        except ModelError:
            return self._in_front(stage)
        edges = quantiles(public.flatten(1).double().mean(1), layer.units)
        size, unit = math.prod(shape), float(edges[-1] - edges[0])
        rows = torch.full((layer.units, size), 1 / size / unit, dtype=torch.float64)
        crafted = layer.filled(network, rows, -edges / unit, public, stage.seed)
        return Baited(crafted, layer.weight, layer.bias, cumulative=True)

    def _in_front(self, stage: Stage) -> Baited:
        """A layer with one step per bin in front of the network; behind it, inputs are multiples of the mean input."""
        public, shape = stage.public.tensor, stage.scene.shape
        size = math.prod(shape)
        bins = self.bins or max(_FEWEST_BINS, min(_BINS_PER_EXAMPLE * stage.examples, _MOST_VALUES // (size * stage.batch)))
        edges = quantiles(public.flatten(1).double().mean(1), bins)
        widths = torch.cat([edges[1:] - edges[:-1], (edges[-1:] - edges[:1]).clamp(min=1e-3)]).clamp(min=1e-9)
        layer, back = nn.Linear(size, bins), nn.Linear(bins, size, bias=False)
        mean = public.flatten(1).mean(0)
        # Small weights and large gradients: a client rounds its update to the precision of its weights.
        with torch.no_grad():
            layer.weight.copy_((_STEP / size / widths)[:, None].expand(bins, size))
            layer.bias.copy_(-_STEP * edges / widths)
            back.weight.copy_((2 / _STEP * mean / bins)[:, None].expand(size, bins))
        back.weight.requires_grad_(False)
        front = nn.Sequential(nn.Flatten(), layer, nn.Hardtanh(0.0, _STEP), back, nn.Unflatten(1, shape))
        crafted = nn.Sequential(OrderedDict(imprint=front, model=awake(stage.scene.network, stage.seed)))
        return Baited(crafted, "imprint.1.weight", "imprint.1.bias", changed_network=True)


def quantiles(values: Tensor, bins: int) -> Tensor:
    """The lower edges of `bins` bins that are equally likely; the first is below all values."""
    levels = torch.arange(bins, dtype=torch.float64) / bins
    # Of a few values as of many: kept strictly increasing, so no bin is empty by construction.
    edges = torch.quantile(values.double().cpu(), levels)
    spread = float(values.max() - values.min()) or 1.0
    edges[0] -= spread
    return edges + torch.arange(bins, dtype=torch.float64) * spread * 1e-9
