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
import os

import torch
from torch import Tensor, nn

from fedcdp.engine.batched import one_by_one
from fedcdp.engine.runtime import report_work, stop_if_asked
from fedcdp.engine.traced import cut, size_of_features
from fedcdp.files.tree import Inputs, each_tensor, first_tensor

_ALWAYS = 2 * 2**30  # bytes of features that are kept on any machine
_BATCH = 100  # examples; larger batches take longer on a CPU, whose caches they exceed
_ALONE = ""  # the name of features that have none
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
    if size_of_features(features, len(first_tensor(inputs))) > _room(device):
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
    examples = len(first_tensor(inputs))
    whole: dict[str, Tensor] = {}  # filled in place: a list of parts and their concatenation would take twice the memory
    for start in range(0, max(1, examples), _BATCH):
        stop_if_asked()
        report_work("features", start, examples)
        some = slice(start, start + _BATCH)
        features = front(each_tensor(inputs, lambda value: value[some].to(device)))  # noqa: B023
        for name, value in _named(features).items():
            whole.setdefault(name, value.new_empty(examples, *value.shape[1:]))[some] = value
    report_work("features", examples, examples)
    return whole if isinstance(features, dict) else whole[_ALONE]


def _named(features: Inputs) -> dict[str, Tensor]:
    return features if isinstance(features, dict) else {_ALONE: features}


def _room(device: torch.device) -> int:
    """Most bytes of features that are kept: a quarter of the device's memory. Larger ones are recomputed in every step."""
    memory = 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_ALWAYS, memory // 4)
