"""Which of many candidates was it? Likelihood ratios of candidates for a linear head, over all that was seen."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcdp.attacks.feature_prior import FeaturePrior
from fedcdp.attacks.head_solver import Solved, coefficients
from fedcdp.attacks.linear_head import LinearHead
from fedcdp.attacks.sightings import Sighting
from fedcdp.data.dataset import Dataset
from fedcdp.randomness import numpy_generator

_LEAST = 1e-18


class Candidates:
    """Public examples among which a victim's own is looked for."""

    def __init__(self, head: LinearHead, public: Dataset, candidates: int, seed: int) -> None:
        order = numpy_generator(seed, "candidates").permutation(len(public))[: candidates - 1]
        some = public.take(torch.from_numpy(order))
        self._rows, self._labels = _rows(some.inputs), some.targets.cpu()
        self._features = head.features(some.inputs)
        self._at: tuple[Tensor, Tensor, Tensor] | None = None
        self._errors = torch.empty(0)

    def __len__(self) -> int:
        return len(self._rows)

    def picks(
        self, sighting: Sighting, prior: FeaturePrior, solved: Solved, own: Tensor, features: Tensor, labels: Tensor
    ) -> Tensor:
        """[examples]: whether each of the victim's own examples is likelier than every candidate that differs from it."""
        if len(own) == 1:
            mine = matched_filter_scores(sighting, features, coefficients(sighting, features, labels))
            others = matched_filter_scores(sighting, self._features, self._coefficients(sighting))
        else:
            both = torch.cat([features, self._features]), torch.cat([labels, self._labels])
            mine, others = scores_among_others(sighting, prior, solved.labels, *both).tensor_split([len(own)])
        same = torch.tensor([[row == other for other in self._rows] for row in _rows(own)])
        return mine > others.expand(len(own), -1).masked_fill(same, -torch.inf).amax(1)

    def _coefficients(self, sighting: Sighting) -> Tensor:
        """Those of all candidates: computed once for victims that were seen at the same weights."""
        at = (sighting.weights, sighting.biases, sighting.bound)
        if self._at is None or not all(torch.equal(one, other) for one, other in zip(at, self._at, strict=True)):
            self._at, self._errors = at, coefficients(sighting, self._features, self._labels)
        return self._errors


def _rows(inputs: Tensor) -> list[bytes]:
    """Each example as bytes, to find equal ones."""
    return [row.tobytes() for row in inputs.flatten(1).float().cpu().numpy()]


def matched_filter_scores(sighting: Sighting, features: Tensor, errors: Tensor) -> Tensor:
    """Σ (⟨G, g(x)⟩ − |g(x)|²/2) / τ² over all releases G: the exact log-likelihood of single examples, but for a constant.

    `errors` are their `coefficients` [releases, candidates, classes].
    """
    whole = torch.cat([features, features.new_ones(len(features), 1)], dim=1) if sighting.has_bias else features
    variance = torch.where(sighting.deviation > 0, sighting.deviation, 1.0).square()[:, None]
    # In float32: one product for all releases, by far the most of the work.
    along = whole.float() @ sighting.seen.float().flatten(0, 1).T
    inner = (along.view(len(features), *sighting.seen.shape[:2]).permute(1, 0, 2) * errors).sum(2)
    scores: Tensor = ((inner - errors.square().sum(2) * whole.square().sum(1) / 2) / variance).sum(0)
    return scores


def scores_among_others(sighting: Sighting, prior: FeaturePrior, batch: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The log-likelihood ratio of a candidate in a batch with these labels, whose other examples are draws of the prior.

    Others of a class y are taken to have the same coefficients a_y, those of its mean. Along each axis of the prior, of
    variance λ, what was seen has the covariance Σ_y n_y λ a_y a_yᵀ + τ². The class means leave τ² unexplained.
    """
    size = features.shape[1]
    present, counts = batch.unique(return_counts=True)
    share = sighting.shares.sum(1) / sighting.shares.shape[1]

    def columns(points: Tensor, of: Tensor) -> Tensor:
        each = coefficients(sighting, points, of) * share[:, None, None]
        return each.transpose(1, 2).flatten(0, 1)  # [releases · classes, points]

    classes = columns(prior.means[present], present)
    seen = sighting.seen[..., :size].flatten(0, 1)
    left = seen - classes @ (counts[:, None] * prior.means[present])
    basis = torch.linalg.qr(classes).Q
    outside = left - basis @ (basis.T @ left)
    tau = max(float(outside.square().sum()) / max(1, (len(seen) - len(present)) * size), _LEAST)
    spread = classes * counts.double().sqrt()
    values, vectors = torch.linalg.eigh(spread.T @ spread)
    inside = spread @ vectors / values.clamp(min=_LEAST).sqrt()  # an orthonormal basis of what the others move
    shrink = 1 / tau - 1 / (tau + values.clamp(min=0)[:, None] * prior.variances)  # [present, D]
    # One unknown example of the class becomes the candidate: the expected sight moves by a_x f_x − a_y μ_y.
    mine, typical = columns(features, labels), columns(prior.means[labels], labels)
    along, back = features @ prior.basis, prior.means[labels] @ prior.basis
    left = left @ prior.basis
    inner = ((mine.T @ left) * along).sum(1) - ((typical.T @ left) * back).sum(1)
    cross = (mine * typical).sum(0) * (along * back).sum(1)
    squared = mine.square().sum(0) * along.square().sum(1) + typical.square().sum(0) * back.square().sum(1) - 2 * cross
    projected = (inside.T @ mine).T[:, :, None] * along[:, None] - (inside.T @ typical).T[:, :, None] * back[:, None]
    shared = (projected * shrink * (inside.T @ left)).sum((1, 2)) - (projected.square() * shrink).sum((1, 2)) / 2
    scores: Tensor = (inner - squared / 2) / tau - shared
    return scores
