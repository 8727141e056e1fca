"""The operations of a network that use trained tensors, intercepted while it runs.

Every such operation is a `Use`: its rule, the trained tensors, and the shape of its result. A *probe*, a tensor of zeros, is
added to its result, and its input is kept (`UseRecorder.reads`). `recorded` derives the loss by the probes.

Guarantees: every trained tensor among an operation's arguments is part of its `Use`. Any other operation on a trained tensor
raises a `ModelError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedcdp.engine.attention import written_out
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree

CHANGING = "the network uses its trained tensors differently for different inputs"


@dataclass(frozen=True)
class Use:
    """One operation that uses trained tensors: what it computes, their names, and the shape of its result."""

    rule: str
    weight: str | None
    bias: str | None
    shape: torch.Size
    padding: int | None = None
    """The row of an embedding that has no gradient."""
    view: Callable[[Tensor], Tensor] | None = field(default=None, compare=False)
    """A view or a copy, as a function of the trained tensor."""
    seen: str = ""
    """Which view it is."""


_Handler = Callable[..., Tensor | None]
_LOOKS = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_nested", "is_sparse",
          "is_quantized", "is_meta", "is_mkldnn")  # fmt: skip
_HARMLESS = {getattr(Tensor, name).__get__ for name in _LOOKS} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.is_contiguous, Tensor.element_size, Tensor.__len__, Tensor.__hash__, Tensor.get_device, torch.numel,
    torch.is_floating_point, torch.is_complex, torch.is_tensor,
}  # fmt: skip
# Views and copies are linear and use no other tensor.
_VIEWS = {
    "__getitem__", "clone", "contiguous", "double", "expand", "flatten", "float", "movedim", "narrow", "permute", "repeat",
    "reshape", "select", "squeeze", "t", "to", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip


@dataclass
class UseRecorder(TorchFunctionMode):
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
        kwargs = dict(kwargs or {})
        trained = len(list(self._trained((args, tuple(kwargs.values())))))
        if not trained or func in _HARMLESS:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # its products come back here one by one
            with self:
                return written_out(*args, **kwargs)
        for place, name in enumerate(("input", "other")):
            if len(args) == place and name in kwargs:
                args = (*args, kwargs.pop(name))
        if (turned := self._by(_TURNS.get(func), args, kwargs)) is not None:
            return turned
        before = len(self.uses)
        found = self._by(_HANDLERS.get(func), args, kwargs)
        if found is None and getattr(func, "__name__", "") in _VIEWS:
            found = self.viewed(func, args, kwargs)
        told = [name for use in self.uses[before:] for name in (use.weight, use.bias) if name is not None]
        if found is None or len(told) < trained:  # a trained tensor may also be among the inputs
            raise ModelError(f"there is no rule for {getattr(func, '__name__', func)} of a trained tensor")
        return found

    def _by(self, handler: _Handler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What a handler returns; None also if there is none, or it does not take these arguments."""
        if handler is None:
            return None
        try:
            _signature(handler).bind(self, *args, **kwargs)
        except TypeError:
            return None
        return handler(self, *args, **kwargs)

    def _trained(self, values: object) -> Iterator[Tensor]:
        """The trained tensors among arguments, each as often as it is there."""
        if isinstance(values, tuple | list):
            for value in values:
                yield from self._trained(value)
        elif isinstance(values, Tensor) and (id(values) in self._names or id(values) in self._turned):
            yield values

    def _is_turned(self, value: object) -> bool:
        return id(value) in self._turned

    def name(self, value: object) -> str | None:
        """The name of a trained tensor; None for anything else."""
        return self._names.get(id(value))

    def probed(self, result: Tensor, use: Use, read: Tensor) -> Tensor:
        """Note a use, and add its probe."""
        self.uses.append(use)
        if self.probes is None:
            return result
        number = len(self.reads)
        if number >= len(self.probes) or self.probes[number].shape != result.shape:
            raise ModelError(CHANGING)
        self.reads.append(read)
        return result + self.probes[number].to(result.dtype)

    # One handler for each kind of operation; None: it has no rule for these arguments.

    def dense(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """`F.linear`."""
        if self._is_turned(weight):
            return self._product(inputs, self._turned[id(weight)][1], weight.mT, bias, turned=False)
        return self._product(inputs, self.name(weight), weight, bias, turned=True)

    def matrices(self, inputs: Tensor, weight: Tensor) -> Tensor | None:
        """`inputs @ weight`, for a matrix of weights on the right."""
        if self._is_turned(weight):
            return self._product(inputs, self._turned[id(weight)][1], weight.mT, None, turned=True)
        return self._product(inputs, self.name(weight), weight, None, turned=False)

    def added_product(self, bias: Tensor, inputs: Tensor, weight: Tensor, *, beta: int = 1, alpha: int = 1) -> Tensor | None:
        """`torch.addmm`."""
        if (beta, alpha) != (1, 1):
            return None
        if self._is_turned(weight):
            return self._product(inputs, self._turned[id(weight)][1], weight.mT, bias, turned=True)
        return self._product(inputs, self.name(weight), weight, bias, turned=False)

    def _product(
        self, inputs: Tensor, weight: str | None, values: Tensor, bias: Tensor | None, *, turned: bool
    ) -> Tensor | None:
        """Inputs times a weight [outputs, inputs] (`turned`) or [inputs, outputs], plus a bias [outputs]."""
        outputs = values.shape[:1] if turned else values.shape[1:]
        if values.dim() != 2 or (bias is not None and bias.shape != outputs):
            return None
        result = F.linear(inputs, values) if turned else inputs @ values
        if bias is not None:
            result = result + bias
        return self.probed(result, Use("dense" if turned else "turned", weight, self.name(bias), result.shape), inputs)

    def table(self, numbers: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
              norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor | None:  # fmt: skip  # noqa: ARG002
        """`F.embedding`."""
        if max_norm is not None or scale_grad_by_freq or sparse:
            return None
        padding = None if padding_idx is None else padding_idx % len(weight)
        result = F.embedding(numbers, weight)
        return self.probed(result, Use("table", self.name(weight), None, result.shape, padding), numbers)

    def rows(self, weight: Tensor, numbers: Any) -> Tensor | None:
        """`weight[numbers]`, for a matrix of weights and a tensor of row numbers."""
        if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or weight.dim() != 2:
            return None
        return self.table(torch.where(numbers < 0, numbers + len(weight), numbers), weight)

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
        rule = "scaled channels" if channels else "scaled"
        return self.probed(result, Use(rule, self.name(weight), self.name(bias), result.shape), normal)

    def multiplied(self, left: Any, right: Any) -> Tensor | None:
        """An elementwise product with a trained tensor whose axes are the last ones of the other."""
        for weight, other in ((left, right), (right, left)):
            if (name := self.name(weight)) is not None and _fits(weight, other):
                result = other * weight
                return self.probed(result, Use("scaled", name, None, result.shape), other)
        return None

    def added(self, left: Any, right: Any, *, alpha: float = 1) -> Tensor | None:
        """A sum with a trained tensor whose axes are the last ones of the other."""
        if alpha != 1:
            return None
        for weight, other in ((left, right), (right, left)):
            if (name := self.name(weight)) is not None and _fits(weight, other):
                result = other + weight
                return self.probed(result, Use("scaled", None, name, result.shape), other)
        return None

    def convolution(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                    dilation: Any = 1, groups: int = 1) -> Tensor | None:  # fmt: skip
        """`F.conv1d` and `F.conv2d` in one group, of a batch."""
        if groups != 1 or isinstance(padding, str) or inputs.dim() != weight.dim():
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
        return self.probed(result, Use("convolution", self.name(weight), self.name(bias), result.shape), columns)

    def turn(self, matrix: Tensor, *axes: Any) -> Tensor | None:
        """The transpose of a trained matrix, which may then be multiplied with. (`Tensor.T` comes with its type.)"""
        numbers = {axis % 2 for axis in axes if isinstance(axis, int)}
        if self.name(matrix) is None or matrix.dim() != 2 or numbers not in ({0, 1}, set()):
            return None
        turned = matrix.mT
        self._turned[id(turned)] = (turned, self._names[id(matrix)])
        return turned

    def viewed(self, func: Callable[..., Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
        """A view or a copy of a trained tensor."""
        weight, *rest = args
        name = self.name(weight)
        if name is None or not _is_fixed([*rest, *options.values()]):
            return None

        def view(value: Tensor) -> Tensor:
            return func(value, *rest, **options)

        result = view(weight).clone()  # a network that overwrites it must not overwrite the weight
        seen = f"{func.__name__} {rest} {options}"
        return self.probed(result, Use("view", name, None, result.shape, view=view, seen=seen), result.new_zeros(()))


def _is_fixed(value: object) -> bool:
    """Whether an argument of a view is what its text says, as numbers and names are; tensors and arrays are not."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, tuple | list):
        return all(_is_fixed(each) for each in value)
    names = int | str | torch.dtype | torch.device | torch.memory_format
    return value is None or value is Ellipsis or isinstance(value, names)


@cache
def _signature(handler: _Handler) -> inspect.Signature:
    return inspect.signature(handler)


def _fits(weight: Tensor, other: object) -> bool:
    """Whether a trained tensor is spread over another with at least as many axes, which it does not enlarge."""
    return (
        isinstance(other, Tensor)
        and other.dim() >= weight.dim()
        and other.shape[other.dim() - weight.dim() :] == weight.shape
    )


def _pair(value: Any, above: int | None) -> tuple[int, int]:
    """(vertical, horizontal); `above` is the vertical number of a layer in one dimension."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return (numbers[0] if above is None else above, numbers[-1])


_TURNS: dict[Any, _Handler] = dict.fromkeys(
    (torch.t, Tensor.t, torch.transpose, Tensor.transpose, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
    UseRecorder.turn,
)
_HANDLERS: dict[Any, _Handler] = {
    F.linear: UseRecorder.dense, F.embedding: UseRecorder.table, Tensor.__getitem__: UseRecorder.rows,
    F.layer_norm: UseRecorder.layer_norm, F.rms_norm: UseRecorder.rms_norm, F.group_norm: UseRecorder.group_norm,
    F.conv1d: UseRecorder.convolution, F.conv2d: UseRecorder.convolution,
    torch.addmm: UseRecorder.added_product, Tensor.addmm: UseRecorder.added_product,
    torch.matmul: UseRecorder.matrices, Tensor.matmul: UseRecorder.matrices, Tensor.__matmul__: UseRecorder.matrices,
    torch.mm: UseRecorder.matrices, Tensor.mm: UseRecorder.matrices,
    torch.mul: UseRecorder.multiplied, Tensor.mul: UseRecorder.multiplied, Tensor.__mul__: UseRecorder.multiplied,
    Tensor.__rmul__: UseRecorder.multiplied, torch.add: UseRecorder.added, Tensor.add: UseRecorder.added,
    Tensor.__add__: UseRecorder.added, Tensor.__radd__: UseRecorder.added,
}  # fmt: skip
