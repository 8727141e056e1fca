"""A metric for gradients that weighs all their directions alike.

The gradient of a dense layer over a batch is a matrix whose singular values span three orders of magnitude or more. In the
squared or cosine distance a few large ones decide, and most rows of the batch show only in the small ones. Here a difference
R of two gradients has the length ‖L R M‖ with L = (GGᵀ + ε²)^(−¼) and M = (GᵀG + ε²)^(−¼), for the observed gradient G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.files.tree import Tree

_SMALLEST = 0.01  # of the largest singular value: smaller ones are not weighed up further
_LARGEST = 1024  # rows or columns of a tensor that is whitened; a larger one is only divided by its norm


@dataclass(frozen=True)
class WhitenedMetric:
    """The observed gradient of N problems, and its metric."""

    groups: tuple[tuple[str, ...], ...]
    """The tensors of each matrix: a weight with its bias, or one tensor alone."""
    seen: tuple[Tensor, ...]
    """[problems, rows, columns]: each matrix in the metric."""
    left: tuple[Tensor | None, ...]
    right: tuple[Tensor | None, ...]
    scale: tuple[Tensor, ...]
    shared: tuple[Tensor | None, ...]

    @staticmethod
    def of(seen: Tree, *, shared_only: bool = False) -> WhitenedMetric:
        """The metric of a gradient [problems, ...]; with `shared_only`, entries that are 0 are not compared."""
        groups = tuple(_groups(seen))
        matrices = [_matrix(seen, names) for names in groups]
        left, right, scale = [], [], []
        for matrix in matrices:
            wide = matrix.shape[1] > 1 and matrix.shape[2] > 1 and max(matrix.shape[1:]) <= _LARGEST
            left.append(_root(matrix @ matrix.mT) if wide else None)
            right.append(_root(matrix.mT @ matrix) if wide else None)
            scale.append(matrix.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None])
        shared = tuple((matrix != 0).to(matrix) if shared_only else None for matrix in matrices)
        empty = WhitenedMetric(groups, (), tuple(left), tuple(right), tuple(scale), shared)
        return WhitenedMetric(groups, tuple(empty._measured(seen)), tuple(left), tuple(right), tuple(scale), shared)

    def between(self, shown: Tree) -> Tensor:
        """[problems]: the squared distance to the observed gradient, relative to its own length."""
        pairs = list(zip(self._measured(shown), self.seen, strict=True))
        squares = torch.stack([there.square().sum((1, 2)) for _, there in pairs]).sum(0)
        return torch.stack([(here - there).square().sum((1, 2)) for here, there in pairs]).sum(0) / squares

    def _measured(self, tree: Tree) -> list[Tensor]:
        measured = []
        for names, left, right, scale, shared in zip(
            self.groups, self.left, self.right, self.scale, self.shared, strict=True
        ):
            matrix = _matrix(tree, names)
            matrix = matrix if shared is None else matrix * shared
            measured.append(matrix / scale if left is None or right is None else left @ matrix @ right)
        return measured


def _groups(tree: Tree) -> list[tuple[str, ...]]:
    """Every tensor once: a bias together with the weight of its layer."""
    found: list[tuple[str, ...]] = []
    for name, value in tree.items():
        bias = f"{name.removesuffix('weight')}bias"
        if name.endswith("weight") and bias in tree and value.dim() > 2 and tree[bias].shape[1:] == value.shape[1:2]:
            found.append((name, bias))
        elif not (name.endswith("bias") and _has_weight(tree, name)):
            found.append((name,))
    return found


def _has_weight(tree: Tree, bias: str) -> bool:
    weight = tree.get(f"{bias.removesuffix('bias')}weight")
    return weight is not None and weight.dim() > 2 and tree[bias].shape[1:] == weight.shape[1:2]


def _matrix(tree: Tree, names: tuple[str, ...]) -> Tensor:
    """[problems, rows, columns]."""
    parts = [tree[name].reshape(len(tree[name]), tree[name].shape[1] if tree[name].dim() > 1 else 1, -1) for name in names]
    return torch.cat(parts, dim=2)


def _root(gram: Tensor) -> Tensor:
    """(gram + ε²)^(−¼)."""
    values, vectors = torch.linalg.eigh(gram.double())
    values = values.clamp(min=0) + _SMALLEST**2 * values[:, -1:].clamp(min=1e-24)
    root: Tensor = (vectors * values.pow(-0.25)[:, None]) @ vectors.mT
    return root.to(gram)
