"""The frozen part at the beginning of a network: its features are computed once, before training.

The rest of the network keeps the names of its tensors, so its trained tensors fit the whole network.

| network | split | front computed |
| --- | --- | --- |
| `nn.Sequential` whose first layers are frozen and known (`one_by_one`) | before the first other layer | in batches |
| any other that `torch.fx` can trace (`traced`) | between frozen and trained operations | one by one, with `vmap` |
| any other | none: the frozen part is computed in every step | |
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from fedcdp.engine.batched import one_by_one
from fedcdp.engine.traced import cut, size_of_features
from fedcdp.files.tree import Inputs, each_tensor, first_tensor

_LARGEST = 2 * 2**30  # bytes of features; larger ones are not kept but recomputed in every step
_BATCH = 500
_FREE = (nn.Flatten, nn.Identity)  # cost nothing, so a front of these alone is not split off


def split(network: nn.Module, inputs: Inputs, device: torch.device) -> tuple[nn.Module | None, nn.Module]:
    """The frozen part and the network without it, whose inputs are the features (trained tensors keep their names).

    Returns None and the unchanged network where no split is known, or where the features of all inputs do not fit in memory.
    In the frozen part, each example's output depends on that example alone.
    """
    few = each_tensor(inputs, lambda value: value[:1].to(device))
    found = (cut(network, few) if _frozen_further_on(network) else None) or _split_sequence(network, few)
    if found is None:
        return None, network
    front, rest, features = found
    if size_of_features(features, len(first_tensor(inputs))) > _LARGEST:
        return None, network
    return front, rest


def _known_front(network: nn.Module) -> dict[str, nn.Module]:
    """The first layers of a sequence that are frozen and known to treat examples one by one."""
    front: dict[str, nn.Module] = {}
    for name, layer in network.named_children() if type(network) is nn.Sequential else ():
        if any(parameter.requires_grad for parameter in layer.parameters()) or not one_by_one(layer):
            break
        front[name] = layer
    return front


def _frozen_further_on(network: nn.Module) -> bool:
    """Whether there are frozen parameters behind the known front."""
    known = {id(parameter) for layer in _known_front(network).values() for parameter in layer.parameters()}
    return any(not parameter.requires_grad and id(parameter) not in known for parameter in network.parameters())


def _split_sequence(network: nn.Module, few: Inputs) -> tuple[nn.Module, nn.Module, Inputs] | None:
    """The known front, the network with each of its layers replaced by `nn.Identity`, and the features of one example."""
    front = _known_front(network)
    if isinstance(few, dict) or all(isinstance(layer, _FREE) for layer in front.values()):
        return None
    first = nn.Sequential(*front.values())
    try:
        features = through(first, few, few.device)
    except Exception:  # the engine's check refuses unsuitable inputs with a clear message
        return None
    shared = (*network.children(), *network.parameters(), *network.buffers())
    rest = copy.deepcopy(network, {id(each): each for each in shared})
    for name in front:
        setattr(rest, name, nn.Identity())
    return first, rest, features


@torch.no_grad()
def through(front: nn.Module | None, inputs: Inputs, device: torch.device) -> Inputs:
    """The features of the inputs on the device, computed a few at a time; without layers, the inputs themselves."""
    if front is None:
        return each_tensor(inputs, lambda value: value.to(device))
    found = [front(some) for some in _batches(inputs, device)]
    if isinstance(found[0], dict):
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}
    return torch.cat(found)


def _batches(inputs: Inputs, device: torch.device) -> Iterator[Inputs]:
    for start in range(0, max(1, len(first_tensor(inputs))), _BATCH):
        yield each_tensor(inputs, lambda value: value[start : start + _BATCH].to(device))  # noqa: B023
