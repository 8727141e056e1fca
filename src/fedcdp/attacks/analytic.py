"""Closed-form inversion of a dense first layer: no optimisation, and exact where it works.

The gradient of a layer z = Wx + b over a batch is [dW | db] = Dᵀ[X | 1], where D = dL/dZ has a row for each example. For
one example that is rank one, and x = dWᵀdb / |db|². For a batch followed by a ReLU, SPEAR (Dimitrov et al., "SPEAR: Exact
Gradient Inversion of Batches in Federated Learning", NeurIPS 2024): the rows of D lie in the column space of the gradient
and are zero wherever their example left the ReLU shut, so they are the vectors with uncommonly many zeros in that space.
Nothing is tuned by hand to a dataset: what counts as zero follows from the gradient's own deviation from its rank.

| gradient | result |
| --- | --- |
| of `examples` examples, each the only one active or shut in some unit | exact, `found` |
| of fewer distinct examples (duplicates) | those that are distinct, then zeros; not `found` |
| noised, non-finite or zero; a batch without a ReLU | zeros (one example: the best estimate); not `found` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor, nn

from fedcdp.errors import ModelError

_EXACT = 1e-3  # the largest relative residual of a gradient that is still called exact (float16 has 5e-4)
_PLAUSIBLE = 0.95  # the least consistency of an example that is returned at all
_SOLID = 0.999
_CHUNK = 512  # row subsets tried at a time
_POOL = 64  # sparse directions kept
_LOOSE, _TIGHT = 100.0, 20.0  # times the noise that a zero may measure: before and after the fit to all zeros
_RANK = 10.0  # times the noise that a singular value must exceed
_INDEPENDENT = 1e-3  # the least distance of a unit vector from the span of others


@dataclass(frozen=True)
class Recovered:
    """What the attack found, and how far the attacker can trust it without the truth.

    `inputs` [examples, n] has no NaN, and zeros for every example that was not recovered. `residual` is the share of the
    gradient that no `examples` inputs could explain: about 1e-7 for an untouched float32 gradient, near 1 for a noised one.
    `consistency` is the smallest share, over the examples, of units whose ReLU is open for the recovered input exactly where
    its gradient is not zero; None where it was not judged (one example, or a layer whose weights were not given). `found`
    says that the attacker may take all of `inputs` for exact. With `up_to_scale` each input is a unit vector, to be
    multiplied by a number unknown to the attacker: the layer told no bias gradient.
    """

    inputs: Tensor
    found: bool
    residual: float
    consistency: float | None = None
    up_to_scale: bool = False

    def scaled(self, distance: Callable[[Tensor], float], scales: Iterable[float]) -> Recovered:
        """The same at that one of `scales` (a negative one turns the sign) whose inputs have the least `distance`.

        The distance is the caller's: to the gradient that was seen, say, of the gradient that such inputs would have.
        """
        best = min(scales, key=lambda scale: distance(self.inputs * scale))
        return replace(self, inputs=self.inputs * best, up_to_scale=False)


@dataclass(frozen=True)
class _Factors:
    """The gradient as `left` · diag(values) · `right`, its rows and columns brought to like sizes before.

    D up to scale is left·Q for an unknown Q, and the examples are the rows of Q⁻¹·diag(values)·right.
    """

    left: Tensor  # [m, rank]; zero in the rows of dead units
    values: Tensor
    right: Tensor  # [rank, n + 1], in the gradient's own columns
    noise: float  # what a row of the balanced gradient, of norm 1, owes to rounding

    def zeros(self, directions: Tensor, tolerance: float) -> Tensor:
        """Where each of `directions` [k, rank] vanishes, [k, m]: as rounding would leave it, times `tolerance`."""
        size = (directions / self.values).norm(dim=1, keepdim=True)
        return (directions @ self.left.T).abs() <= tolerance * self.noise * size


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
    """The inputs of a dense layer from its gradient over `examples` of them, in no particular order.

    The layer's own `weight` and `bias`, which whoever serves a model knows, let a batch's reconstruction be judged and
    mended; they are used only as a pair (without bias gradient: if the layer has no bias). At most `tries` subsets of rows
    are looked at, so that time is bounded whatever the gradient. Never raises for a gradient's values.
    """
    parts = [weight_gradient] if bias_gradient is None else [weight_gradient, bias_gradient[:, None]]
    gradient = torch.cat(parts, dim=1).detach().cpu().double()
    features = weight_gradient.shape[1]
    failed = Recovered(weight_gradient.new_zeros(examples, features), False, 1.0, None, bias_gradient is None)
    if not gradient.isfinite().all() or not gradient.any():
        return failed
    layer = None
    if weight is not None and (bias is None) == (bias_gradient is None):
        layer = torch.cat([weight] if bias is None else [weight, bias[:, None]], dim=1).detach().cpu().double()
    if examples == 1:
        rows, residual, consistency, found = *_one_example(gradient, bias_gradient is not None, layer), None, True
    else:
        factors, residual = _factorise(gradient, examples, torch.finfo(weight_gradient.dtype).eps)
        if residual > _EXACT:
            return replace(failed, residual=residual)
        rows, consistency = _batch(factors, bias_gradient is not None, layer, seed, tries)
        found = len(rows) == examples and consistency == 1
    inputs = failed.inputs.clone()
    inputs[: len(rows)] = _normalised(rows, bias_gradient is not None).to(inputs)
    return replace(failed, inputs=inputs, found=found and residual <= _EXACT, residual=residual, consistency=consistency)


def first_dense(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, str | None]:
    """The names of the weight and the bias (None: it has none, or a frozen one) of the layer that sees the example itself.

    The order is that in which the modules are registered; only `Flatten` and `Identity` may stand before.
    """
    leaves = ((name, layer) for name, layer in model.named_modules() if not any(layer.children()))
    name, first = next((each for each in leaves if not isinstance(each[1], nn.Flatten | nn.Identity)), ("", model))
    if not isinstance(first, nn.Linear):
        raise ModelError(f"analytic needs a network whose first layer is dense; this one starts with {type(first).__name__}")
    if first.in_features != math.prod(shape):
        raise ModelError(
            f"analytic needs a first layer that sees the whole example of {math.prod(shape)} numbers; "
            f"this one takes {first.in_features}"
        )
    prefix = f"{name}." if name else ""
    return f"{prefix}weight", f"{prefix}bias" if first.bias is not None and first.bias.requires_grad else None


def _one_example(gradient: Tensor, has_bias: bool, layer: Tensor | None) -> tuple[Tensor, float]:
    """The row [x | 1], up to scale, and the residual: of least squares over all units, or of the closest rank one."""
    if has_bias:
        outer = gradient[:, -1]
        row = outer @ gradient / outer.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    else:
        row = torch.linalg.svd(gradient, full_matrices=False)[2][0]
        # A bias-free ReLU is open where its unit has a gradient, which tells the sign; else that of most data.
        evidence = row if layer is None else (layer @ row)[gradient.any(dim=1)].sign()
        row = row if evidence.sum() >= 0 else -row
        outer = gradient @ row
    return row[None], float((gradient - torch.outer(outer, row)).norm() / gradient.norm())


def _normalised(rows: Tensor, has_bias: bool) -> Tensor:
    """[x | t] as x / t, or without a bias as a unit vector; zeros where that has no sense."""
    if has_bias:
        return (rows[:, :-1] / rows[:, -1:]).nan_to_num(0.0, 0.0, 0.0)
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def _factorise(gradient: Tensor, examples: int, precision: float) -> tuple[_Factors, float]:
    """The factors of the numerical rank, at most `examples`, and the share of the gradient beyond `examples`."""
    # Rounding is relative to each entry, so columns and then rows are brought to norm 1; those of zeros stay.
    columns = gradient.norm(dim=0)
    balanced = gradient / torch.where(columns == 0, 1, columns)
    rows = balanced.norm(dim=1, keepdim=True)
    left, values, right = torch.linalg.svd(balanced / torch.where(rows == 0, 1, rows), full_matrices=False)
    beyond = float(values[examples:].norm())
    noise = precision + beyond / math.sqrt(len(gradient))
    rank = int((values[:examples] > _RANK * noise).sum())
    left = torch.where(rows == 0, 0, left[:, :rank])
    return _Factors(left, values[:rank], right[:rank] * columns, noise), beyond / float(values.norm())


def _batch(factors: _Factors, has_bias: bool, layer: Tensor | None, seed: int, tries: int) -> tuple[Tensor, float | None]:
    """The rows [x | 1], up to scale, one for each of the gradient's ranks or none at all; and their least consistency."""
    generator = torch.Generator().manual_seed(seed)
    rank = len(factors.values)
    basis = factors.values[:, None] * factors.right
    pool, implied = basis.new_zeros(0, rank), basis.new_zeros(0, rank)
    rows, share = basis[:0], None
    for subset in _row_subsets(factors.left.any(dim=1).nonzero()[:, 0], rank - 1, tries, generator):
        kernels = _kernels(factors.left[subset], generator)
        pool, zeros = _sparsest(factors, torch.cat([pool, implied, kernels]))
        chosen = _independent(pool, rank)
        if len(chosen) < rank:
            continue
        if layer is None:
            rows = torch.linalg.inv(pool[chosen].T) @ basis
            continue
        examples, share, shut = _most_consistent(pool, zeros, chosen, basis @ layer.T, basis[:, -1] if has_bias else None)
        rows = examples @ basis
        if (share == 1).all():
            break
        implied = _fitted(factors, shut)[0]
    if share is None:
        return rows, None
    return torch.where((share >= _PLAUSIBLE)[:, None], rows, 0), float(share.min())


def _row_subsets(rows: Tensor, size: int, tries: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Subsets [k, size] of rows in chunks: all of them, or `tries` random ones if there are more."""
    if math.comb(len(rows), size) <= tries:
        subsets = torch.tensor(list(combinations(range(len(rows)), size)), dtype=torch.int64)
        yield from rows[subsets[torch.randperm(len(subsets), generator=generator)]].split(_CHUNK)
        return
    for _ in range(0, tries, _CHUNK):
        yield rows[torch.rand(_CHUNK, len(rows), generator=generator).topk(size).indices]


def _kernels(matrices: Tensor, generator: torch.Generator) -> Tensor:
    """A unit vector that each of `matrices` [k, rank − 1, rank] maps to zero; none for those that have no such."""
    count, _, rank = matrices.shape
    extra = torch.randn(count, 1, rank, generator=generator, dtype=matrices.dtype)
    target = torch.zeros(rank, 1, dtype=matrices.dtype)
    target[-1] = 1
    solved = torch.linalg.solve_ex(torch.cat([matrices, extra], dim=1), target.expand(count, rank, 1)).result[..., 0]
    unit = solved / solved.norm(dim=1, keepdim=True)
    return unit[unit.isfinite().all(dim=1)]


def _fitted(factors: _Factors, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """The directions that vanish at `zeros` [k, m] where there is just one; and whether any one zero could be left out."""
    rows = zeros[:, :, None] * factors.left
    eigenvalues, vectors = torch.linalg.eigh(rows.mT @ rows)
    single = (eigenvalues[:, 1:2] > (_LOOSE * factors.noise / factors.values[-1]) ** 2).all(dim=1)
    leverage = ((rows @ vectors[..., 1:]).square() / eigenvalues[:, None, 1:]).sum(dim=2).amax(dim=1)
    return vectors[single, :, 0], (leverage < _SOLID)[single]


def _sparsest(factors: _Factors, directions: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ones of `directions` with the most zeros, sparsest first, each fitted to all of its zeros; and those."""
    for tolerance in (_LOOSE, _TIGHT):
        zeros = factors.zeros(directions, tolerance)
        zeros = torch.unique(zeros[zeros.sum(dim=1) > len(factors.values)], dim=0)
        directions, solid = _fitted(factors, zeros)
    zeros = factors.zeros(directions, _TIGHT)
    order = (zeros.sum(dim=1) + len(factors.left) * solid).argsort(descending=True, stable=True)[:_POOL]
    return directions[order], zeros[order]


def _independent(directions: Tensor, rank: int) -> list[int]:
    """The first directions, `rank` at most, that are linearly independent of those before."""
    chosen: list[int] = []
    basis = directions.new_zeros(0, directions.shape[1])
    for index, direction in enumerate(directions):
        rest = direction - basis.T @ (basis @ direction)
        if rest.norm() > _INDEPENDENT and len(chosen) < rank:
            chosen.append(index)
            basis = torch.cat([basis, rest[None] / rest.norm()])
    return chosen


def _most_consistent(
    pool: Tensor, zeros: Tensor, chosen: list[int], outputs: Tensor, ones: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The choice that no exchange of one direction makes more consistent, and each example's consistency.

    `outputs` [rank, m] and `ones` [rank] are what the layer and the bias make of the basis of the examples.
    """

    def judged(choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        examples, singular = torch.linalg.inv_ex(pool[choices].mT)
        shut = examples @ outputs <= 0
        share = (shut == zeros[choices]).double().mean(dim=-1)
        turned = share < 0.5 if ones is None else examples @ ones < 0
        return examples, torch.where(turned, 1 - share, share) * (singular == 0)[..., None], shut ^ turned[..., None]

    best = torch.tensor(chosen)
    examples, share, shut = judged(best)
    while True:
        swaps = best.repeat(len(best), len(pool), 1)
        for place in range(len(best)):
            swaps[place, :, place] = torch.arange(len(pool))
        swaps = swaps.flatten(0, 1)
        other = judged(swaps)
        winner = other[1].mean(dim=1).argmax()
        if other[1][winner].mean() <= share.mean():
            return examples, share, shut
        best, examples, share, shut = swaps[winner], *(each[winner] for each in other)
