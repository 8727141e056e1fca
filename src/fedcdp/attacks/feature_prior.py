"""What anyone knows of features: how public examples are spread in each class, and which input goes with which features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.attacks.linear_head import LinearHead
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError

_LEAST_SPREAD = 1e-4  # of the largest variance: no direction is taken for impossible
_RIDGES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # of the sum of the variances; one is chosen on held-out examples
_FEWEST = 20


@dataclass(frozen=True)
class FeaturePrior:
    """Features of each class as a Gaussian with a common covariance, and the best linear map from features to inputs."""

    means: Tensor
    """[classes, D]."""
    basis: Tensor
    """[D, D]: the eigenvectors of the covariance within a class, as columns."""
    variances: Tensor
    """[D]: its eigenvalues, none of them nearly zero."""
    length: float | None
    """The median norm of features; None where nothing is known."""
    input_means: Tensor
    """[classes, inputs]."""
    inverse: Tensor | None
    """[D, inputs]: from features less their class mean to inputs less theirs; None: the features are the inputs."""
    shape: tuple[int, ...]

    @staticmethod
    def of(head: LinearHead, public: Dataset | None, shape: tuple[int, ...], victims: Tensor) -> FeaturePrior:
        """Learn it from public examples, of which none is a victim."""
        size = head.layer.in_features
        plain = _are_inputs(head, shape)
        if public is not None:
            public = _without(public, victims)
        if public is None or len(public) < _FEWEST:
            if not plain:
                raise DataError(f"public: linear-head needs {_FEWEST} public examples to turn features into inputs")
            nothing = torch.zeros(head.classes, size, dtype=torch.float64)
            flat = torch.full((size,), torch.inf, dtype=torch.float64)
            return FeaturePrior(nothing, torch.eye(size, dtype=torch.float64), flat, None, nothing, None, shape)
        features, inputs = head.features(public.inputs), public.inputs.flatten(1).double()
        means, centred = _by_class(features, public.targets, head.classes)
        input_means, centred_inputs = _by_class(inputs, public.targets, head.classes)
        variances, basis = torch.linalg.eigh(centred.T @ centred / len(centred))
        least = _LEAST_SPREAD * float(variances.max())
        length = float(features.norm(dim=1).quantile(0.5))
        inverse = None if plain else _ridge(centred, centred_inputs)
        return FeaturePrior(means, basis, variances.clamp(min=max(least, 1e-12)), length, input_means, inverse, shape)

    def inputs(self, features: Tensor, labels: Tensor) -> Tensor:
        """The likeliest inputs [..., *shape] of features [..., D] with these labels [...]."""
        if self.inverse is None:
            return features.view(*features.shape[:-1], *self.shape)
        found = self.input_means[labels] + (features - self.means[labels]) @ self.inverse
        return found.view(*features.shape[:-1], *self.shape)


def _are_inputs(head: LinearHead, shape: tuple[int, ...]) -> bool:
    """Whether the layers before the head leave an input as it is, but for its shape."""
    probe = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1))
    features = head.features(probe)
    return features.shape == probe.flatten(1).shape and bool((features - probe.flatten(1)).abs().max() < 1e-6)


def _without(public: Dataset, victims: Tensor) -> Dataset:
    """The public examples that are no victim's: a federation without public data has only its own."""
    mine = {row.tobytes() for row in victims.flatten(1).float().cpu().numpy()}
    theirs = public.inputs.flatten(1).float().cpu().numpy()
    return public.take(torch.tensor([at for at, row in enumerate(theirs) if row.tobytes() not in mine]).long())


def _by_class(values: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean of each class (of a class without examples, of all), and all values less that of their class."""
    overall = values.mean(0)
    means = torch.stack([values[targets == k].mean(0) if bool((targets == k).any()) else overall for k in range(classes)])
    return means, values - means[targets]


def _ridge(features: Tensor, inputs: Tensor) -> Tensor:
    """Linear regression of inputs on features, with the ridge that does best on a fifth of the examples, held out."""
    held_out = torch.arange(len(features)) % 5 == 0
    grams, products = zip(
        *((features[some].T @ features[some], features[some].T @ inputs[some]) for some in (~held_out, held_out)),
        strict=True,
    )

    def fitted(gram: Tensor, product: Tensor, ridge: float) -> Tensor:
        more = torch.eye(len(gram), dtype=gram.dtype) * (ridge * float(gram.trace()) + 1e-12)
        solution: Tensor = torch.linalg.solve(gram + more, product)
        return solution

    def error(ridge: float) -> float:
        return float((features[held_out] @ fitted(grams[0], products[0], ridge) - inputs[held_out]).square().mean())

    return fitted(grams[0] + grams[1], products[0] + products[1], min(_RIDGES, key=error))
