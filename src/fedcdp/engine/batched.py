"""The fast engine: hand-written rules for common layers, for all clients and examples at once.

Per-example gradients are formed directly, or not at all if a method needs only their norms and a sum. `chain_of` turns a
network into a chain of rules. A network with any other layer is left to the reference engine (`functional`), with which
this one agrees to 1e-5.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedcdp.config.experiment import EngineName
from fedcdp.engine.base import Batch, Engine, Loss
from fedcdp.engine.by_layer import EngineByLayer
from fedcdp.engine.functional import FunctionalEngine
from fedcdp.engine.gradients import Gradients
from fedcdp.engine.layers import Convolution, Embedding, Linear, Pair, Rule, Scaled, pair_of, without_weights
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.engine.traced import Remainder
from fedcdp.errors import ModelError, PlanError
from fedcdp.files.tree import Inputs, Layout, Tree, masked
from fedcdp.models.batch_norm import BATCH_NORMS, has_fixed_statistics
from fedcdp.models.image_features import FIXED
from fedcdp.models.networks import DROPOUT

_LOG = logging.getLogger("fedcdp")

LossGradients = Callable[[Tensor, Tensor], Tensor]


class BatchedEngine(EngineByLayer):
    """Gradients of an `nn.Sequential` of known layers. An unknown layer raises a `ModelError` that names it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._chain = chain_of(model)
        super().__init__(model, loss)
        self._loss_gradients = _of_cross_entropy if loss is F.cross_entropy else _by_autograd(self.loss)

    def gradients(self, weights: Tree, batch: Batch, real_only: bool = False) -> Iterator[Gradients]:
        """See `EngineByLayer`: from the last layer to the first."""
        assert isinstance(batch.inputs, Tensor)  # a sequence of layers takes no keywords: `check` has refused them
        outputs, back = self._chain(weights, batch.inputs)
        deltas = self._loss_gradients(outputs.flatten(0, 1), batch.targets.flatten(0, 1)).unflatten(0, outputs.shape[:2])
        return back(masked(deltas, batch.present) if real_only else deltas)


def _by_autograd(loss: Loss) -> LossGradients:
    """The derivative of each example's loss by its outputs."""
    derive: LossGradients = vmap(grad(lambda output, target: loss(output[None], target[None])))
    return derive


def _of_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Softmax minus the target, for classes. Written out, because it takes a tenth of autograd's time."""
    if outputs.dim() != 2 or targets.dim() != 1:
        return _by_autograd(F.cross_entropy)(outputs, targets)
    return outputs.softmax(1) - F.one_hot(targets, outputs.shape[1])


# Layers whose output for an example depends on that example alone, and that draw no random numbers.
_ONE_BY_ONE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Tanh, nn.Tanhshrink, nn.Softshrink,
    nn.Identity, nn.Flatten, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ZeroPad2d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.Embedding, *BATCH_NORMS, *FIXED,
)  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """Rules in the order of application, and the values of the tensors that are not trained [1, ...]."""

    rules: tuple[Rule, ...]
    constants: Tree
    first_trained: int
    """The index of the first rule with trained tensors: the rules before it need no backward pass."""

    def __call__(self, weights: Tree, inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], Iterator[Gradients]]]:
        """The network's outputs [clients, examples, ...], and the backward pass: loss derivative to all gradients."""
        tensors, backs = self.constants | weights, []
        for place, rule in enumerate(self.rules):
            inputs, back = rule(tensors, inputs, inputs_matter=place > self.first_trained)
            if place >= self.first_trained:
                backs.append(back)

        def all_back(deltas: Tensor | None) -> Iterator[Gradients]:
            for back in reversed(backs):
                assert deltas is not None
                deltas, gradients = back(deltas)
                yield from (each for each in gradients if each.name in weights)

        return inputs, all_back


def chain_of(model: nn.Module) -> Chain:
    """The chain that computes what the model computes, or a `ModelError` that names the layer without a rule."""
    layout = Layout.of(model)
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and id(parameter) in seen:
            raise ModelError(f"{name} is shared by several layers")
        seen.add(id(parameter))
    named = list(_layers(model, ""))
    for name, layer in named:
        if (reason := _why_not(layer)) is not None:
            raise ModelError(f"layer {name or '(the network itself)'} is {type(layer).__name__}, {reason}")
    named = _pooled_early(named)
    trained = [any(p.requires_grad for p in layer.parameters()) for _, layer in named]
    following = [layer for _, layer in named[1:]] + [None]
    rules = tuple(
        _rule_of(name, layer, after) if has else without_weights(_out_of_place(layer))
        for (name, layer), has, after in zip(named, trained, following, strict=True)
    )
    constants = {name: p.detach()[None] for name, p in model.named_parameters() if name not in layout.shapes}
    return Chain(rules, constants, trained.index(True))


def one_by_one(layer: nn.Module) -> bool:
    """Whether the layer's output for each example is known to depend on that example alone."""
    return all(_why_not(each) is None for _, each in _layers(layer, ""))


def _layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested sequences, in order."""
    if type(module) is nn.Sequential and not _hooked(module):
        for child, layer in module.named_modules(remove_duplicate=False):  # `named_children` omits a layer's second use
            if child and "." not in child:
                yield from _layers(layer, f"{name}.{child}" if name else child)
    elif isinstance(module, Remainder) and module.sequence and not _hooked(module):
        for step in module.sequence:
            yield from _layers(module.get_submodule(step), step)
    else:
        yield name, module


def _pooled_early(named: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Move each ReLU behind the MaxPool2d that follows it: the same values and gradients, computed for fewer entries."""
    named = list(named)
    for place in range(len(named) - 1):
        if isinstance(named[place][1], nn.ReLU) and isinstance(named[place + 1][1], nn.MaxPool2d):
            named[place], named[place + 1] = named[place + 1], named[place]
    return named


def _rule_of(name: str, layer: nn.Module, after: nn.Module | None) -> Rule:
    """The rule of a layer with trained tensors, given the layer that follows it."""
    prefix = f"{name}." if name else ""
    weight, bias = f"{prefix}weight", f"{prefix}bias" if getattr(layer, "bias", None) is not None else None
    if isinstance(layer, nn.Linear):
        return Linear(weight, bias)
    if isinstance(layer, nn.Conv2d):
        return Convolution.of(layer, weight, bias, _window(after))
    if isinstance(layer, nn.GroupNorm):
        return Scaled(partial(F.group_norm, num_groups=layer.num_groups, eps=layer.eps), weight, bias, channels_first=True)
    if isinstance(layer, nn.LayerNorm):
        normalise = partial(F.layer_norm, normalized_shape=layer.normalized_shape, eps=layer.eps)
        return Scaled(normalise, weight, bias, channels_first=False)
    if isinstance(layer, BATCH_NORMS):
        normalise = partial(F.batch_norm, running_mean=layer.running_mean, running_var=layer.running_var, eps=layer.eps)
        return Scaled(normalise, weight, bias, channels_first=True)
    assert isinstance(layer, nn.Embedding)
    return Embedding(weight, layer.padding_idx)


def _window(after: nn.Module | None) -> tuple[Pair, Pair] | None:
    """Kernel and stride of a pooling layer that drops incomplete windows, else None."""
    if not isinstance(after, nn.MaxPool2d | nn.AvgPool2d) or after.ceil_mode or any(pair_of(after.padding)):
        return None
    if isinstance(after, nn.MaxPool2d) and pair_of(after.dilation) != (1, 1):
        return None
    return pair_of(after.kernel_size), pair_of(after.stride)


def _why_not(layer: nn.Module) -> str | None:
    """The reason why a layer has no rule, or None. The type must match exactly, because a subclass may do anything."""
    if type(layer) not in _ONE_BY_ONE:
        return "for which there is no rule"
    if _hooked(layer):
        return "which has hooks"
    if not {name for name, _ in layer.named_parameters()} <= {"weight", "bias"}:
        return "which has parameters besides weight and bias"
    if isinstance(layer, DROPOUT) and layer.training and layer.p > 0:
        return "which is switched on"
    if isinstance(layer, BATCH_NORMS) and not has_fixed_statistics(layer):
        return "which mixes examples"
    if isinstance(layer, nn.Flatten) and layer.start_dim < 1:
        return "which may mix examples"
    if isinstance(layer, nn.MaxPool2d) and layer.return_indices:
        return "which returns indices"
    if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
        return f"which pads with {layer.padding_mode}"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return "which rescales its rows or their gradients, or has sparse gradients"
    return None


def _out_of_place(layer: nn.Module) -> nn.Module:
    """The layer, or a copy of it that does not overwrite its inputs."""
    if getattr(layer, "inplace", False):
        layer = copy.copy(layer)
        layer.inplace = False  # type: ignore[assignment]
    return layer


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _recorded(model: nn.Module, loss: Loss, example: Inputs | None, *, asked: bool) -> dict[str, Engine]:
    """The engine that records what trained layers read, if it knows all of their operations."""
    if example is None:
        return {}
    try:
        return {"recorded": RecordedEngine(model, loss, example)}
    except Exception as reason:  # a network may do anything, and fail at it; the engine's check says how
        _LOG.log(logging.WARNING if asked else logging.INFO, "the recorded engine cannot be used: %s", reason)
        return {}


def engines_for(model: nn.Module, loss: Loss, name: EngineName = "auto", example: Inputs | None = None) -> dict[str, Engine]:
    """The engines that may be used for a network, by name; the batched one first if it knows every layer.

    The batched engine is also the one that is compiled, and the reference for the kernel. A network of any other form is
    recorded, if `example` gives the shapes and types of one example.
    """
    if name not in get_args(EngineName):
        raise PlanError(f"engine: {name!r} is not one of {', '.join(get_args(EngineName))}")
    reference: dict[str, Engine] = {"functional": FunctionalEngine(model, loss)}
    if name == "functional":
        return reference
    if name == "recorded":
        return _recorded(model, loss, example, asked=True) or reference
    try:
        batched: dict[str, Engine] = {"batched": BatchedEngine(model, loss)}
    except ModelError as reason:
        _LOG.log(logging.INFO if name == "auto" else logging.WARNING, "using the functional engine: %s", reason)
        return reference | _recorded(model, loss, example, asked=False) if name == "auto" else reference
    return batched | reference if name == "auto" else batched
