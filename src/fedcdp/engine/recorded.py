"""The fast engine for networks of any form: it records what every trained layer reads, and the loss's derivative behind it.

A network runs as the reference engine runs it, example by example under `vmap`, so nothing mixes examples. Meanwhile every
operation that uses a trained tensor is intercepted. A *probe*, a tensor of zeros, is added to its result, and its input is
kept. The loss is then derived by the probes alone, in one backward pass. The derivative and the input of every operation
together are the gradients of all examples (`gradients.Gradients`), without forming any that a method does not need.

| operation | gradient of an example |
| --- | --- |
| dense layer, product of matrices | Σ over tokens of derivative ⊗ input |
| embedding | derivatives, added up by row |
| layer norm, RMS norm, group norm, product with a vector | derivative · normalised input, summed over tokens |
| convolution in one or two dimensions | Σ over places of derivative ⊗ input under the kernel |
| sum with a vector | derivative, summed over tokens |

Attention and recurrent layers are written out in these (`unfused`). The engine refuses a network that uses a trained tensor
in any other operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from fedcdp.engine.attention import written_out
from fedcdp.engine.base import Batch, Loss
from fedcdp.engine.by_layer import EngineByLayer
from fedcdp.engine.functional import check_by
from fedcdp.engine.gradients import Formed, Gradients, Products
from fedcdp.engine.token_gradients import TokenProducts, TokenRows
from fedcdp.engine.unfused import has_recurrent_layers, unfused
from fedcdp.errors import ModelError
from fedcdp.files.tree import Inputs, Tree, each_tensor, masked, tensors_in
from fedcdp.models.networks import answer_of


@dataclass(frozen=True)
class Use:
    """One operation that uses trained tensors: what it computes, their names, and the shape of its result."""

    rule: str
    weight: str | None
    bias: str | None
    shape: torch.Size
    padding: int | None = None
    """The row of an embedding that has no gradient."""


class RecordedEngine(EngineByLayer):
    """Gradients of any module whose trained tensors are used by known operations. `example` is one made-up example."""

    def __init__(self, model: nn.Module, loss: Loss, example: Inputs) -> None:
        super().__init__(model, loss)
        self._recurrent = has_recurrent_layers(model)
        frozen = {name: p.detach() for name, p in model.named_parameters() if name not in self.layout.shapes}
        self._constants: Tree = frozen | dict(model.named_buffers())
        self._uses: dict[tuple[Any, ...], tuple[Use, ...]] = {}
        self._uses_for(example)
        self._derived = vmap(vmap(grad(self._example_loss, has_aux=True), in_dims=(0, None, 0, 0)), in_dims=(0, 0, 0, 0))

    def check(self, weights: Tree, batch: Batch, per_example: bool) -> None:  # noqa: ARG002
        """See `Engine`."""
        check_by(lambda *tried: list(self.gradients(*tried)), self.model, self.loss, weights, batch)

    def gradients(self, weights: Tree, batch: Batch, real_only: bool = False) -> Iterator[Gradients]:
        """See `EngineByLayer`."""
        uses = self._uses_for(each_tensor(batch.inputs, lambda value: value[0, :1]))
        lead, like = batch.present.shape, next(iter(weights.values()))
        zero = like.new_zeros(())
        probes = tuple(zero.expand(*lead, *use.shape) for use in uses)
        deltas, reads = self._derived(probes, weights, batch.inputs, batch.targets)
        found: dict[str, list[Gradients]] = {name: [] for name in self.layout.shapes}
        for use, delta, read in zip(uses, deltas, reads, strict=True):
            derivative = masked(delta, batch.present) if real_only else delta
            for each in _gradients_of(use, derivative, read, self.layout.shapes):
                found[each.name].append(each)
        for name, parts in found.items():
            yield _together(parts) if parts else Formed(name, zero.expand(*lead, *self.layout.shapes[name]))

    def _uses_for(self, example: Inputs) -> tuple[Use, ...]:
        """The uses of trained tensors for inputs of this shape, found by running one made-up example."""
        key = tuple((tuple(value.shape), value.dtype) for value in tensors_in(example))
        if key not in self._uses:
            weights = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
            recorder = _Recorder(weights, None)
            with torch.no_grad():
                self._call(weights, each_tensor(example, _made_up), recorder)
            self._uses[key] = tuple(recorder.uses)
        return self._uses[key]

    def _call(self, weights: Tree, inputs: Inputs, recorder: _Recorder) -> Tensor:
        arguments, keywords = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
        with recorder, unfused(self._recurrent):
            return answer_of(functional_call(self.model, (weights, self._constants), arguments, keywords))

    def _example_loss(
        self, probes: tuple[Tensor, ...], weights: Tree, example: Inputs, target: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        recorder = _Recorder(weights, probes)
        outputs = self._call(weights, each_tensor(example, lambda value: value[None]), recorder)
        if len(recorder.uses) != len(probes):
            raise ModelError("the network uses its trained tensors differently for different inputs")
        return self.loss(outputs, target[None]), tuple(recorder.reads)


def _made_up(value: Tensor) -> Tensor:
    """One example that is nobody's."""
    return torch.rand_like(value) if value.is_floating_point() else torch.ones_like(value)


# While a network runs -------------------------------------------------------------------------------------------------

_Handler = Callable[..., Tensor | None]
_LOOKS = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_nested", "is_sparse",
          "is_quantized", "is_meta", "is_mkldnn")  # fmt: skip
_HARMLESS = {getattr(Tensor, name).__get__ for name in _LOOKS} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.is_contiguous, Tensor.element_size, Tensor.__len__, Tensor.__hash__, Tensor.get_device, torch.numel,
    torch.is_floating_point, torch.is_complex, torch.is_tensor,
}  # fmt: skip


@dataclass
class _Recorder(TorchFunctionMode):
    """Intercepts the operations on trained tensors; with `probes`, adds one to the result of each."""

    weights: Tree
    probes: tuple[Tensor, ...] | None
    uses: list[Use] = field(default_factory=list)
    reads: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._names = {id(value): name for name, value in self.weights.items()}
        self._turned: dict[int, tuple[Tensor, str]] = {}  # transposed matrices, kept so that their ids stay theirs

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if not self._trains(args) and not self._trains(tuple(kwargs.values())):
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # its products come back here one by one
            with self:
                return written_out(*args, **kwargs)
        if (handler := _HANDLERS.get(func)) is not None and (found := handler(self, *args, **kwargs)) is not None:
            return found
        if func not in _HARMLESS and getattr(func, "__name__", "") not in _WRITTEN_OUT:
            raise ModelError(f"there is no rule for {getattr(func, '__name__', func)} of a trained tensor")
        return func(*args, **kwargs)

    def _trains(self, values: tuple[Any, ...]) -> bool:
        return any(
            self._trains(tuple(value))
            if isinstance(value, tuple | list)
            else id(value) in self._names or self._is_turned(value)
            for value in values
        )

    def _is_turned(self, value: object) -> bool:
        return id(value) in self._turned

    def name(self, value: object) -> str | None:
        """The name of a trained tensor; None for anything else."""
        return self._names.get(id(value))

    def probed(
        self, result: Tensor, rule: str, read: Tensor, weight: str | None, bias: str | None, padding: int | None = None
    ) -> Tensor:
        """Note a use, and add its probe."""
        self.uses.append(Use(rule, weight, bias, result.shape, padding))
        if self.probes is None:
            return result
        number = len(self.reads)
        if number >= len(self.probes) or self.probes[number].shape != result.shape:
            raise ModelError("the network uses its trained tensors differently for different inputs")
        self.reads.append(read)
        return result + self.probes[number]

    # One handler for each kind of operation; None: the operation is as it is, and no trained tensor may be in it.

    def dense(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """`F.linear`."""
        if self._is_turned(weight):
            return self._product(inputs, self._turned[id(weight)][1], weight.mT, bias, turned=False)
        return self._product(inputs, self.name(weight), weight, bias, turned=True)

    def matrices(self, inputs: Tensor, weight: Tensor) -> Tensor | None:
        """`inputs @ weight`, for a matrix of weights on the right."""
        if id(inputs) in self._names or self._is_turned(inputs) or weight.dim() != 2:
            return None
        if self._is_turned(weight):
            return self._product(inputs, self._turned[id(weight)][1], weight.mT, None, turned=True)
        return self._product(inputs, self.name(weight), weight, None, turned=False)

    def added_product(self, bias: Tensor, inputs: Tensor, weight: Tensor, *, beta: int = 1, alpha: int = 1) -> Tensor | None:
        """`torch.addmm`."""
        if (beta, alpha) != (1, 1) or bias.dim() != 1:
            return None
        if self._is_turned(weight):
            return self._product(inputs, self._turned[id(weight)][1], weight.mT, bias, turned=True)
        return self._product(inputs, self.name(weight), weight, bias, turned=False)

    def _product(
        self, inputs: Tensor, weight: str | None, values: Tensor, bias: Tensor | None, *, turned: bool
    ) -> Tensor | None:
        """Inputs times a weight [outputs, inputs] (`turned`) or [inputs, outputs], plus a bias."""
        of_bias = self.name(bias)
        if id(inputs) in self._names or self._is_turned(inputs):
            return None
        result = F.linear(inputs, values) if turned else inputs @ values
        if bias is not None:
            result = result + bias
        return self.probed(result, "dense" if turned else "turned", inputs, weight, of_bias)

    def table(self, numbers: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
              norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor | None:  # fmt: skip  # noqa: ARG002
        """`F.embedding`."""
        if max_norm is not None or scale_grad_by_freq or sparse:
            return None
        padding = None if padding_idx is None else padding_idx % len(weight)
        return self.probed(F.embedding(numbers, weight), "table", numbers, self.name(weight), None, padding)

    def layer_norm(
        self,
        inputs: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor | None:
        """`F.layer_norm`."""
        return self._scaled(F.layer_norm(inputs, normalized_shape, None, None, eps), weight, bias)

    def rms_norm(
        self, inputs: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor | None:
        """`F.rms_norm`."""
        return self._scaled(F.rms_norm(inputs, normalized_shape, None, eps), weight, None)

    def group_norm(
        self, inputs: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor | None:
        """`F.group_norm`."""
        return self._scaled(F.group_norm(inputs, num_groups, None, None, eps), weight, bias, channels=True)

    def _scaled(self, normal: Tensor, weight: Tensor | None, bias: Tensor | None, channels: bool = False) -> Tensor:
        """A normalised input times a weight, plus a bias: on the last axes, or on the channels."""
        last = (-1, *(1,) * (normal.dim() - 2)) if channels else ()
        result = normal if weight is None else normal * (weight.view(last) if channels else weight)
        if bias is not None:
            result = result + (bias.view(last) if channels else bias)
        return self.probed(result, "scaled channels" if channels else "scaled", normal, self.name(weight), self.name(bias))

    def multiplied(self, left: Any, right: Any) -> Tensor | None:
        """An elementwise product with a trained tensor whose axes are the last ones of the other."""
        for weight, other in ((left, right), (right, left)):
            if (name := self.name(weight)) is not None and _fits(weight, other) and not self._trains((other,)):
                return self.probed(other * weight, "scaled", other, name, None)
        return None

    def added(self, left: Any, right: Any, *, alpha: float = 1) -> Tensor | None:
        """A sum with a trained tensor whose axes are the last ones of the other."""
        if alpha != 1:
            return None
        for weight, other in ((left, right), (right, left)):
            if (name := self.name(weight)) is not None and _fits(weight, other) and not self._trains((other,)):
                return self.probed(other + weight, "scaled", other, None, name)
        return None

    def convolution(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                    dilation: Any = 1, groups: int = 1) -> Tensor | None:  # fmt: skip
        """`F.conv1d` and `F.conv2d` in one group."""
        if groups != 1 or isinstance(padding, str) or self.name(weight) is None:
            return None
        flat = weight.dim() == 3
        above = (1, 0, 1) if flat else (None, None, None)
        step, margin, far = map(_pair, (stride, padding, dilation), above)
        images, kernel = (inputs[..., None, :], weight[:, :, None]) if flat else (inputs, weight)
        result = F.conv2d(images, kernel, None, step, margin, far)
        columns = F.unfold(images, kernel.shape[2:], far, margin, step).mT
        result = result[..., 0, :] if flat else result
        if bias is not None:
            result = result + bias.view(-1, *(1,) * (result.dim() - 2))
        return self.probed(result, "convolution", columns, self.name(weight), self.name(bias))

    def turn(self, matrix: Tensor, *axes: Any) -> Tensor | None:
        """The transpose of a trained matrix, which may then be multiplied with. (`Tensor.T` comes with its type.)"""
        numbers = {axis % 2 for axis in axes if isinstance(axis, int)}
        if self.name(matrix) is None or matrix.dim() != 2 or numbers not in ({0, 1}, set()):
            return None
        turned = matrix.mT
        self._turned[id(turned)] = (turned, self._names[id(matrix)])
        return turned


def _fits(weight: Tensor, other: object) -> bool:
    """Whether a trained tensor is spread over another with at least as many axes, which it does not enlarge."""
    return (
        isinstance(other, Tensor)
        and other.dim() > weight.dim()
        and other.shape[-weight.dim() or other.dim() :] == weight.shape
    )


def _pair(value: Any, above: int | None) -> tuple[int, int]:
    """(vertical, horizontal); `above` is the vertical number of a layer in one dimension."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return (numbers[0] if above is None else above, numbers[-1])


_WRITTEN_OUT = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
_HANDLERS: dict[Any, _Handler] = {
    F.linear: _Recorder.dense, F.embedding: _Recorder.table, F.layer_norm: _Recorder.layer_norm,
    F.rms_norm: _Recorder.rms_norm, F.group_norm: _Recorder.group_norm, F.conv1d: _Recorder.convolution,
    F.conv2d: _Recorder.convolution, torch.addmm: _Recorder.added_product, Tensor.addmm: _Recorder.added_product,
    torch.matmul: _Recorder.matrices, Tensor.matmul: _Recorder.matrices, Tensor.__matmul__: _Recorder.matrices,
    torch.mm: _Recorder.matrices, Tensor.mm: _Recorder.matrices,
    torch.mul: _Recorder.multiplied, Tensor.mul: _Recorder.multiplied, Tensor.__mul__: _Recorder.multiplied,
    Tensor.__rmul__: _Recorder.multiplied, torch.add: _Recorder.added, Tensor.add: _Recorder.added,
    Tensor.__add__: _Recorder.added, Tensor.__radd__: _Recorder.added,
    torch.t: _Recorder.turn, Tensor.t: _Recorder.turn, torch.transpose: _Recorder.turn, Tensor.transpose: _Recorder.turn,
    Tensor.T.__get__: _Recorder.turn, Tensor.mT.__get__: _Recorder.turn,  # type: ignore[attr-defined]
}  # fmt: skip


# After the backward pass ----------------------------------------------------------------------------------------------


def _gradients_of(use: Use, delta: Tensor, read: Tensor, shapes: Any) -> Iterator[Gradients]:
    """The gradients of the tensors of one use, from the derivative behind it and what it read [clients, examples, ...]."""
    lead = delta.shape[:2]
    if use.rule in ("dense", "turned"):
        behind, before = (value.reshape(*lead, -1, value.shape[-1]) for value in (delta, read))
        if use.weight is not None:
            left, right = (behind, before) if use.rule == "dense" else (before, behind)
            yield TokenProducts(use.weight, left[:, None], right[:, None], _matrix)
        if use.bias is not None:
            yield Formed(use.bias, behind.sum(2))
    elif use.rule == "table":
        assert use.weight is not None
        numbers, values = read.reshape(*lead, -1), delta.reshape(*lead, -1, delta.shape[-1])
        if use.padding is not None:
            values = torch.where((numbers == use.padding)[..., None], 0.0, values)
        yield TokenRows(use.weight, numbers, values, shapes[use.weight][0])
    elif use.rule == "convolution":
        assert use.weight is not None
        behind = delta.flatten(2, 3).flatten(3).mT  # [clients, examples, places, outputs]
        shape = shapes[use.weight]
        yield Products(
            use.weight, behind[:, None], read.flatten(2, 3)[:, None], lambda value: _matrix(value).unflatten(-1, shape[1:])
        )
        if use.bias is not None:
            yield Formed(use.bias, behind.sum(2))
    else:
        channels = use.rule == "scaled channels"
        if use.weight is not None:
            yield Formed(use.weight, _gathered(delta * read, shapes[use.weight], channels))
        if use.bias is not None:
            yield Formed(use.bias, _gathered(delta, shapes[use.bias], channels))


def _matrix(values: Tensor) -> Tensor:
    """[..., 1, outputs, inputs] as [..., outputs, inputs]."""
    return values.squeeze(-3)


def _gathered(values: Tensor, shape: torch.Size, channels: bool) -> Tensor:
    """Values [clients, examples, ...], summed over all axes but those of a tensor: the last ones, or the channels."""
    lead = values.shape[:2]
    if channels:  # [clients, examples, 1, channels, ...]
        return values.reshape(*lead, -1, shape.numel(), math.prod(values.shape[4:])).sum((2, 4)).view(*lead, *shape)
    return values.reshape(*lead, -1, *shape).sum(2)


def _together(parts: list[Gradients]) -> Gradients:
    """The gradient of a tensor that is used once or several times."""
    first, *others = parts
    if not others:
        return first
    if all(type(each) is TokenProducts and _alike(each, first) for each in parts):
        left, right = (torch.cat([getattr(each, side) for each in parts], 3) for side in ("left", "right"))
        return TokenProducts(first.name, left, right, _matrix)
    if all(type(each) is TokenRows for each in parts):
        numbers = torch.cat([each.numbers for each in parts], 2)  # type: ignore[attr-defined]
        values = torch.cat([each.values for each in parts], 2)  # type: ignore[attr-defined]
        return TokenRows(first.name, numbers, values, first.rows)  # type: ignore[attr-defined]
    total = first.formed()
    for each in others:
        total = total + each.formed()
    return Formed(first.name, total)


def _alike(one: Any, other: Any) -> bool:
    """Whether two products have the same outputs on the left."""
    return bool(one.left.shape[-1] == other.left.shape[-1] and one.right.shape[-1] == other.right.shape[-1])
