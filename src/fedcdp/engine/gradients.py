"""The gradients of one layer, one for each client and example, in the cheapest form.

A linear layer's gradient is an outer product of two vectors, and a convolution's is a sum of such products over the
positions of its kernel. The quantities that a method needs (norms, weighted sums over the examples) can often be computed
from the factors, without ever holding the gradients themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcdp.mechanism.clipping import at_least_float32


class Gradients(ABC):
    """The gradients of one tensor [clients, examples, ...], held in some form."""

    name: str

    @abstractmethod
    def formed(self) -> Tensor:
        """The gradients themselves [clients, examples, ...]."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """The squared L2 norm of each gradient [clients, examples], in float32 (float64 for float64 gradients): infinite
        or NaN if any value is not finite.

        Guarantees: it falls short of the true norm by at most a rounding error, so clipping by it respects the bound.
        """

    @abstractmethod
    def summed(self) -> Tensor:
        """The sum over the examples [clients, ...]."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor, usable: Tensor) -> Tensor:
        """The sum over the `usable` examples, each scaled by its factor; other examples add nothing, not even a NaN."""

    def ready_to_clip(self) -> Gradients:
        """The same gradients, in a form that gives both norms and weighted sums without repeated work."""
        return self

    @abstractmethod
    def in_float64(self, clients: slice) -> Gradients:
        """The gradients of some clients in float64, in which norms and weighted sums are then computed."""

    @property
    @abstractmethod
    def held(self) -> int:
        """How many values are held for each client."""


Shape = Callable[[Tensor], Tensor]


def _as_it_is(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Formed(Gradients):
    """Gradients held one by one [clients, examples, ...]; `shape` gives their trailing axes the tensor's shape."""

    name: str
    values: Tensor
    shape: Shape = _as_it_is

    def formed(self) -> Tensor:
        """See `Gradients`."""
        return self.shape(self.values)

    def squared_norms(self) -> Tensor:
        """See `Gradients`. A plain sum adds pairwise (`clipping.group_norms` says why that matters)."""
        return at_least_float32(self.values.reshape(*self.values.shape[:2], -1)).square().sum(-1)

    def summed(self) -> Tensor:
        """See `Gradients`."""
        return self.shape(self.values.sum(1)).contiguous()

    def weighted_sum(self, factors: Tensor, usable: Tensor) -> Tensor:
        """See `Gradients`."""
        rows = finite_or_zero(self.values, usable).reshape(*self.values.shape[:2], -1)
        column = kept(factors, usable, self.values)
        total = (column[..., None] * rows).sum(1) if _value_by_value(rows) else column[:, None] @ rows
        return self.shape(total.view(self.values.shape[:1] + self.values.shape[2:])).contiguous()

    def in_float64(self, clients: slice) -> Formed:
        """See `Gradients`."""
        return replace(self, values=self.values[clients].double())

    @property
    def held(self) -> int:
        """See `Gradients`."""
        return self.values[0].numel()


@dataclass(frozen=True)
class Products(Gradients):
    """Gradients that are sums of outer products, Σ_p a_p ⊗ b_p over positions p, in one or several groups of channels.

    `left` and `right` are [clients, groups, examples, positions, values]: the derivative with respect to a layer's outputs
    and the layer's inputs, or the reverse. `shape` turns [..., groups, left values, right values] into the tensor's shape.

    With one position, a group's norm is |a|·|b|. With several, Σ_pq (a_p·a_q)(b_p·b_q) would also avoid forming the
    gradients, but its terms cancel, and rounding errors of the large terms can make a small norm too small. The gradients
    are formed instead.
    """

    name: str
    left: Tensor
    right: Tensor
    shape: Shape

    def formed(self) -> Tensor:
        """See `Gradients`."""
        return self._formed().formed()

    def squared_norms(self) -> Tensor:
        """See `Gradients`."""
        if self.left.shape[3] > 1:
            return self._formed().squared_norms()
        # In float64 no square overflows or underflows: one factor may be tiny where the other is huge.
        left, right = (_squared(value) for value in (self.left, self.right))
        total = (left * right).sum(1)
        return total if self.left.dtype == torch.float64 else total.float()

    def summed(self) -> Tensor:
        """See `Gradients`. One product over all examples and positions."""
        return self.shape(self.left.flatten(2, 3).mT @ self.right.flatten(2, 3)).contiguous()

    def weighted_sum(self, factors: Tensor, usable: Tensor) -> Tensor:
        """See `Gradients`. One product over all examples and positions."""
        column = kept(factors, usable, self.left)[:, None, :, None, None]
        if _value_by_value(self.left):
            left, right = (finite_or_zero(value, usable).flatten(2, 3) for value in (self.left * column, self.right))
            return self.shape((left[..., None] * right[..., None, :]).sum(2)).contiguous()
        left, right = finite_or_zero(self.left, usable) * column, finite_or_zero(self.right, usable)
        return Products(self.name, left, right, self.shape).summed()

    def ready_to_clip(self) -> Gradients:
        """See `Gradients`."""
        return self if self.left.shape[3] == 1 else self._formed()

    def in_float64(self, clients: slice) -> Products:
        """See `Gradients`."""
        return replace(self, left=self.left[clients].double(), right=self.right[clients].double())

    @property
    def held(self) -> int:
        """See `Gradients`."""
        return self.left[0].numel() + self.right[0].numel()

    def _formed(self) -> Formed:
        return Formed(self.name, (self.left.mT @ self.right).transpose(1, 2), self.shape)


def _squared(factors: Tensor) -> Tensor:
    """The squared norms [clients, groups, examples] of factors, in float64, without a copy of the factors in it."""
    norms: Tensor = torch.linalg.vector_norm(factors, dim=(3, 4), dtype=torch.float64)
    return norms.square()


def _value_by_value(values: Tensor) -> bool:
    """Whether a sum of clipped gradients is computed elementwise rather than as a matrix product.

    A compiler fuses the elementwise sum with the operations that follow. And where products may be rounded (tf32), this one
    must not be: a gradient rounded up would exceed the clip bound. Products in float64 are never rounded so.
    """
    if torch.compiler.is_compiling():
        return True
    return values.dtype != torch.float64 and torch.get_float32_matmul_precision() != "highest"


def kept(factors: Tensor, usable: Tensor, like: Tensor) -> Tensor:
    """The factors, zero for an example that is not usable."""
    return torch.where(usable, factors, 0.0).to(like.dtype)


def finite_or_zero(values: Tensor, usable: Tensor) -> Tensor:
    """The values with zero for NaN and infinities, which a factor of zero would not cancel. Usable examples have none."""
    if values.device.type == "cpu" and not torch.compiler.is_compiling() and bool(usable.all()):
        return values  # a copy would take a tenth of a round; to ask would make a GPU wait
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
