"""Layers at a network's beginning that are not trained: what they make of the data is computed once, before training.

The rest of the network keeps the names of its tensors, so that what was trained behind the features is what the whole
network holds.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedcdp.engine.batched import one_by_one

_LARGEST = 2 * 2**30  # bytes of features; more are not kept, but computed anew in every step
_BATCH = 500
_FREE = (nn.Flatten, nn.Identity)  # cost nothing, so that by themselves they are left where they are


def split(network: nn.Module, inputs: Tensor, device: torch.device) -> tuple[nn.Sequential | None, nn.Module]:
    """The layers before the first trained one, and the network without them: the same names, and nothing in their place.

    None, and the network as it is, unless they are layers of an `nn.Sequential` of which each example's output depends on
    that example alone, and what they make of all inputs can be kept in memory.
    """
    if type(network) is not nn.Sequential:
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
        features = through(first, inputs[:1], device)
    except Exception:  # what the network does not take, an engine's check refuses in a sentence
        return None, network
    if features.numel() * features.element_size() * len(inputs) > _LARGEST:
        return None, network
    shared = (*network.children(), *network.parameters(), *network.buffers())
    rest = copy.deepcopy(network, {id(each): each for each in shared})
    for name in front:
        setattr(rest, name, nn.Identity())
    return first, rest


@torch.no_grad()
def through(front: nn.Module | None, inputs: Tensor, device: torch.device) -> Tensor:
    """What the layers make of the inputs, a few at a time, on the device; without layers, the inputs themselves."""
    return inputs.to(device) if front is None else torch.cat([front(some.to(device)) for some in inputs.split(_BATCH)])
