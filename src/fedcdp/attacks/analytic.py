"""Analytic attack: closed-form inversion of a dense first layer. It needs no optimisation and is exact if it succeeds.

Over a batch, the gradient of a layer z = Wx + b is [dW | db] = Dᵀ[X | 1], where D = dL/dZ has one row per example.

- One example: x = dWᵀdb / |db|².
- A batch in front of a ReLU: SPEAR (Dimitrov et al., "SPEAR: Exact Gradient Inversion of Batches in Federated Learning",
  NeurIPS 2024) finds D. Its rows lie in the gradient's column space and are zero where their example closes the ReLU, so
  they are the directions with unusually many zeros. Two things go beyond the paper: the gradient's own error decides what
  counts as zero, and recovered examples correct the directions that led to them. Batches of more than 16 examples are not
  tried.

`invert_dense` recovers the examples from one gradient; `invert` runs it on captured victims, like any other attack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.labels import LabelRule, infer_labels, refine_labels
from fedcdp.attacks.objectives import Objective, predicted
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.recipe import Seed
from fedcdp.attacks.reconstruct import Progress, Reconstruction
from fedcdp.attacks.targets import has_classes, solve_targets
from fedcdp.data.dataset import Dataset
from fedcdp.errors import ModelError
from fedcdp.models.features import Standardised
from fedcdp.models.networks import scaling_of

_EXACT = 1e-3  # largest residual of a gradient that counts as exact
_RANK, _LOOSE, _TIGHT = 10.0, 100.0, 20.0  # times the rounding: least singular value; zeros before and after a first fit
_CHUNK, _POOL, _LARGEST = 512, 64, 16  # row subsets between two attempts; directions kept; maximum number of examples


@dataclass(frozen=True)
class Recovered:
    """The recovered examples, and how far the adversary can trust them without knowing the ground truth."""

    inputs: Tensor  # [examples, n], finite: best guesses unless found, zero if there is no guess
    found: bool  # the residual is at rounding level and, for a batch, the consistency is 1
    residual: float  # share of the gradient that no `examples` inputs explain: 1e-7 in float32, near 1 with noise
    consistency: float | None  # for a batch with given weights: the worst example's share of units that are open as D says
    up_to_scale: bool  # without a bias gradient the inputs are unit vectors, of unknown length


def first_dense(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, str | None]:
    """The names of the weight and the bias (None if no bias is trained) of the dense layer that receives the example: the
    first registered module other than `Flatten`, `Identity` and the layer that standardises inputs."""
    free, scaling = (nn.Flatten, nn.Identity), scaling_of(model)
    leaves = ((name, module) for name, module in model.named_modules() if next(module.children(), None) is None)
    passed = (leaf for leaf in leaves if not isinstance(leaf[1], free) and leaf[1] is not scaling)
    name, first = next(passed, ("", model))
    needs = "analytic needs a network whose first layer is dense"
    if not isinstance(first, nn.Linear):
        raise ModelError(f"{needs}; this one starts with {type(first).__name__}")
    if first.in_features != math.prod(shape) or not first.weight.requires_grad:
        raise ModelError(f"{needs}, trainable and over all {math.prod(shape)} inputs; this one starts with {first}")
    has_bias = first.bias is not None and first.bias.requires_grad
    return f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".") if has_bias else None


def invert_dense(
    weight_gradient: Tensor, bias_gradient: Tensor | None, examples: int, *,
    weight: Tensor | None = None, bias: Tensor | None = None, seed: int = 0, tries: int = 20_000,
) -> Recovered:  # fmt: skip
    """Recover the inputs of a dense layer, in no particular order, from its gradient over `examples` inputs.

    `weight` and `bias` are the layer's own, known to any party that serves the model. They make the inversion of a batch
    more reliable and let it be checked. They are used only if the bias is given exactly when its gradient is. At most
    `tries` subsets of rows are examined, so the running time is bounded for every gradient, and no gradient raises an error.
    """
    has_bias = bias_gradient is not None
    gradient = _augmented(weight_gradient, bias_gradient)
    inputs = weight_gradient.new_zeros(examples, weight_gradient.shape[1])
    nothing = Recovered(inputs, False, 1.0, None, not has_bias)
    if examples < 1 or not gradient.isfinite().all() or not gradient.any():
        return nothing
    gradient = gradient / gradient.abs().max()
    layer = None if weight is None or (bias is None) == has_bias else _augmented(weight, bias)
    if examples == 1:
        rows, residual, consistency = *_one_example(gradient, has_bias, layer), None
    else:
        factors, residual = _factorise(gradient, examples, torch.finfo(weight_gradient.dtype).eps)
        hopeful = residual <= _EXACT and examples <= _LARGEST
        rows, consistency = _batch(factors, has_bias, layer, seed, tries) if hopeful else (gradient[:0], None)
    found = residual <= _EXACT and len(rows) == examples and (examples == 1 or consistency == 1)
    scale = rows[:, -1:] if has_bias else rows.norm(dim=1, keepdim=True)
    inputs[: len(rows)] = (rows[:, : inputs.shape[1]] / scale).to(inputs).nan_to_num(0.0, 0.0, 0.0)
    return replace(nothing, found=found, residual=residual, consistency=consistency)


def _augmented(matrix: Tensor, column: Tensor | None) -> Tensor:
    return torch.cat([matrix] if column is None else [matrix, column[:, None]], dim=1).detach().cpu().double()


def _one_example(gradient: Tensor, has_bias: bool, layer: Tensor | None) -> tuple[Tensor, float]:
    """[x | 1] up to scale by least squares over all units, or x up to scale as the closest rank one; and the residual."""
    if has_bias:
        row = gradient[:, -1] @ gradient
    else:
        row = torch.linalg.svd(gradient, full_matrices=False).Vh[0]
        # Units without bias that have a gradient are open, which determines the sign; without weights, assume positive data.
        evidence = row if layer is None else (layer @ row)[gradient.any(dim=1)].sign()
        row = row if evidence.sum() >= 0 else -row
    row = nn.functional.normalize(row, dim=0)
    return row[None], float((gradient - torch.outer(gradient @ row, row)).norm() / gradient.norm())


@dataclass(frozen=True)
class _Factors:
    """A batch's gradient: up to scale D = (left Q)ᵀ and [X | 1] = Q⁻¹ basis. Each column of the unknown Q is a direction."""

    left: Tensor  # [m, rank], orthonormal columns; zero for dead units
    values: Tensor  # [rank], the singular values
    basis: Tensor  # [rank, n + 1]
    rounding: float  # the error of a row of left · diag(values)


def _factorise(gradient: Tensor, examples: int, precision: float) -> tuple[_Factors, float]:
    """The factors, of the numerical rank but at most `examples`; and the share of the gradient beyond rank `examples`."""
    alive, one = gradient.any(dim=1, keepdim=True), gradient.new_ones(())
    norms = gradient.norm(dim=0).where(gradient.any(dim=0), one)
    # Rounding is relative to an entry: it is uniform once columns, then rows have norm 1. Other noise is uniform unscaled.
    for columns, rows in ((norms, (gradient / norms).norm(dim=1, keepdim=True).where(alive, one)), (one, one)):
        left, values, right = torch.linalg.svd(gradient / columns / rows, full_matrices=False)
        residual = float(values[examples:].norm() / values.norm())
        if residual <= 2 * precision:
            break
    rounding = (residual + precision) * float(values.norm()) / math.sqrt(len(gradient))
    rank = int((values[:examples] > _RANK * rounding).sum())
    basis = values[:rank, None] * right[:rank] * columns
    return _Factors(left[:, :rank] * alive, values[:rank], basis, rounding), residual


def _batch(factors: _Factors, has_bias: bool, layer: Tensor | None, seed: int, tries: int) -> tuple[Tensor, float | None]:
    """The examples [x | 1] up to scale, one per rank of the gradient or none; and the least consistency."""
    rank, basis, alive = len(factors.basis), factors.basis, factors.left[factors.left.any(dim=1)]
    rows, pool, consistency = basis[:0], basis.new_empty(0, rank), None
    shut, generator = basis.new_empty(0, len(factors.left), dtype=torch.bool), torch.Generator().manual_seed(seed)
    for _ in range(0, min(tries, math.comb(len(alive), rank - 1)), _CHUNK):
        subsets = alive[torch.rand(_CHUNK, len(alive), generator=generator).topk(rank - 1).indices]
        kernels = torch.linalg.qr(subsets.mT, mode="complete").Q[:, :, -1]
        pool, zeros = _sparsest(factors, torch.cat([pool, kernels]), shut)
        chosen = _independent(pool)
        if len(chosen) == rank and layer is None:
            rows = torch.linalg.inv(pool[chosen].T) @ basis
        elif len(chosen) == rank and layer is not None:
            outputs = basis @ layer.T
            examples, shares = _improved(pool, zeros, chosen, outputs, basis[:, -1] if has_bias else None)
            rows, consistency = examples @ basis, float(shares.min())
            if consistency == 1:
                break
            shut = examples @ outputs <= 0  # correct once all other directions are; then it yields the example's own
    return rows, consistency


def _sparsest(factors: _Factors, directions: Tensor, shut: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct directions with the most zeros, sparsest first, each fitted to all of its zeros; and those zeros."""

    def vanish(tolerance: float) -> Tensor:
        size: Tensor = (directions / factors.values).norm(dim=1, keepdim=True)
        return (directions @ factors.left.T).abs() <= tolerance * factors.rounding * size

    for tolerance in (_LOOSE, _TIGHT):
        zeros = torch.cat([vanish(tolerance), shut])
        # Require one more zero than a direction may have by chance and, at the end, enough zeros to determine the direction.
        rows = torch.unique(zeros[zeros.sum(dim=1) > len(factors.basis)], dim=0)[:, :, None] * factors.left
        eigenvalues, vectors = torch.linalg.eigh(rows.mT @ rows)
        single = (eigenvalues[:, 1:2] > (_LOOSE * factors.rounding / factors.values[-1]) ** 2).all(dim=1)
        leverage = ((rows @ vectors[..., 1:]).square() / eigenvalues[:, None, 1:]).sum(dim=2).amax(dim=1)
        directions, solid = vectors[single, :, 0], leverage[single] < 0.999
    zeros = vanish(_TIGHT)
    # A mixture of two examples is zero where both are and in one more unit; it rests on that one unit, so it ranks last.
    order = (zeros.sum(dim=1) + len(factors.left) * solid).argsort(descending=True, stable=True)[:_POOL]
    return directions[order], zeros[order]


def _independent(directions: Tensor) -> list[int]:
    """Indices of the directions that are linearly independent of the ones before them."""
    chosen: list[int] = []
    for index in range(len(directions)):
        if len(chosen) < directions.shape[1] and torch.linalg.svdvals(directions[[*chosen, index]])[-1] > 1e-3:
            chosen.append(index)
    return chosen


def _improved(pool: Tensor, zeros: Tensor, chosen: list[int], outputs: Tensor, ones: Tensor | None) -> tuple[Tensor, Tensor]:
    """The examples in the basis, with outputs [rank, m] and bias inputs `ones` [rank], and the consistency of each, once
    no exchange of one direction improves the mean consistency."""

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


_SCALES_AT_ONCE = 64
_SHORTEST = 1e-3
_RULES: tuple[LabelRule, LabelRule] = ("counts", "gradient")
_FITS = 1e-6  # of the squared norm of the observation: largest misfit of a length that explains it


def invert(
    captured: Captured,
    model: nn.Module,
    classes: int,
    *,
    seed: int = 0,
    public: Dataset | None = None,
    progress: Progress | None = None,
) -> Reconstruction:
    """Recover the examples behind the gradient of the first layer, per victim: exact if converged, else a best guess.

    If the layer has no bias, several lengths of an example may explain the same gradient; the length closest to that of the
    `public` examples is chosen. Without classes every length does, and their usual length is taken.
    """
    shape = captured.shape
    weight, bias = first_dense(model, shape)
    everyone = torch.arange(len(captured), device=captured.device)
    seeds = Seed("zeros").draw(everyone, captured.most, shape, seed)
    drawn = Seed("uniform").draw(everyone, captured.most, shape, seed)
    labels = None
    if has_classes(captured.task):
        counted, single = (infer_labels(captured, rule, classes, drawn) for rule in _RULES)
        labels = torch.where(captured.present.sum(1, keepdim=True) == 1, single, counted)
    scaling = scaling_of(model)
    usual = None if public is None else _usual_length(public.tensor, scaling)
    examples, found = seeds.clone(), torch.zeros(len(captured), dtype=torch.int64, device=captured.device)
    loss = torch.full((len(captured),), torch.inf, device=captured.device)
    for victim in range(len(captured)):
        count = int(captured.present[victim].sum())
        recovered = invert_dense(
            captured.seen[weight][victim],
            None if bias is None else captured.seen[bias][victim],
            count,
            weight=captured.weights[weight][victim],
            bias=None if bias is None else captured.weights[bias][victim],
            seed=seed,
        )
        if recovered.up_to_scale and recovered.inputs.any() and labels is not None:
            alone = everyone[victim : victim + 1]
            recovered = _scaled(recovered, captured.take(alone), labels[alone], usual, scaling)
        elif recovered.up_to_scale:  # a target of any size explains an input of any length
            recovered = replace(recovered, inputs=recovered.inputs * (usual or 1.0), found=False)
        examples[victim, :count] = _as_inputs(recovered.inputs, shape, scaling).to(examples)
        found[victim] = Reconstruction.CONVERGED if recovered.found else Reconstruction.DIVERGED
        loss[victim] = recovered.residual
        if progress is not None:
            progress(victim + 1, len(captured))
    answers = solve_targets(captured, examples) if labels is None else refine_labels(captured, labels, classes, examples)
    once = torch.ones(len(captured), dtype=torch.int64, device=captured.device)
    return Reconstruction(examples, examples, seeds, answers, loss, once, found, len(captured))


def _usual_length(inputs: Tensor, scaling: Standardised | None) -> float:
    """The median norm of what inputs become before the dense layer."""
    seen = inputs if scaling is None else scaling(inputs.to(scaling.mean))
    return float(seen.flatten(1).norm(dim=1).median())


def _as_inputs(found: Tensor, shape: tuple[int, ...], scaling: Standardised | None) -> Tensor:
    """The network's inputs [..., *shape] behind inputs [..., n] of its dense layer."""
    inputs = found.view(*found.shape[:-1], *shape)
    return inputs if scaling is None else scaling.undo(inputs)


def _scaled(
    recovered: Recovered, captured: Captured, labels: Tensor, usual: float | None, scaling: Standardised | None
) -> Recovered:
    """Choose a length for inputs known only by direction (layer without bias): one that explains the observation.

    In a network without any bias two lengths may fit, because a longer example produces a larger gradient but also a more
    confident output. Of those that fit, the one nearest to `usual` is chosen; if `usual` is unknown, the shortest.
    """

    def misfits(scales: Tensor) -> Tensor:
        many = captured.take(torch.zeros(len(scales), dtype=torch.int64, device=captured.device))
        guesses = torch.zeros_like(many.tensor)
        scaled = recovered.inputs * scales.to(recovered.inputs).view(-1, 1, 1)
        guesses[:, : scaled.shape[1]] = _as_inputs(scaled, many.shape, scaling).to(guesses)
        with torch.no_grad():
            shown = predicted(many, "gradient", guesses, labels.expand(len(scales), -1), many.present)
        return Objective().between(shown, many.seen).nan_to_num(math.inf).cpu()

    def nearest(rough: float, width: float) -> tuple[float, float]:
        scales = rough * (1 + torch.linspace(-width, width, 121))
        found = misfits(scales)
        return float(found.min()), float(scales[found.argmin()])

    lengths = torch.logspace(math.log10(_SHORTEST), 3, 241)
    scales = torch.stack([lengths, -lengths])
    rough = torch.stack([torch.cat([misfits(some) for some in side.split(_SCALES_AT_ONCE)]) for side in scales])
    shown_nothing = float(sum(value.square().sum() for value in captured.seen.values()))
    lowest = (-F.max_pool1d(-rough, 3, 1, padding=1) == rough) & (rough <= max(float(rough.min()), shown_nothing / 10))
    fits = [nearest(nearest(scale, 0.03)[1], 0.0005) for scale in scales[lowest].tolist()]
    bound, wanted = min(fits)[0] + _FITS * shown_nothing, math.log(max(usual or 0.0, _SHORTEST))
    best = min((scale for misfit, scale in fits if misfit <= bound), key=lambda scale: abs(math.log(abs(scale)) - wanted))
    return replace(recovered, inputs=recovered.inputs * best, up_to_scale=False)
