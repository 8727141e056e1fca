"""The paper's networks, and what any `nn.Module` must satisfy to be trained."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

from fedcdp.errors import ModelError
from fedcdp.plan import Plan

NetworkName = Literal["auto", "cnn", "mlp", "cpl"]
ActivationName = Literal["relu", "tanh", "sigmoid"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


def build(network: str, shape: tuple[int, ...], classes: int, activation: str | None = None, seed: int = 0) -> nn.Module:
    """A network for inputs of `shape`, initialised from `seed` alone.

    `network` is `cnn`, `mlp`, `cpl`, `auto` (cnn for images, mlp for vectors), or `package.module:factory`. Without an
    `activation` each takes its own: ReLU, and sigmoid for `cpl`. A factory is called with those of the keywords
    `input_shape`, `classes` and `activation` that it takes.
    """
    if activation is not None and activation not in get_args(ActivationName):
        raise ModelError(f"activation: {activation!r} is not one of {', '.join(get_args(ActivationName))}")
    if network == "auto":
        network = "cnn" if len(shape) == 3 else "mlp"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not that of a GPU, which nothing here draws from
        if ":" in network:
            return _from_factory(network, shape, classes, activation)
        if network not in _NETWORKS:
            raise ModelError(
                f"model: {network!r} is not one of {', '.join(get_args(NetworkName))} or package.module:factory"
            )
        return _NETWORKS[network](shape, classes, activation)


def paper_cnn(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """The paper's CNN: two 3×3 convolutions (32, 64), each pooled, and one dense layer; no biases (authors' release)."""
    channels, height, width = _image_shape("cnn", shape)
    height, width = ((height - 2) // 2 - 2) // 2, ((width - 2) // 2 - 2) // 2
    if min(height, width) < 1:
        raise ModelError(f"model: cnn needs images of at least 10×10, not {shape[1]}×{shape[2]}")
    act = _ACTIVATIONS[activation or "relu"]
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, bias=False), act(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, bias=False), act(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * height * width, classes, bias=False),
    )  # fmt: skip


def paper_mlp(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """The paper's network for tables: two hidden layers (64, 32), with biases."""
    act = _ACTIVATIONS[activation or "relu"]
    features = torch.Size(shape).numel()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(features, 64), act(), nn.Linear(64, 32), act(), nn.Linear(32, classes)
    )  # fmt: skip


def cpl_network(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """The network that the authors attack (CPL): four 5×5 convolutions of 12 channels and one dense layer.

    Every weight and bias is drawn from U(−0.5, 0.5).
    """
    channels, height, width = _image_shape("cpl", shape)
    act = _ACTIVATIONS[activation or "sigmoid"]
    layers: list[nn.Module] = []
    for stride in (2, 2, 1, 1):
        layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), act()]
        channels, height, width = 12, -(-height // stride), -(-width // stride)
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * height * width, classes))
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return network


_NETWORKS: dict[str, Callable[[tuple[int, ...], int, str | None], nn.Module]] = {
    "cnn": paper_cnn,
    "mlp": paper_mlp,
    "cpl": cpl_network,
}


def prepare(model: nn.Module, plan: Plan, device: torch.device | str) -> nn.Module:
    """A copy of the model, on the device, that can be trained under the plan; or a sentence that says why not.

    - Layers that mix examples (BatchNorm) are refused under a private method: one example's gradient would hold the
      others' data. Without privacy they use the statistics of the batch at hand, always.
    - Dropout is switched off: its randomness is not derived from the plan's seed.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the network has no trainable parameter")
    for name, module in mixing_layers(model):
        kind = type(module).__name__
        if plan.private:
            raise ModelError(
                f"layer {name or '(the network itself)'} is {kind}, which mixes examples, so that no {plan.method} "
                "guarantee would hold; use GroupNorm or LayerNorm instead"
            )
        if plan.record_sampling == "poisson":
            raise ModelError(
                f"layer {name or '(the network itself)'} is {kind}, whose batch statistics would count the empty slots of "
                "Poisson record sampling; use record_sampling fixed or partition, or GroupNorm"
            )
    ready = copy.deepcopy(model).to(device).train()
    torch.func.replace_all_batch_norm_modules_(ready)
    for module in ready.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    return ready


def mixing_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers in which an example's output depends on the other examples of its batch."""
    return [each for each in model.named_modules() if isinstance(each[1], nn.modules.batchnorm._BatchNorm)]


def _image_shape(network: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ModelError(f"model: {network} needs images [channels, height, width], not inputs of shape {list(shape)}")
    return shape[0], shape[1], shape[2]


def _from_factory(path: str, shape: tuple[int, ...], classes: int, activation: str | None) -> nn.Module:
    module_name, _, factory_name = path.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ModelError(f"model: {path} is of Python's own library, which has no networks")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        accepted = inspect.signature(factory).parameters
    except Exception as error:
        raise ModelError(f"model: {path} cannot be imported as a function: {error}") from error
    if activation is not None and "activation" not in accepted:
        raise ModelError(f"activation: {path} takes no activation; leave it out")
    known = {"input_shape": shape, "classes": classes, "activation": activation}
    try:
        model = factory(**{name: value for name, value in known.items() if name in accepted})
    except Exception as error:
        raise ModelError(f"model: {path} failed: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: {path} returned {type(model).__name__}, not a torch.nn.Module")
    return model
