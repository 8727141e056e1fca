"""Frozen layers at the beginning of a network: their features are computed once, before training.

The rest of the network keeps the names of its tensors, so its trained tensors fit the whole network.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedcdp.engine.batched import one_by_one
from fedcdp.files.tree import Inputs, each_tensor, first_tensor

_LARGEST = 2 * 2**30  # bytes of features; larger ones are not kept but recomputed in every step
_BATCH = 500
_FREE = (nn.Flatten, nn.Identity)  # cost nothing, so a front of these alone is not split off


def split(network: nn.Module, inputs: Inputs, device: torch.device) -> tuple[nn.Sequential | None, nn.Module]:
    """The layers before the first trained one, and the network with each of them replaced by `nn.Identity` (names stay).

    Returns None and the unchanged network unless the layers belong to an `nn.Sequential`, each example's output depends on
    that example alone, and the features of all inputs fit in memory.
    """
    if type(network) is not nn.Sequential or isinstance(inputs, dict):
        return None, network
    front: dict[str, nn.Module] = {}
    for name, layer in network.named_children():
        if any(parameter.requires_grad for parameter in layer.parameters()) or not one_by_one(layer):
            break
        front[name] = layer
    if all(isinstance(layer, _FREE) for layer in front.values()):
        return None, network
    first = nn.Sequential(*front.values())
    try:
        features = first_tensor(through(first, inputs[:1], device))
    except Exception:  # the engine's check refuses unsuitable inputs with a clear message
        return None, network
    if features.numel() * features.element_size() * len(inputs) > _LARGEST:
        return None, network
    shared = (*network.children(), *network.parameters(), *network.buffers())
    rest = copy.deepcopy(network, {id(each): each for each in shared})
    for name in front:
        setattr(rest, name, nn.Identity())
    return first, rest


@torch.no_grad()
def through(front: nn.Module | None, inputs: Inputs, device: torch.device) -> Inputs:
    """The features of the inputs on the device, computed a few at a time; without layers, the inputs themselves."""
    if front is None:
        return each_tensor(inputs, lambda value: value.to(device))
    return each_tensor(inputs, lambda value: torch.cat([front(some.to(device)) for some in value.split(_BATCH)]))
