"""Attack on a linear head: labels, features and inputs in closed form, and identification among many candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedcdp.attacks.head_solver import Solved, coefficients, shown, solve
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.linear_head import FeaturePrior, LinearHead
from fedcdp.attacks.presence import Candidates
from fedcdp.attacks.reconstruct import Progress, Reconstruction
from fedcdp.attacks.sightings import Sighting, Sightings
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError, ModelError

_FITS = 1e-3  # share of the observation: a residual at rounding level
_SAME = 1e-2
_FEW, _SWEEPS = 16, 3  # largest batch whose labels are tried one by one; number of passes
_INDEPENDENT = 1e-14  # of the largest eigenvalue: what is smaller is rounding
_UNMODELLED = 1e-4  # of the mean square of the observation: error of using class means as features


@dataclass(frozen=True)
class HeadFound:
    """The results for all victims of a linear head."""

    found: Reconstruction
    identified: Tensor
    """[victims, examples]: whether the true example was the most likely candidate."""
    candidates: int
    feature_errors: Tensor
    """[victims, examples]: distance of the recovered features to the true ones, relative to their norm; NaN if absent."""

    def figures(self, leaks: Leaks, sightings: Sightings) -> Leaks:
        """Add the number and source of the observed releases, the error of the features, and the identification rate."""
        counts = torch.tensor([float(len(each.seen)) for each in sightings.victims])
        about = {"source": sightings.source, "releases_mean": float(counts.mean())}
        if leaks.scores is None:
            return replace(leaks, about=about)
        scores = replace(leaks.scores, identified=self.identified & leaks.scores.present, candidates=self.candidates)
        about |= {"feature_error_median": float(self.feature_errors.nanmedian()), "identified_by_likelihood": True}
        return replace(leaks, scores=scores, about=about)


def attack_head(
    sightings: Sightings,
    head: LinearHead,
    public: Dataset | None,
    *,
    candidates: int,
    seed: int = 0,
    scored: bool = True,
    progress: Progress | None = None,
) -> HeadFound:
    """Solve every victim for labels and features, map features to inputs, and identify the true example among candidates."""
    captured = sightings.captured
    victims, most = captured.present.shape
    shape, device = captured.shape, captured.device
    truth = captured.tensor[captured.present].cpu()
    prior = FeaturePrior.of(head, public, shape, truth if scored else truth[:0]).to(device)
    batches = any(each.classes and each.shares.shape[1] > 1 for each in sightings.victims)
    if prior.length is None and captured.noisy and batches:
        raise DataError("public: linear-head needs public examples, none of them a victim's, to tell a noisy batch apart")
    examples = torch.zeros(victims, most, *shape)
    labels = torch.zeros(captured.targets.shape, dtype=captured.targets.dtype)
    errors = torch.full((victims, most), torch.nan, dtype=torch.float64)
    features = torch.zeros(victims, most, head.layer.in_features, dtype=torch.float64)
    residuals = torch.zeros(victims)
    pool = None if public is None or not scored else Candidates(head, public, candidates, seed, device)
    identified = torch.zeros(victims, most, dtype=torch.bool)
    for victim, kept in enumerate(sightings.victims):
        with device:  # all that is created here
            sighting = kept.in_float64(device)
            count = sighting.shares.shape[1]
            solved = _solve_all(sighting, prior)
            features[victim, :count] = solved.features
            labels[victim, :count] = solved.labels.reshape(labels[victim, :count].shape).to(labels)
            examples[victim, :count] = prior.inputs(solved.features, solved.labels).float()
            residuals[victim] = solved.residual
            if scored:
                own, own_labels = captured.tensor[victim, :count], captured.targets[victim, :count]
                actual = head.features(own).to(device)
                _check_reproduces(sighting, actual, own_labels)
                errors[victim, :count] = _feature_errors(solved, actual)
                if pool is not None:
                    identified[victim, :count] = pool.picks(sighting, prior, solved, own, actual, own_labels)
        if progress is not None:
            progress(victim + 1, victims)
    once = torch.ones(victims, dtype=torch.int64)
    outcome = torch.where(residuals < _FITS, Reconstruction.CONVERGED, 0)
    here, start = examples.to(device), torch.zeros_like(examples, device=device)
    found = Reconstruction(
        here,
        here,
        start,
        labels.to(device),
        residuals.to(device),
        once.to(device),
        outcome.to(device),
        victims,
        features=features,
    )
    return HeadFound(found, identified.to(device), 1 if pool is None else 1 + len(pool), errors)


def _solve_all(sighting: Sighting, prior: FeaturePrior) -> Solved:
    """The labels and features of all examples behind the observation."""
    count = sighting.shares.shape[1]
    if sighting.classes:
        return solve(sighting, prior, None if count == 1 else count_labels(sighting, prior))
    # The examples of a batch differ only by their classes: without any, all are taken to be the same.
    together = solve(replace(sighting, shares=sighting.shares.sum(1, keepdim=True)), prior)
    features, labels = (value.expand(count, -1) for value in (together.features, together.labels))
    return replace(together, features=features, labels=labels)


def _check_reproduces(sighting: Sighting, features: Tensor, labels: Tensor) -> None:
    """Raise if a noiseless sighting of one local step is not reproduced from its own examples."""
    one_step = bool((sighting.shares.sum(1) <= 1 + 1e-6).all())
    if not one_step or bool((sighting.deviation > 0).any()):
        return
    seen = sighting.seen
    wrong = float((seen - shown(sighting, features, labels)).norm() / seen.norm().clamp(min=1e-12))
    if not wrong < _SAME:
        raise ModelError(
            f"the true examples do not give this gradient at these weights (they differ by {wrong:.2g} of its norm): was "
            "the network in another mode, or was it trained with another loss?"
        )


def _feature_errors(solved: Solved, actual: Tensor) -> Tensor:
    """For each true example, the distance to the nearest recovered features."""
    errors: Tensor = torch.cdist(actual, solved.features).amin(1) / actual.norm(dim=1).clamp(min=1e-12)
    return errors


def count_labels(sighting: Sighting, prior: FeaturePrior) -> Tensor:
    """The labels of a batch, with estimated multiplicities, by non-negative least squares on class means."""
    from scipy.optimize import nnls

    examples, classes = sighting.shares.shape[1], len(prior.means)
    share, means = sighting.shares.sum(1) / examples, prior.means
    if not bool(means.any()):  # no prior: use the direction common to all rows as features
        means = sighting.seen[..., : means.shape[1]].abs().mean((0, 1)).expand_as(means)
    # Column y is what one example with the mean features of class y would show, a ⊗ f in each release. Its products with the
    # others and with the observation follow from those of a and f: no column is formed.
    rows = coefficients(sighting, means, torch.arange(classes)) * share[:, None, None]
    whole = torch.cat([means, means.new_ones(classes, 1)], dim=1) if sighting.has_bias else means
    weight = 1 / torch.where(sighting.deviation > 0, sighting.deviation, 1.0).square()[:, None, None]
    products = torch.einsum("ryk,rzk->yz", rows * weight, rows) * (whole @ whole.T)
    inner = torch.einsum("ryk,rkd,yd->y", rows * weight, sighting.seen, whole)
    values, vectors = torch.linalg.eigh(products)
    kept = values > _INDEPENDENT * values.max()
    root, turned = values[kept].sqrt()[:, None], vectors[:, kept].T
    wanted, _ = nnls((root * turned).cpu().numpy(), (turned @ inner / root[:, 0]).cpu().numpy())
    wanted = wanted * examples / max(wanted.sum(), 1e-12)
    labels = []
    for _ in range(examples):  # assign one example at a time to the class with the largest remaining count
        labels.append(int(np.argmax(wanted)))
        wanted[labels[-1]] -= 1
    found = torch.tensor(labels)
    return found if examples > _FEW or prior.length is None else _refined_labels(sighting.first(), prior, found)


def _refined_labels(sighting: Sighting, prior: FeaturePrior, labels: Tensor) -> Tensor:
    """The most likely labels of a small batch, changing one label at a time, with features drawn from the prior."""
    best = _likelihood(sighting, prior, labels)
    for _ in range(_SWEEPS):
        before = labels
        for place in range(len(labels)):
            for label in range(len(prior.means)):
                changed = labels.clone()
                changed[place] = label
                if (found := _likelihood(sighting, prior, changed)) > best:
                    labels, best = changed, found
        if torch.equal(labels, before):
            break
    return labels


def _likelihood(sighting: Sighting, prior: FeaturePrior, labels: Tensor) -> float:
    """Log-density of the observation, up to a constant: along an axis of variance λ its covariance is λAAᵀ + τ²."""
    means, seen = prior.typical(labels), sighting.seen[..., : prior.means.shape[1]]
    rows = coefficients(sighting, means, labels) * sighting.shares[..., None]
    matrix = rows.transpose(1, 2).flatten(0, 1)  # [releases · classes, examples]
    left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    away = seen.flatten(0, 1) - matrix @ means
    least = _UNMODELLED * float(seen.square().mean())
    tau = max(float(sighting.deviation.square().mean()), least)
    inside = left.T @ away
    along, energies = inside @ prior.basis, inside.square().sum(1)
    spread = values.square()[:, None] * prior.variances + tau
    surprise = float(spread.log().sum() + (along.square() / spread).sum())
    surprise += float(away.square().sum() - energies.sum()) / tau
    if prior.others:
        rest = values.square() * prior.rest + tau
        surprise += float((prior.others * rest.log() + (energies - along.square().sum(1)) / rest).sum())
    return -0.5 * surprise
