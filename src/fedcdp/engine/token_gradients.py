"""Gradients of layers that read every token of a sequence: norms from inner products of tokens, where that is cheaper.

The gradient of a dense layer is Σ_p a_p ⊗ b_p over the tokens p, with ‖·‖² = Σ_pq (a_p·a_q)(b_p·b_q) (ghost norms: Li et
al. 2022, Bu et al. 2023). The sum is over tokens, so it is cheap where the sequence is shorter than the layer is wide. Its
terms may cancel: crafted weights can give a short gradient tokens as long as they like. Norms are therefore added in
float64, with a bound on their rounding errors added to the result.

The sum of clipped gradients has the same terms, of all examples. In float32, long terms of one example would round away
what the others add before they cancel: the example would change the sum by more than the bound. The sum is added in float64
as well, where the norm's rounding bound keeps the terms short enough. Tokens of one word add up within their example.

Guarantees: a norm falls short of the true one by at most the rounding error of its own float32 value. So clipping by it
respects the bound, and an example changes the sum by no more, up to the rounding of the sum itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcdp.engine.gradients import Gradients, Products, finite_or_zero, kept
from fedcdp.mechanism.clipping import at_least_float32

_PRICE_OF_FLOAT64 = 4  # on a CPU; on a GPU, memory counts more than multiplications
_ROUNDING = 4 * 2.0**-53  # of a sum of n products in float64, for each of its n terms


@dataclass(frozen=True)
class TokenProducts(Products):
    """Gradients of a dense layer, with one group of channels: [clients, 1, examples, tokens, values]."""

    def squared_norms(self) -> Tensor:
        """See `Gradients`."""
        if not self._by_tokens:
            return super().squared_norms()
        left, right = self.left.double(), self.right.double()
        inner = (left @ left.mT) * (right @ right.mT)
        sizes = left.square().sum(-1).sqrt() * right.square().sum(-1).sqrt()
        terms = left.shape[-1] + right.shape[-1] + left.shape[-2] ** 2
        return _safe(inner.sum((1, 3, 4)), sizes.sum((1, 3)), terms, self.left.dtype)

    def weighted_sum(self, factors: Tensor, usable: Tensor) -> Tensor:
        """See `Gradients`. In float64: the terms of one example must not round away those of another."""
        left, right = (finite_or_zero(each.double(), usable) for each in (self.left, self.right))
        column = kept(factors, usable, left)[:, None, :, None, None]
        return replace(self, left=left * column, right=right).summed().to(self.left.dtype)

    def ready_to_clip(self) -> Gradients:
        """See `Gradients`."""
        return self if self._by_tokens else super().ready_to_clip()

    @property
    def _by_tokens(self) -> bool:
        """Whether the T² (a + b) multiplications of the norm cost less than the T·a·b that form the gradient."""
        tokens, outputs, inputs = self.left.shape[3], self.left.shape[4], self.right.shape[4]
        price = _PRICE_OF_FLOAT64 if self.left.device.type == "cpu" else 1
        return tokens > 1 and price * tokens * (outputs + inputs) < outputs * inputs


@dataclass(frozen=True)
class TokenRows(Gradients):
    """Gradients of an embedding: `values` [clients, examples, tokens, width] belong to the rows `numbers` of a table."""

    name: str
    numbers: Tensor
    """[clients, examples, tokens]."""
    values: Tensor
    rows: int
    """The number of rows of the table."""

    def formed(self) -> Tensor:
        """See `Gradients`."""
        clients, examples, _, width = self.values.shape
        found = self.values.new_zeros(clients, examples, self.rows, width)
        return found.scatter_add_(2, self.numbers[..., None].expand_as(self.values), self.values)

    def squared_norms(self) -> Tensor:
        """See `Gradients`."""
        return self.ready_to_clip().squared_norms()

    def summed(self) -> Tensor:
        """See `Gradients`."""
        clients, _, _, width = self.values.shape
        found = self.values.new_zeros(clients, self.rows, width)
        values = self.values.flatten(1, 2)
        return found.scatter_add_(1, self.numbers.flatten(1)[..., None].expand_as(values), values)

    def weighted_sum(self, factors: Tensor, usable: Tensor) -> Tensor:
        """See `Gradients`."""
        return self.ready_to_clip().weighted_sum(factors, usable)

    def ready_to_clip(self) -> Gradients:
        """See `Gradients`. Tokens of an example with the same number are added up, at the first of them."""
        same = self.numbers[..., :, None] == self.numbers[..., None, :]
        first = ~same.tril(-1).any(-1)
        values = torch.where(first[..., None], same.to(self.values.dtype) @ self.values, 0.0)
        return DistinctRows(self.name, self.numbers, values, self.rows)

    def in_float64(self, clients: slice) -> TokenRows:
        """See `Gradients`."""
        return replace(self, numbers=self.numbers[clients], values=self.values[clients].double())

    @property
    def held(self) -> int:
        """See `Gradients`."""
        return self.values[0].numel()


@dataclass(frozen=True)
class DistinctRows(TokenRows):
    """Gradients of an embedding in which at most one token of an example adds to a row: the others are zero."""

    def squared_norms(self) -> Tensor:
        """See `Gradients`."""
        return at_least_float32(self.values.flatten(2)).square().sum(-1)

    def weighted_sum(self, factors: Tensor, usable: Tensor) -> Tensor:
        """See `Gradients`."""
        column = kept(factors, usable, self.values)[..., None, None]
        return replace(self, values=finite_or_zero(self.values, usable) * column).summed()

    def ready_to_clip(self) -> Gradients:
        """See `Gradients`."""
        return self


def _safe(squares: Tensor, sizes: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """Squared norms that are sums of inner products, plus a bound on the rounding errors of these sums.

    `sizes` is Σ_p ‖a_p‖‖b_p‖: no sum of absolute values of the terms is larger than its square. An error is at most one unit
    of rounding for each of the `terms` that are added up: the values of both tokens, and the pairs of tokens.
    """
    total = squares.clamp(min=0.0) + _ROUNDING * terms * sizes.square()
    total = torch.where(torch.isfinite(squares), total, squares)
    return total if dtype == torch.float64 else total.float()
