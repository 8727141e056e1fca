"""Closed-form inversion of a dense first layer: no optimisation, and exact where it works.

Over a batch, the gradient of a layer z = Wx + b is [dW | db] = Dᵀ[X | 1], where D = dL/dZ has one row an example. Of one
example that is rank one, and x = dWᵀdb / |db|². Of a batch before a ReLU, SPEAR (Dimitrov et al., "SPEAR: Exact Gradient
Inversion of Batches in Federated Learning", NeurIPS 2024) finds D: its rows lie in the gradient's column space and are zero
wherever their example shuts the ReLU, so they are the directions with uncommonly many zeros. Beyond the paper, what counts
as zero follows from the gradient's own rounding, and examples correct the directions that they were found by (`implied`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedcdp.errors import ModelError

_EXACT = 1e-3  # the largest residual of a gradient that is called exact
_RANK = 10.0  # a singular value counts from so many times the rounding,
_LOOSE, _TIGHT = 100.0, 20.0  # and an entry is zero up to so many: before and after its direction is fitted to all zeros
_CHUNK, _POOL = 512, 64  # subsets of rows looked at between two attempts, and directions kept for the next


@dataclass(frozen=True)
class Recovered:
    """The examples as recovered, and how far the attacker may trust them without knowing the truth.

    `inputs` [examples, n] are finite, best guesses unless `found`, and zero where there is not even a guess. `residual` is
    the share of the gradient that no `examples` inputs explain: 1e-7 for a float32 gradient as computed, near 1 with noise.
    `consistency` is the smallest share, over the examples, of units that the example opens just where its gradient is not
    zero; None if not judged: for one example, and without the layer's weights. `found`: the residual is rounding and, for a
    batch, the consistency 1. With `up_to_scale` (no bias gradient) the inputs are unit vectors of unknown length.
    """

    inputs: Tensor
    found: bool
    residual: float
    consistency: float | None
    up_to_scale: bool

    def scaled(self, distance: Callable[[Tensor], float], scales: Iterable[float]) -> Recovered:
        """The same, times the one of `scales` whose inputs have the least `distance`: the caller's, to the gradient say."""
        best = min(scales, key=lambda scale: distance(self.inputs * scale))
        return replace(self, inputs=self.inputs * best, up_to_scale=False)


def first_dense(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, str | None]:
    """The names of the weight and bias (None without a trainable one) of the dense layer that sees the example itself.

    The order is that in which the modules are registered; only `Flatten` and `Identity` may stand before.
    """
    leaves = ((name, module) for name, module in model.named_modules() if next(module.children(), None) is None)
    name, first = next((leaf for leaf in leaves if not isinstance(leaf[1], nn.Flatten | nn.Identity)), ("", model))
    needs = "analytic needs a network whose first layer is dense"
    if not isinstance(first, nn.Linear):
        raise ModelError(f"{needs}; this one starts with {type(first).__name__}")
    if first.in_features != math.prod(shape) or not first.weight.requires_grad:
        raise ModelError(f"{needs}, trainable and over all {math.prod(shape)} inputs; this one starts with {first}")
    prefix = f"{name}." if name else ""
    return f"{prefix}weight", f"{prefix}bias" if first.bias is not None and first.bias.requires_grad else None


def invert_dense(
    weight_gradient: Tensor,
    bias_gradient: Tensor | None,
    examples: int,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    seed: int = 0,
    tries: int = 20_000,
) -> Recovered:
    """The inputs of a dense layer, in no particular order, from its gradient over `examples` of them.

    `weight` and `bias` are the layer's own, which whoever serves the model knows; they make a batch surer and let it be
    judged, and are used if there is a bias just when there is its gradient. At most `tries` subsets of rows are looked at,
    so that time is bounded for any gradient; none raises an error.
    """
    has_bias = bias_gradient is not None
    gradient = _augmented(weight_gradient, bias_gradient)
    inputs = weight_gradient.new_zeros(examples, weight_gradient.shape[1])
    nothing = Recovered(inputs, False, 1.0, None, not has_bias)
    if not gradient.isfinite().all() or not gradient.any():
        return nothing
    gradient = gradient / gradient.abs().max()
    layer = None if weight is None or (bias is None) == has_bias else _augmented(weight, bias)
    if examples == 1:
        rows, residual = _one_example(gradient, has_bias, layer)
        consistency, found = None, residual <= _EXACT
    else:
        factors, residual = _factorise(gradient, examples, torch.finfo(weight_gradient.dtype).eps)
        if residual > _EXACT:
            return replace(nothing, residual=residual)
        rows, consistency = _batch(factors, has_bias, layer, seed, tries)
        found = len(rows) == examples and consistency == 1
    scale = rows[:, -1:] if has_bias else rows.norm(dim=1, keepdim=True)
    inputs[: len(rows)] = (rows[:, : inputs.shape[1]] / scale).to(inputs).nan_to_num(0.0, 0.0, 0.0)
    return replace(nothing, found=found, residual=residual, consistency=consistency)


def _augmented(matrix: Tensor, column: Tensor | None) -> Tensor:
    return torch.cat([matrix] if column is None else [matrix, column[:, None]], dim=1).detach().cpu().double()


def _one_example(gradient: Tensor, has_bias: bool, layer: Tensor | None) -> tuple[Tensor, float]:
    """[x | 1] by least squares over all units, or x up to scale as the closest rank one; and the residual."""
    if has_bias:
        outer = gradient[:, -1]
        row = outer @ gradient / outer.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    else:
        row = torch.linalg.svd(gradient, full_matrices=False).Vh[0]
        # Units without bias that have a gradient are open, which tells the sign; without weights, most data are positive.
        evidence = row if layer is None else (layer @ row)[gradient.any(dim=1)].sign()
        row = row if evidence.sum() >= 0 else -row
        outer = gradient @ row
    return row[None], float((gradient - torch.outer(outer, row)).norm() / gradient.norm())


@dataclass(frozen=True)
class _Factors:
    """A batch's gradient: up to scale D = (`left` Q)ᵀ and the examples [x | 1] are the rows of Q⁻¹ `basis`.

    Q is unknown; a column of it is called a direction.
    """

    left: Tensor  # [m, rank], orthonormal columns; zero for dead units
    values: Tensor  # [rank], the singular values
    basis: Tensor  # [rank, n + 1]
    rounding: float  # of a row of `left` · diag(`values`), which has norm 1

    def zeros(self, directions: Tensor, tolerance: float) -> Tensor:
        """Where `directions` [k, rank] vanish, [k, m], up to `tolerance` times the rounding."""
        size: Tensor = (directions / self.values).norm(dim=1, keepdim=True)
        return (directions @ self.left.T).abs() <= tolerance * self.rounding * size

    def fitted(self, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """The directions that vanish at `zeros` [k, m], where those leave just one; and if it stands without any of them."""
        rows = zeros[:, :, None] * self.left
        eigenvalues, vectors = torch.linalg.eigh(rows.mT @ rows)
        single = (eigenvalues[:, 1:2] > (_LOOSE * self.rounding / self.values[-1]) ** 2).all(dim=1)
        leverage = ((rows @ vectors[..., 1:]).square() / eigenvalues[:, None, 1:]).sum(dim=2).amax(dim=1)
        return vectors[single, :, 0], leverage[single] < 0.999


def _factorise(gradient: Tensor, examples: int, precision: float) -> tuple[_Factors, float]:
    """The factors, of the numerical rank but at most `examples`; and the share of the gradient beyond `examples`."""
    # Rounding is relative to an entry's size: with columns, then rows of norm 1 it is alike for all.
    columns = gradient.norm(dim=0)
    balanced = gradient / torch.where(columns == 0, 1, columns)
    rows = balanced.norm(dim=1, keepdim=True)
    left, values, right = torch.linalg.svd(balanced / torch.where(rows == 0, 1, rows), full_matrices=False)
    beyond = float(values[examples:].norm())
    rounding = precision + beyond / math.sqrt(len(gradient))
    rank = int((values[:examples] > _RANK * rounding).sum())
    basis = values[:rank, None] * right[:rank] * columns
    return _Factors(left[:, :rank] * (rows > 0), values[:rank], basis, rounding), beyond / float(values.norm())


def _batch(factors: _Factors, has_bias: bool, layer: Tensor | None, seed: int, tries: int) -> tuple[Tensor, float | None]:
    """The examples [x | 1] up to scale, one for each of the gradient's ranks or none; and the least consistency."""
    rank, basis, consistency = len(factors.basis), factors.basis, None
    rows, pool, implied = basis[:0], basis.new_empty(0, rank), basis.new_empty(0, rank)
    alive = factors.left[factors.left.any(dim=1)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(0, min(tries, math.comb(len(alive), rank - 1)), _CHUNK):
        subsets = alive[torch.rand(_CHUNK, len(alive), generator=generator).topk(rank - 1).indices]
        kernels = torch.linalg.qr(subsets.mT, mode="complete").Q[:, :, -1]
        pool, zeros = _sparsest(factors, torch.cat([pool, implied, kernels]))
        chosen = _independent(pool)
        if len(chosen) == rank and layer is None:
            rows = torch.linalg.inv(pool[chosen].T) @ basis
        elif len(chosen) == rank and layer is not None:
            outputs = basis @ layer.T
            examples, shares = _improved(pool, zeros, chosen, outputs, basis[:, -1] if has_bias else None)
            rows, consistency = examples @ basis, float(shares.min())
            if consistency == 1:
                break
            # An example is right as soon as all other directions are: then the units that it shuts give its own.
            implied = factors.fitted(examples @ outputs <= 0)[0]
    return rows, consistency


def _sparsest(factors: _Factors, directions: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct directions with the most zeros, sparsest first, each fitted to all of its zeros; and those zeros."""
    for tolerance in (_LOOSE, _TIGHT):
        zeros = factors.zeros(directions, tolerance)
        # Any direction can have rank − 1 zeros, and one more by chance.
        directions, solid = factors.fitted(torch.unique(zeros[zeros.sum(dim=1) > len(factors.basis)], dim=0))
    zeros = factors.zeros(directions, _TIGHT)
    # A mixture of two examples vanishes where both do and in any one unit besides; as it stands on that one, it comes last.
    order = (zeros.sum(dim=1) + len(factors.left) * solid).argsort(descending=True, stable=True)[:_POOL]
    return directions[order], zeros[order]


def _independent(directions: Tensor) -> list[int]:
    """The first directions that are linearly independent of those before."""
    chosen: list[int] = []
    for index in range(len(directions)):
        if len(chosen) < directions.shape[1] and torch.linalg.svdvals(directions[[*chosen, index]])[-1] > 1e-3:
            chosen.append(index)
    return chosen


def _improved(pool: Tensor, zeros: Tensor, chosen: list[int], outputs: Tensor, ones: Tensor | None) -> tuple[Tensor, Tensor]:
    """The examples in the basis, and the consistency of each, once no exchange of one direction improves the mean.

    `outputs` [rank, m] and `ones` [rank] are the layer's outputs and the bias's input for the basis.
    """

    def judge(choices: Tensor) -> tuple[Tensor, Tensor]:
        examples, singular = torch.linalg.inv_ex(pool[choices].mT)
        shares = ((examples @ outputs <= 0) == zeros[choices]).double().mean(dim=-1)
        turned = shares < 0.5 if ones is None else examples @ ones < 0
        shares = torch.where(turned, 1 - shares, shares) * (singular == 0)[..., None]
        return torch.where(turned[..., None], -examples, examples), shares

    best, score = torch.tensor(chosen), -1.0
    while True:
        swaps = best.repeat(len(best), len(pool), 1)
        swaps.diagonal(dim1=0, dim2=2)[:] = torch.arange(len(pool))[:, None]
        scores = judge(swaps)[1].mean(dim=2).flatten()
        if float(scores.max()) <= score:
            return judge(best)
        best, score = swaps.flatten(0, 1)[scores.argmax()], float(scores.max())
