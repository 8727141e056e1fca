"""Solve a linear head for features: the observation is a sum of rank-one gradients c·(p − y) ⊗ f with known weights.

p = softmax(Wf + b), or another `Link`, depends on f. Each step therefore takes p from the last estimate and solves the
remaining linear least squares problem, with the prior if there is noise. The clip factor c = min(1, C / (|p − y| |f|)) is
the method's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.attacks.linear_head import FeaturePrior, deltas
from fedcdp.attacks.sightings import Sighting

_TRIAL, _SINGLE, _JOINT = 3, 8, 12  # fixed-point steps: for each label, for one example, for a batch
_SHORTER = (1.0, 0.3, 0.1)
_POWERS = 20
_TINY = 1e-12
_LENGTHS = 241
_NEAR = 0.02  # of the observation: how much lower the misfit may be between two tried lengths
_AS_GOOD = 1e-9  # of the observation: two lengths fit equally well


@dataclass(frozen=True)
class Solved:
    """The features of one victim's examples."""

    features: Tensor
    """[examples, D]."""
    labels: Tensor
    """[examples], or [examples, rows] for targets without classes."""
    residual: float
    """Share of the observation's norm that the features do not explain."""


def coefficients(sighting: Sighting, features: Tensor, labels: Tensor) -> Tensor:
    """[releases, examples, classes]: c·(p − y), the factor of an example's features in each release."""
    weights, biases = sighting.weights, sighting.biases
    logits = torch.einsum("rkd,bd->rbk", weights, features) + biases[:, None]
    error = deltas(sighting.link, logits, labels)
    length = (features.square().sum(1) + sighting.has_bias).sqrt()
    norms = (error.norm(dim=2) * length).clamp(min=_TINY)
    clipped: Tensor = error * (sighting.bound[:, None] / norms).clamp(max=1.0)[..., None]
    return clipped


def shown(sighting: Sighting, features: Tensor, labels: Tensor) -> Tensor:
    """The noiseless observation of these examples, in the form of `Sighting.seen`."""
    scaled = coefficients(sighting, features, labels) * sighting.shares[..., None]
    whole = torch.cat([features, features.new_ones(len(features), 1)], dim=1) if sighting.has_bias else features
    return torch.einsum("rbk,bd->rkd", scaled, whole)


def solve(sighting: Sighting, prior: FeaturePrior, labels: Tensor | None = None) -> Solved:
    """Recover the features of all examples behind the observation; for several examples, labels must be given."""
    noisy = bool((sighting.deviation > 0).any())
    if sighting.shares.shape[1] > 1 and labels is not None:
        whole, first = (_batch(each, prior, labels, noisy) for each in (sighting, sighting.first()))
        # Over many rounds the iteration may not converge: the solution for the first release is the other candidate.
        return min(whole, _solved(sighting, first.features, labels), key=lambda each: each.residual)
    if not sighting.classes:
        return _without_classes(sighting, prior, noisy)
    return _likeliest(sighting, prior) if noisy else _exact(sighting, prior)


def _misfit(sighting: Sighting, features: Tensor, labels: Tensor) -> float:
    wrong = (sighting.seen - shown(sighting, features, labels)).square().sum((1, 2))
    return float((wrong / _squared_deviation(sighting)).sum())


def _squared_deviation(sighting: Sighting) -> Tensor:
    return torch.where(sighting.deviation > 0, sighting.deviation, 1.0).square()


def _solved(sighting: Sighting, features: Tensor, labels: Tensor) -> Solved:
    seen = sighting.seen
    wrong = float((seen - shown(sighting, features, labels)).norm() / seen.norm().clamp(min=_TINY))
    return Solved(features, labels, wrong)


# One example ---------------------------------------------------------------------------------------------------------


def _likeliest(sighting: Sighting, prior: FeaturePrior) -> Solved:
    """Under noise: maximise the posterior density over features for all labels at once, and choose the best label."""
    labels = torch.arange(len(prior.means), device=sighting.seen.device)
    densities, features = _climbed(sighting, prior, prior.means, labels, _TRIAL)
    best = densities.argmin()[None]
    _, features = _climbed(sighting, prior, features[best], labels[best], _SINGLE)
    return _solved(sighting, features, labels[best])


def _climbed(sighting: Sighting, prior: FeaturePrior, features: Tensor, labels: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """For each row, the best point on the way, and its density: over many rounds a step may overshoot, and is shortened."""
    densities, climbing = _densities(sighting, prior, features, labels), torch.ones_like(labels, dtype=torch.bool)
    for _ in range(steps):
        moves = _steps(sighting, prior, features, labels) - features
        waiting = climbing.clone()
        for shorter in _SHORTER:
            rows = waiting.nonzero()[:, 0]
            if not len(rows):
                break
            points = features[rows] + shorter * moves[rows]
            found = _densities(sighting, prior, points, labels[rows])
            better = found < densities[rows]
            features, densities = features.clone(), densities.clone()
            features[rows[better]], densities[rows[better]] = points[better], found[better]
            waiting[rows[better]] = False
        climbing = climbing & ~waiting
        if not bool(climbing.any()):
            break
    return densities, features


def _densities(sighting: Sighting, prior: FeaturePrior, features: Tensor, labels: Tensor) -> Tensor:
    """−2 log of the posterior density of each row's features as the one example behind the observation, up to a constant.

    |G − g|² is computed as |G|² − 2⟨G, g⟩ + |g|², g = c ⊗ f: no array of the observation's size is formed.
    """
    whole = torch.cat([features, features.new_ones(len(features), 1)], dim=1) if sighting.has_bias else features
    scaled = coefficients(sighting, features, labels) * sighting.shares[:, :1, None]  # [releases, rows, classes]
    along = torch.einsum("rkd,bd->rbk", sighting.seen, whole)
    moved = (scaled.square() * whole.square().sum(1)[:, None] - 2 * along * scaled).sum(2)
    misfits = ((moved + sighting.energies[:, None]) / _squared_deviation(sighting)[:, None]).sum(0)
    away = features - prior.typical(labels)
    inside = away @ prior.basis
    unlikely = (inside.square() / prior.variances).sum(1)
    if prior.others:
        unlikely = unlikely + (away.square().sum(1) - inside.square().sum(1)) / prior.rest
    found: Tensor = misfits + unlikely
    return found


def _steps(sighting: Sighting, prior: FeaturePrior, features: Tensor, labels: Tensor) -> Tensor:
    """`_step` under noise for each row by itself, as the one example behind the observation."""
    weighted = coefficients(sighting, features, labels) * sighting.shares[:, :1, None]
    weighted, variance = weighted.transpose(1, 2), _squared_deviation(sighting)[:, None, None]
    values = (weighted.square() / variance).sum((0, 1))[:, None]
    means, size = prior.typical(labels), features.shape[1]
    wanted = (weighted / variance).flatten(0, 1).T @ sighting.seen.flatten(0, 1)
    turned = wanted[:, :size] - values * means
    found: Tensor = means + prior.weighted(turned, 1 / (values + 1 / prior.variances), 1 / (values + 1 / prior.rest))
    return found


def _without_classes(sighting: Sighting, prior: FeaturePrior, noisy: bool) -> Solved:
    """An example whose target is several labels, or values: the target follows from the features.

    Without noise every row is a multiple of the features. A bias gives their length; without one, it is the usual length of
    public features. Under noise, target and features are improved in turn.
    """
    size = sighting.weights.shape[2]
    if noisy:
        features = prior.means[:1]
        labels = _targets_of(sighting, features)
        best, chosen = float(_densities(sighting, prior, features, labels)), features
        for _ in range(_SINGLE):
            features = _steps(sighting, prior, features, labels)
            labels = _targets_of(sighting, features)
            if (found := float(_densities(sighting, prior, features, labels))) < best:
                best, chosen = found, features
        return _solved(sighting, chosen, _targets_of(sighting, chosen))
    rows = sighting.seen[..., :size].reshape(-1, size)
    if sighting.has_bias:
        errors = sighting.seen[..., size].reshape(-1)
        features = (errors @ rows / errors.square().sum().clamp(min=_TINY))[None]
    else:
        direction = leading_direction(rows)[None]
        towards = 1.0 if float(direction[0] @ prior.means[0]) >= 0 else -1.0
        features = direction * towards * (1.0 if prior.length is None else prior.length)
    return _solved(sighting, features, _targets_of(sighting, features))


def _targets_of(sighting: Sighting, features: Tensor) -> Tensor:
    """[1, rows]: the target of one example with these features, from the releases that are not clipped, if there are any."""
    whole = torch.cat([features, features.new_ones(1, 1)], dim=1) if sighting.has_bias else features
    errors = sighting.seen @ whole[0] / whole.square().sum().clamp(min=_TINY) / sighting.shares[:, :1].clamp(min=_TINY)
    if sighting.link == "sigmoid":  # p − y is negative exactly where y is 1
        return (errors.mean(0, keepdim=True) < 0).double()
    outputs = (sighting.weights @ features[0]) + sighting.biases
    whole_ones = errors.norm(dim=1) * whole.norm() < 0.999 * sighting.bound
    kept = whole_ones if bool(whole_ones.any()) else torch.ones_like(whole_ones)
    weight = (kept / _squared_deviation(sighting))[:, None]
    wanted = outputs - errors * errors.shape[1] / 2
    found: Tensor = (wanted * weight).sum(0, keepdim=True) / weight.sum()
    return found


def _exact(sighting: Sighting, prior: FeaturePrior) -> Solved:
    """Without noise every row is a multiple of the features: find the direction, then the fitting label, sign and length."""
    seen = sighting.seen
    size = sighting.weights.shape[2]
    rows = seen[..., :size].reshape(-1, size)
    if sighting.has_bias:  # the last column is c·(p − y) itself
        errors = seen[..., size].reshape(-1)
        features = (errors @ rows / errors.square().sum().clamp(min=_TINY))[None]
        total = seen[..., size].sum(0)
        return _solved(sighting, features, total.argmin()[None] if len(total) > 1 else (total < 0).long())
    direction = leading_direction(rows)
    lengths = torch.logspace(-3, 3, _LENGTHS, dtype=torch.float64)
    if prior.length is not None:
        lengths = torch.cat([lengths, lengths.new_tensor([prior.length])])
    tried = {
        (label, sign): _misfits_along(sighting, direction, sign * lengths, label)
        for label in range(sighting.classes)
        for sign in (1.0, -1.0)
    }
    energy = float(seen.square().sum())
    near = min(float(each.min()) for each in tried.values()) + _NEAR * energy
    fits: list[tuple[float, float, int]] = []  # misfit, signed length, label
    for (label, sign), misfits in tried.items():
        for at in _local_minima(misfits):
            if float(misfits[at]) <= near:
                fits.append((*_refined(sighting, direction, float(sign * lengths[at]), label), label))
        if prior.length is not None:
            fits.append((float(misfits[-1]), sign * prior.length, label))
    bound = min(fits)[0] + _AS_GOOD * energy
    usual = 1.0 if prior.length is None else prior.length

    def unlikely(fit: tuple[float, float, int]) -> tuple[bool, float]:
        """Order by length first, then by the sign nearer to the class mean."""
        _, length, label = fit
        towards = float(direction @ prior.means[label]) * length
        return towards < 0, abs(torch.tensor(abs(length) / usual).log().item())

    _, length, label = min((fit for fit in fits if fit[0] <= bound), key=unlikely)
    return _solved(sighting, (length * direction)[None], torch.tensor([label]))


def leading_direction(rows: Tensor) -> Tensor:
    """The first right singular vector of rows [n, D], up to its sign, by power iteration.

    The rows are multiples of one vector up to rounding, so a few iterations do what a decomposition takes minutes for.
    """
    rows = rows / rows.abs().max().clamp(min=torch.finfo(rows.dtype).tiny)
    direction = rows[rows.norm(dim=1).argmax()]
    for _ in range(_POWERS):
        direction = rows.T @ (rows @ direction)
        direction = direction / direction.norm().clamp(min=_TINY)
    return direction


def _misfits_along(sighting: Sighting, direction: Tensor, lengths: Tensor, label: int) -> Tensor:
    """The misfit of f = length·direction for each length, computed from inner products alone."""
    seen, weights = sighting.seen @ direction, sighting.weights @ direction  # [releases, classes]
    logits = lengths[:, None, None] * weights + sighting.biases  # [lengths, releases, classes]
    error = deltas(sighting.link, logits, torch.tensor([label]))
    norms = (error.norm(dim=2) * lengths.abs()[:, None]).clamp(min=_TINY)
    scaled = error * (sighting.bound / norms).clamp(max=1.0)[..., None] * (lengths[:, None, None] * sighting.shares[:, :1])
    # This is all of |G|² − 2⟨G, g⟩ + |g|², where G is the observation's component along the direction.
    misfits: Tensor = (seen - scaled).square().sum((1, 2))
    return misfits


def _local_minima(values: Tensor) -> list[int]:
    """Indices where a value is below the one before and not above the one after; the first index of a plateau."""
    inner = (values[1:-1] < values[:-2]) & (values[1:-1] <= values[2:])
    return [0, len(values) - 1, *(inner.nonzero()[:, 0] + 1).tolist()]


def _refined(sighting: Sighting, direction: Tensor, length: float, label: int) -> tuple[float, float]:
    """The best length near this one, and its misfit."""
    width, best = 0.06, (float("inf"), length)
    for _ in range(9):
        lengths = best[1] * (1 + torch.linspace(-width, width, 25, dtype=torch.float64))
        tried = _misfits_along(sighting, direction, lengths, label)
        best = min(best, (float(tried.min()), float(lengths[tried.argmin()])))
        width /= 8
    return best


# Several examples ----------------------------------------------------------------------------------------------------


def _batch(sighting: Sighting, prior: FeaturePrior, labels: Tensor, noisy: bool) -> Solved:
    """Features of a batch, by alternating least squares.

    With enough releases to distinguish examples, start from a guess that differs within a class. Otherwise start from the
    class means, so examples of one class share the information about their sum.
    """
    features, (releases, rows, _) = prior.typical(labels), sighting.seen.shape
    if releases * max(1, rows - 1) >= len(labels):
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(len(labels), len(prior.variances), generator=generator, dtype=torch.float64, device="cpu").to(
            features.device
        )
        spread = torch.where(prior.variances.isfinite(), prior.variances, 1.0).sqrt()
        features = features + (draws * spread) @ prior.basis.T
    best, least = features, float("inf")
    for _ in range(_JOINT):
        features = _step(sighting, prior, features, labels, noisy)
        misfit = _misfit(sighting, features, labels)
        if misfit < least:
            best, least = features, misfit
    return _solved(sighting, best, labels)


def _step(sighting: Sighting, prior: FeaturePrior, features: Tensor, labels: Tensor, noisy: bool) -> Tensor:
    """Least squares for the features with the last coefficients; in the prior's basis every axis is independent."""
    size = features.shape[1]
    rows = (coefficients(sighting, features, labels) * sighting.shares[..., None]).transpose(1, 2)
    scale = _squared_deviation(sighting).sqrt()[:, None, None]
    matrix = (rows / scale).flatten(0, 1)  # [releases · classes, examples]
    wanted = (sighting.seen[..., :size] / scale).flatten(0, 1)
    means = prior.typical(labels)
    values, vectors = torch.linalg.eigh(matrix.T @ matrix)
    precision, elsewhere = 1 / prior.variances, 1 / prior.rest
    if not noisy:  # the prior only determines what the releases leave undetermined
        finite = torch.where(prior.variances.isfinite(), prior.variances, 1.0)
        least = _TINY * float(values.max()) * float(finite.max())
        precision, elsewhere = least / finite, least / prior.rest
    turned, values = vectors.T @ (matrix.T @ (wanted - matrix @ means)), values.clamp(min=0)[:, None]
    found: Tensor = means + vectors @ prior.weighted(turned, 1 / (values + precision), 1 / (values + elsewhere))
    return found
