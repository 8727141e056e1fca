"""What a client's part in a round weighs on the wire: measured on the records that Flower sends, not computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.pruning import keep_largest
from fedcdp.models.networks import build

# The shapes and classes of the paper's benchmarks; no data are needed to weigh a network.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "lfw": ((3, 32, 32), 62),
    "adult": ((105,), 2),
    "cancer": ((30,), 2),
}

PRUNED = (0.0, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client in one round."""

    weights: int
    """Trainable weights of the network."""
    down: int
    """From the server: the global weights."""
    up: dict[float, int]
    """To the server: the update, by the share of it that is pruned."""


def weigh(network: nn.Module, shares: tuple[float, ...] = PRUNED) -> Traffic:
    """Weigh the messages of a network, with an update of which these shares are pruned as a client prunes it."""
    from fedcdp.deploy.protocol import wire

    layout, source = Layout.of(network), torch.Generator().manual_seed(0)
    update: Tree = {name: torch.randn(1, *shape, generator=source) for name, shape in layout.shapes.items()}
    up = {}
    for share in shares:
        kept = {name: value[0] for name, value in keep_largest(update, layout, 1 - share).items()}
        up[share] = wire.bytes_of(wire.sparse(kept, layout))
    return Traffic(layout.size, wire.bytes_of(wire.dense({name: value[0] for name, value in update.items()})), up)


def weigh_benchmark(dataset: str) -> Traffic:
    """Weigh the paper's network for one of its datasets."""
    shape, classes = SHAPES[dataset]
    return weigh(build("auto", shape, classes))
