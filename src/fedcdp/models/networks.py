"""The paper's networks, those that train a linear layer alone, and what any `nn.Module` must satisfy to be trained."""

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

from fedcdp.config.plan import Plan
from fedcdp.errors import ModelError
from fedcdp.models.features import OrientedGradients, UnitNorm

NetworkName = Literal["auto", "cnn", "mlp", "cpl", "small", "linear", "oriented-gradients"]
ActivationName = Literal["relu", "tanh", "sigmoid"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = (*DROPOUT, nn.RReLU)  # layers that draw random numbers in training mode, and only there
_WITH_DROPOUT = (nn.MultiheadAttention, nn.RNNBase)  # layers that read a dropout rate of their own in `forward`
_INSTANCE_NORMS = (
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d,
)  # fmt: skip


def build(network: str, shape: tuple[int, ...], classes: int, activation: str | None = None, seed: int = 0) -> nn.Module:
    """A network for inputs of `shape`, initialised from `seed` alone.

    `network` is `cnn`, `mlp`, `cpl`, `small`, `linear`, `oriented-gradients`, `auto` (cnn for images, mlp for vectors), or
    `package.module:factory`. Without an `activation` each takes its own: ReLU, sigmoid for `cpl`, tanh for `small`; the
    linear ones have none. A factory is called with those of the keywords `input_shape`, `classes` and `activation` that it
    takes.
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


def small_cnn(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """A tenth of the paper's CNN, for demonstrations: two 5×5 convolutions of 12 channels, stride 2, and one dense layer."""
    channels, height, width = _image_shape("small", shape)
    act = _ACTIVATIONS[activation or "tanh"]
    return nn.Sequential(
        nn.Conv2d(channels, 12, 5, stride=2, padding=2), act(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2), act(),
        nn.Flatten(), nn.Linear(12 * -(-height // 4) * -(-width // 4), classes),
    )  # fmt: skip


def linear(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """One linear layer, zero at first, on inputs that are each divided by their norm; a constant input stands for a bias."""
    _no_activation("linear", activation)
    layer = nn.Linear(torch.Size(shape).numel() + 1, classes, bias=False)
    return nn.Sequential(nn.Flatten(), UnitNorm(constant=0.3), _zero(layer))


def oriented_gradients(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """One linear layer, zero at first, on fixed features of images: all that is trained is their weight in each class."""
    _no_activation("oriented-gradients", activation)
    channels, height, width = _image_shape("oriented-gradients", shape)
    # Digits need finer cells than pictures of things, which need their colours (docs/recommended.md).
    features = OrientedGradients(stride=8, reach=8, colour=0.7) if channels == 3 else OrientedGradients()
    with torch.no_grad():
        found = features(torch.zeros(1, channels, height, width)).shape[1]
    return nn.Sequential(features, _zero(nn.Linear(found, classes, bias=False)))


_NETWORKS: dict[str, Callable[[tuple[int, ...], int, str | None], nn.Module]] = {
    "cnn": paper_cnn,
    "mlp": paper_mlp,
    "cpl": cpl_network,
    "small": small_cnn,
    "linear": linear,
    "oriented-gradients": oriented_gradients,
}


def prepare(model: nn.Module, plan: Plan, device: torch.device | str) -> nn.Module:
    """A copy of the model, on the device, that can be trained under the plan; or a sentence that says why not.

    - Weights are float32 (or float64). In float16 a sum of clipped gradients and noise would be rounded so
      coarsely that no guarantee holds.
    - Layers that mix examples (BatchNorm) are refused under a private method: one example's gradient would hold the
      others' data. Without privacy they use the statistics of the batch at hand, always.
    - Dropout is switched off, also inside attention and recurrent layers, and so is the random slope of RReLU: their
      randomness is not derived from the plan's seed. Dropout in a `forward` of your own is refused later, by
      `Engine.check`.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the network has no trainable parameter")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(
                f"{name} is {kind}, which neither bounds nor noise would survive; train in float32 (model.float())"
            )
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
        if isinstance(module, _RANDOM):
            module.eval()
        elif isinstance(module, _WITH_DROPOUT):
            module.dropout = 0.0  # not `eval`, in which attention takes another path, one that `torch.func` cannot transform
    return ready


def mixing_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers in which an example's output depends on the other examples of its batch.

    A batch norm of any library has `track_running_stats`; so has torch's instance norm, which keeps examples apart.
    """
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "track_running_stats") and not isinstance(layer, _INSTANCE_NORMS)
    ]


def _no_activation(network: str, activation: str | None) -> None:
    if activation is not None:
        raise ModelError(f"activation: {network} takes no activation; leave it out")


def _zero(layer: nn.Linear) -> nn.Linear:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


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
