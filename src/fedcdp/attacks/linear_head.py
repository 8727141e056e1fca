"""Networks whose only trained layer is the last one, and public knowledge about the features in front of it.

The gradient of such a linear head is (p − y) ⊗ features, so it reveals the features (`Link`: for other losses as well). The
recommended presets train a head of this kind on fixed features. At its zero start the network's output does not depend on
the input, but its gradient does.

`LinearHead` describes the head. `FeaturePrior` holds what anyone can learn from public examples: the distribution of
features within each class, and the map from features to inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.data.dataset import Dataset
from fedcdp.engine import Loss
from fedcdp.engine.frozen import split
from fedcdp.errors import DataError
from fedcdp.files.tree import Tree
from fedcdp.models.features import Standardised
from fedcdp.models.networks import scaling_of
from fedcdp.training.feature_cache import features_of

_BATCH = 100
_SAME = 1e-4

Link = Literal["softmax", "sigmoid", "identity"]
"""How outputs become predictions p; the gradient of the loss at the outputs is p − y, divided by the number of outputs for
`sigmoid`, and twice that for `identity`."""
_LINKS: dict[object, Link] = {
    F.cross_entropy: "softmax",
    F.binary_cross_entropy_with_logits: "sigmoid",
    F.mse_loss: "identity",
}


def link_of(loss: Loss) -> Link | None:
    """The link of PyTorch's cross-entropies and of its squared error; None for any other loss."""
    try:
        return _LINKS.get(loss)
    except TypeError:  # a loss need not be hashable
        return None


def deltas(link: Link, outputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the loss at outputs [..., examples, rows] for targets [examples, ...]."""
    rows = outputs.shape[-1]
    if link == "softmax":
        return outputs.softmax(-1) - F.one_hot(targets, rows).double()
    wanted = targets.double().reshape(len(targets), rows)
    return (outputs.sigmoid() - wanted) / rows if link == "sigmoid" else 2 * (outputs - wanted) / rows


@dataclass(frozen=True)
class LinearHead:
    """The trained last layer of a network, and the fixed layers before it."""

    network: nn.Module
    layer: nn.Linear
    weight: str
    """The name of the weight among the trained parameters."""
    bias: str | None
    """The name of the bias; None if there is none, or if it is not trained."""
    link: Link = "softmax"

    @property
    def rows(self) -> int:
        """Number of rows of the weight."""
        return self.layer.out_features

    @property
    def classes(self) -> int:
        """Number of classes, whose features are told apart: one logit has two; several labels or values have none (1)."""
        return self.rows if self.link == "softmax" else 2 if self.link == "sigmoid" and self.rows == 1 else 1

    @torch.no_grad()
    def features(self, inputs: Tensor) -> Tensor:
        """Output of the layers before the head for inputs [n, ...]: [n, D] in float64."""
        kept: list[Tensor] = []
        hook = self.layer.register_forward_pre_hook(lambda _, given: kept.append(given[0].double().cpu()))
        device = self.layer.weight.device
        try:
            for some in inputs.split(_BATCH):
                self.network(some.to(device))
        finally:
            hook.remove()
        return torch.cat(kept)

    def features_of(self, data: Dataset, rows: Tensor) -> Tensor:
        """Features [n, D] of these rows of a dataset; those of a benchmark come from the cache, if they are there."""
        if data.benchmark is not None:
            device = self.layer.weight.device
            front, rest = split(self.network, data.inputs, device)
            if front is not None and any(each is self.layer for each in rest.modules()):
                kept = features_of(front, data, device)
                assert isinstance(kept, Tensor)  # because the inputs are one tensor
                return replace(self, network=rest).features(kept[rows.to(device)])
        return self.features(data.tensor[rows])

    def gradient(self, tree: Mapping[str, Tensor]) -> Tensor:
        """[..., classes, D] of a tree; if the bias is trained, D + 1 columns, the last of which is its gradient."""
        weight = tree[self.weight].double().cpu()
        return weight if self.bias is None else torch.cat([weight, tree[self.bias].double().cpu()[..., None]], dim=-1)

    def weights(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """Weight [..., classes, D] and bias [..., classes] of a tree of trained parameters."""
        weight = tree[self.weight].double().cpu()
        if self.bias is not None:
            return weight, tree[self.bias].double().cpu()
        fixed = torch.zeros(self.rows) if self.layer.bias is None else self.layer.bias.detach()
        return weight, fixed.double().cpu().expand(weight.shape[:-1])


def find_head(network: nn.Module, shape: tuple[int, ...], link: Link = "softmax") -> LinearHead | None:
    """The linear head of a network for inputs of `shape`; None unless a last dense layer is the only trained layer."""
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    for name, layer in network.named_modules():
        prefix = f"{name}." if name else ""
        if not isinstance(layer, nn.Linear) or f"{prefix}weight" not in trained:
            continue
        if not trained <= {f"{prefix}weight", f"{prefix}bias"}:
            return None
        bias = f"{prefix}bias" if f"{prefix}bias" in trained else None
        head = LinearHead(network, layer, f"{prefix}weight", bias, link)
        return head if _is_last(head, shape) else None
    return None


def find_last(network: nn.Module, shape: tuple[int, ...]) -> LinearHead | None:
    """The last dense layer of a network for inputs of `shape`, whatever else is trained; None if another layer follows it
    or it is not trained."""
    name, layer = next(reversed([each for each in network.named_modules() if isinstance(each[1], nn.Linear)]), ("", None))
    if not isinstance(layer, nn.Linear) or not layer.weight.requires_grad:
        return None
    prefix = f"{name}." if name else ""
    has_bias = layer.bias is not None and layer.bias.requires_grad
    last = LinearHead(network, layer, f"{prefix}weight", f"{prefix}bias" if has_bias else None)
    return last if _is_last(last, shape) else None


def _is_last(head: LinearHead, shape: tuple[int, ...]) -> bool:
    """Whether the layer's output is the network's: nothing follows it, and it is used once, on vectors."""
    layer = head.layer
    probe = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            answers = head.network(probe.to(layer.weight.device)).double().cpu()
        features = head.features(probe)
    except Exception:  # the engine's own check reports why the network rejects such inputs
        return False
    if features.dim() != 2 or len(features) != len(probe) or not bool(features.isfinite().all()):
        return False
    bias = None if layer.bias is None else layer.bias.detach().double().cpu()
    wanted = F.linear(features, layer.weight.detach().double().cpu(), bias)
    return answers.shape == wanted.shape and torch.allclose(answers, wanted, rtol=_SAME, atol=_SAME)


_LEAST_SPREAD = 1e-4  # of the largest variance: no direction is treated as impossible
_RIDGES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # relative to the sum of variances; chosen on held-out examples
_FEWEST = 20
_MOST = 4000  # public examples, where each has more features than this: their products would take minutes and gigabytes


@dataclass(frozen=True)
class FeaturePrior:
    """Features of each class as a Gaussian with a common covariance, and the best linear map from features to inputs."""

    means: Tensor
    """[classes, D]."""
    basis: Tensor
    """[D, axes]: the eigenvectors of the covariance within a class, as columns, without those of variance `rest`."""
    variances: Tensor
    """[axes]: its eigenvalues."""
    rest: float
    """The variance in every other direction: small, because public examples do not vary there, but not zero."""
    length: float | None
    """The median norm of features; None if nothing is known."""
    input_means: Tensor
    """[classes, inputs]."""
    inverse: Tensor | None
    """[D, inputs]: from centred features (class mean subtracted) to centred inputs; None: the features are the inputs."""
    shape: tuple[int, ...]
    scaling: Standardised | None = None
    """Where the features are the inputs: what standardises them, if anything does."""

    @staticmethod
    def of(head: LinearHead, public: Dataset | None, shape: tuple[int, ...], victims: Tensor) -> FeaturePrior:
        """Learn the prior from public examples, excluding the victims."""
        size = head.layer.in_features
        plain = _are_inputs(head, shape)
        rows = torch.empty(0, dtype=torch.int64) if public is None else not_among(public, victims)
        if min(len(rows), size) > _MOST:
            rows = rows[torch.arange(_MOST) * len(rows) // _MOST]
        if public is None or len(rows) < _FEWEST:
            if not plain:
                raise DataError(f"public: linear-head needs {_FEWEST} public examples to turn features into inputs")
            nothing = torch.zeros(head.classes, size, dtype=torch.float64)
            flat = torch.full((size,), torch.inf, dtype=torch.float64)
            basis = torch.eye(size, dtype=torch.float64)
            return FeaturePrior(nothing, basis, flat, torch.inf, None, nothing, None, shape, scaling_of(head.network))
        device = head.layer.weight.device  # here for the large products alone
        features, inputs = head.features_of(public, rows).to(device), public.tensor[rows].flatten(1).double().to(device)
        groups = groups_of(public.targets[rows], head.classes).to(device)
        means, centred = _by_class(features, groups, head.classes)
        input_means, centred_inputs = _by_class(inputs, groups, head.classes)
        variances, basis = _axes(centred)
        rest = max(_LEAST_SPREAD * float(variances.max()), 1e-12)
        kept = variances > rest
        length = float(features.norm(dim=1).quantile(0.5))
        inverse = None if plain else _ridge(centred, centred_inputs)
        found = FeaturePrior(
            means, basis[:, kept], variances[kept], rest, length, input_means, inverse, shape, scaling_of(head.network),
        )  # fmt: skip
        return found.to(torch.device("cpu"))

    def to(self, device: torch.device) -> FeaturePrior:
        """The same on a device."""
        inverse = None if self.inverse is None else self.inverse.to(device)
        moved = {name: getattr(self, name).to(device) for name in ("means", "basis", "variances", "input_means")}
        return replace(self, inverse=inverse, **moved)

    @property
    def others(self) -> int:
        """Number of directions of variance `rest`."""
        return len(self.basis) - len(self.variances)

    def weighted(self, rows: Tensor, along: Tensor, elsewhere: Tensor) -> Tensor:
        """Rows [n, D], multiplied by `along` [n, axes] along each axis, and by `elsewhere` [n, 1] in other directions."""
        inside = rows @ self.basis
        found = (inside * along) @ self.basis.T
        return found + (rows - inside @ self.basis.T) * elsewhere if self.others else found

    def inputs(self, features: Tensor, labels: Tensor) -> Tensor:
        """The most likely inputs [n, *shape] for features [n, D] with these targets [n, ...]."""
        if self.inverse is None:
            plain = features.view(*features.shape[:-1], *self.shape)
            return plain if self.scaling is None else self.scaling.undo(plain)
        found = self.input_means[groups_of(labels, len(self.means))] + (features - self.typical(labels)) @ self.inverse
        return found.view(*features.shape[:-1], *self.shape)

    def typical(self, labels: Tensor) -> Tensor:
        """The mean features [n, D] of the classes of these targets [n, ...]; without classes, the mean of all."""
        return self.means[groups_of(labels, len(self.means))]


def groups_of(targets: Tensor, classes: int) -> Tensor:
    """The class of each target [n, ...]; 0 for all if there are no classes."""
    return targets.reshape(len(targets)).long() if classes > 1 else targets.new_zeros(len(targets), dtype=torch.int64)


def _are_inputs(head: LinearHead, shape: tuple[int, ...]) -> bool:
    """Whether the layers before the head leave an input, once it is standardised, unchanged except for its shape."""
    probe = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1))
    features, scaling = head.features(probe), scaling_of(head.network)
    wanted = (probe if scaling is None else scaling(probe.to(scaling.mean)).cpu()).flatten(1).double()
    return features.shape == wanted.shape and torch.allclose(features, wanted, rtol=1e-6, atol=1e-6)


def without_victims(public: Dataset, victims: Tensor) -> Dataset | None:
    """The public examples without the victims': a federation without public data only has its own. None: all are victims."""
    others = not_among(public, victims)
    return public.take(others) if len(others) else None


def not_among(public: Dataset, victims: Tensor) -> Tensor:
    """The rows of public examples that are none of the victims'."""
    mine = {row.tobytes() for row in victims.flatten(1).float().cpu().numpy()}
    theirs = public.tensor.flatten(1).float().cpu().numpy()
    return torch.tensor([at for at, row in enumerate(theirs) if row.tobytes() not in mine], dtype=torch.int64)


def _by_class(values: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean of each class (the overall mean for an empty class), and all values minus their class mean."""
    overall = values.mean(0)
    means = torch.stack([values[targets == k].mean(0) if bool((targets == k).any()) else overall for k in range(classes)])
    return means, values - means[targets]


def _axes(centred: Tensor) -> tuple[Tensor, Tensor]:
    """Variances along the principal axes of rows [n, D], and the axes as columns; at most n of them if n < D."""
    if len(centred) >= centred.shape[1]:
        variances, basis = torch.linalg.eigh(centred.T @ centred / len(centred))
        return variances, basis
    variances, mixtures = torch.linalg.eigh(centred @ centred.T / len(centred))
    return variances, centred.T @ mixtures / (variances.clamp(min=1e-300) * len(centred)).sqrt()


def _ridge(features: Tensor, inputs: Tensor) -> Tensor:
    """Linear regression of inputs on features, with the ridge that performs best on a held-out fifth of the examples."""
    held_out = torch.arange(len(features), device=features.device) % 5 == 0
    wide = len(features) < features.shape[1]

    def products(some: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix to invert, and the right-hand side: by features, or by examples if there are fewer of them."""
        rows = features[some]
        return (rows @ rows.T, inputs[some]) if wide else (rows.T @ rows, rows.T @ inputs[some])

    def fitted(gram: Tensor, wanted: Tensor, rows: Tensor, ridge: float) -> Tensor:
        more = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * (ridge * float(gram.trace()) + 1e-12)
        solution: Tensor = torch.linalg.solve(gram + more, wanted)
        return rows.T @ solution if wide else solution

    some, kept = products(~held_out), features[~held_out]

    def error(ridge: float) -> float:
        return float((features[held_out] @ fitted(*some, kept, ridge) - inputs[held_out]).square().mean())

    return fitted(*products(torch.ones_like(held_out)), features, min(_RIDGES, key=error))
