"""The paper's networks, networks that train a single linear layer, and the checks on any `nn.Module` before training."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcdp.config.plan import Plan
from fedcdp.errors import ModelError
from fedcdp.files.tree import Inputs
from fedcdp.models.batch_norm import mixing_layers
from fedcdp.models.features import PeriodicFeatures, Standardised, UnitNorm
from fedcdp.models.image_features import IMAGE_FEATURES, image_features

NetworkName = Literal[
    "auto", "cnn", "mlp", "cpl", "small", "linear", "oriented-gradients", "mirrored-gradients", "scattering",
    "random-process", "periodic", "best-features", "fixed-features",
]  # fmt: skip
ActivationName = Literal["relu", "tanh", "sigmoid"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = (*DROPOUT, nn.RReLU)  # layers that draw random numbers in training mode only
_WITH_DROPOUT = (nn.MultiheadAttention, nn.RNNBase)  # layers that apply their own dropout rate in `forward`
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # in evaluation mode, a path without batching rule
SCALING_LAYER = "scaling"
"""The name of the layer that standardises a network's inputs."""
_COLOURS = 3
_LEAST_FOR_GRADIENTS = 16  # pixels: a smaller image has too few cells, and the waves of its pixels tell more


def build(network: str, shape: tuple[int, ...], classes: int, activation: str | None = None, seed: int = 0) -> nn.Module:
    """A network for inputs of `shape`, initialised from `seed` alone.

    `network` is `cnn`, `mlp`, `cpl`, `small`, `linear`, `periodic`, `oriented-gradients`, `scattering`, the last two joined
    by `+`, a name that depends on the shape (see `resolve`), or `package.module:factory`. The default `activation` is ReLU,
    sigmoid for `cpl`, and tanh for `small`; the linear networks have none. A factory receives those of the keywords
    `input_shape`, `classes` and `activation` that it accepts.
    """
    if activation is not None and activation not in get_args(ActivationName):
        raise ModelError(f"activation: {activation!r} is not one of {', '.join(get_args(ActivationName))}")
    network = resolve(network, shape)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not the GPU's generator, which nothing here uses
        if ":" in network:
            return _from_factory(network, shape, classes, activation)
        if network in IMAGE_FEATURES or "+" in network:
            return _on_image_features(network, shape, classes, activation)
        if network not in _NETWORKS:
            raise ModelError(
                f"model: {network!r} is not one of {', '.join(get_args(NetworkName))} or package.module:factory"
            )
        return _NETWORKS[network](shape, classes, activation)


def resolve(network: str, shape: tuple[int, ...]) -> str:
    """The network that a name stands for on inputs of `shape`.

    | name | images | anything else |
    | --- | --- | --- |
    | `auto` | `cnn` | `mlp` |
    | `best-features` | `random-process` for colour, `oriented-gradients` for grey, `periodic` below 16×16 | `periodic` |
    | `fixed-features` | `oriented-gradients`, `periodic` below 16×16 | `periodic` |
    | any other | itself | itself |
    """
    image = len(shape) == 3
    if network == "auto":
        return "cnn" if image else "mlp"
    if network not in ("best-features", "fixed-features"):
        return network
    if not image or min(shape[1:]) < _LEAST_FOR_GRADIENTS:
        return "periodic"
    return "random-process" if network == "best-features" and shape[0] == _COLOURS else "oriented-gradients"


def paper_cnn(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """The paper's CNN: two 3×3 convolutions (32, 64), each pooled, and one dense layer; no biases (the authors' code)."""
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
    """The network that the paper's authors attack (CPL): four 5×5 convolutions of 12 channels and one dense layer.

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
    """A network a tenth the size of the paper's CNN, for demonstrations: two 5×5 convolutions of 12 channels, stride 2, and
    one dense layer."""
    channels, height, width = _image_shape("small", shape)
    act = _ACTIVATIONS[activation or "tanh"]
    return nn.Sequential(
        nn.Conv2d(channels, 12, 5, stride=2, padding=2), act(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2), act(),
        nn.Flatten(), nn.Linear(12 * -(-height // 4) * -(-width // 4), classes),
    )  # fmt: skip


def linear(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """One linear layer, initialised to zero, on inputs divided by their norm; a constant input replaces the bias."""
    _no_activation("linear", activation)
    layer = nn.Linear(torch.Size(shape).numel() + 1, classes, bias=False)
    return nn.Sequential(nn.Flatten(), UnitNorm(constant=0.3), _zero(layer))


def periodic(shape: tuple[int, ...], classes: int, activation: str | None = None) -> nn.Module:
    """One linear layer, zero at first, on fixed features of tables whose columns may have any scale."""
    _no_activation("periodic", activation)
    waves = PeriodicFeatures()
    features = 2 * len(waves.frequencies) * torch.Size(shape).numel()
    layer = nn.Linear(features + 1, classes, bias=False)
    return nn.Sequential(nn.Flatten(), waves, UnitNorm(constant=0.3), _zero(layer))


def _on_image_features(network: str, shape: tuple[int, ...], classes: int, activation: str | None) -> nn.Module:
    """One linear layer, initialised to zero, on the fixed features of images that `network` names."""
    _no_activation(network, activation)
    features = image_features(network, _image_shape(network, shape))
    with torch.no_grad():
        found = features(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(features, _zero(nn.Linear(found, classes, bias=False)))


_NETWORKS: dict[str, Callable[[tuple[int, ...], int, str | None], nn.Module]] = {
    "cnn": paper_cnn,
    "mlp": paper_mlp,
    "cpl": cpl_network,
    "small": small_cnn,
    "linear": linear,
    "periodic": periodic,
}


def with_scaling(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The model behind a layer that standardises its inputs, unless it has one; a sequence keeps its parameters' names."""
    if type(model) is not nn.Sequential:
        return nn.Sequential(OrderedDict([(SCALING_LAYER, Standardised(shape)), ("model", model)]))
    if scaling_of(model) is not None:
        return model
    if SCALING_LAYER in dict(model.named_children()):
        raise ModelError(f"layer {SCALING_LAYER} has the name of the layer that standardises inputs; rename it")
    return nn.Sequential(OrderedDict([(SCALING_LAYER, Standardised(shape)), *model.named_children()]))


def scaling_of(model: nn.Module) -> Standardised | None:
    """The layer that standardises a model's inputs (`with_scaling`); None if it has none."""
    layer = dict(model.named_children()).get(SCALING_LAYER)
    return layer if isinstance(layer, Standardised) else None


def outputs_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """What a network returns for the inputs: a dictionary is passed as keywords, and an answer with `logits` means these."""
    return answer_of(model(**inputs) if isinstance(inputs, dict) else model(inputs))


def answer_of(returned: Any) -> Tensor:
    """The tensor of outputs in what a network returned: transformers' models return an object with `logits`."""
    outputs: Tensor = getattr(returned, "logits", returned)
    return outputs


def prepare(model: nn.Module, plan: Plan, device: torch.device | str) -> nn.Module:
    """A copy of the model on the device, ready to be trained under the plan; a `ModelError` says why it cannot be.

    - Weights are float32 (or float64). In float16 a sum of clipped gradients and noise would be rounded so
      coarsely that no guarantee holds.
    - Modules keep the mode that you gave them, training or evaluation, from here to the released model.
    - Layers that mix examples (BatchNorm in training mode) are refused under a private method: one example's gradient would
      depend on the others' data, and running statistics would record raw data (`batch_norm` has the rules). Without privacy
      they always use the statistics of the current batch. A BatchNorm in evaluation mode keeps its statistics.
    - Dropout is switched off, including inside attention and recurrent layers, and so is the random slope of RReLU: their
      randomness is not derived from the plan's seed. Functional dropout in your own `forward` is refused later, by
      `Engine.check`.
    - PyTorch's attention takes its ordinary path in both modes. Its fast path has no gradients for single examples, and its
      nested tensors return zeros for padded positions, so outputs would differ between training and evaluation.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the network has no trainable parameter")
    _check_mixing(model, plan)
    _check_weights(model)
    ready = copy.deepcopy(model).to(device)
    for _, layer in mixing_layers(ready):
        layer.train()
        torch.func.replace_all_batch_norm_modules_(layer)
    for module in ready.modules():
        if isinstance(module, _RANDOM):
            module.eval()
        if isinstance(module, _WITH_DROPOUT):
            module.dropout = 0.0
        if isinstance(module, _WITH_FAST_PATH):
            module.training = True
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return ready


def _check_weights(model: nn.Module) -> None:
    """Raise for weights that do not exist yet, or are too coarse to be trained."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(f"{name} has no shape yet; run a made-up batch through the network before training")
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(f"{name} is {kind}, too coarse for clipping and noise; train in float32 (model.float())")


def _check_mixing(model: nn.Module, plan: Plan) -> None:
    """Raise for a layer that mixes examples, where the plan does not allow one."""
    for name, module in mixing_layers(model):
        layer = f"layer {name or '(the network itself)'} is {type(module).__name__}"
        if plan.private:
            raise ModelError(
                f"{layer}, which mixes examples, so no {plan.method} guarantee would hold; replace it with GroupNorm "
                "(fedcdp.replace_batch_norm), or put one that was trained on public data into evaluation mode (.eval())"
            )
        if plan.record_sampling == "poisson":
            raise ModelError(
                f"{layer}, whose batch statistics would include the empty slots of Poisson record sampling; use "
                "record_sampling fixed or partition, or GroupNorm"
            )


def _no_activation(network: str, activation: str | None) -> None:
    if activation is not None:
        raise ModelError(f"activation: {network} has no activation; leave the option out")


def _zero(layer: nn.Linear) -> nn.Linear:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def _image_shape(network: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ModelError(f"model: {network} needs images [channels, height, width], not inputs of shape {list(shape)}")
    return shape[0], shape[1], shape[2]


def import_function(option: str, path: str) -> Callable[..., Any]:
    """The function that `package.module:function` names, also from the current directory."""
    module_name, _, function_name = path.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ModelError(f"{option}: {path} belongs to Python's own library; name one of your own")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
        inspect.signature(function)
    except Exception as error:
        raise ModelError(f"{option}: {path} cannot be imported as a function: {error}") from error
    return function


def _from_factory(path: str, shape: tuple[int, ...], classes: int, activation: str | None) -> nn.Module:
    factory = import_function("model", path)
    accepted = inspect.signature(factory).parameters
    if activation is not None and "activation" not in accepted:
        raise ModelError(f"activation: {path} accepts no activation; leave the option out")
    known = {"input_shape": shape, "classes": classes, "activation": activation}
    try:
        model = factory(**{name: value for name, value in known.items() if name in accepted})
    except Exception as error:
        raise ModelError(f"model: {path} failed: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: {path} returned {type(model).__name__}, not a torch.nn.Module")
    return model
