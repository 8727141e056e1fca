"""Climb: change public rows cell by cell until their d, the gradient by a layer's outputs, lies in a given space.

Many rows climb at once. A step replaces one or two cells of each by those of a random public row, or moves a number a
little, and is kept if a smaller share of d lies outside the space. A row that stops improving begins again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.data.input_columns import InputColumns

Array = NDArray[np.float64]
Directions = Callable[[Tensor, Tensor], Tensor]
"""(rows [k, n], labels [k]) to d [k, units]: the gradient of each row's loss by the layer's outputs."""

_CHAINS, _STEPS = 512, 400
_FINISH = 60  # steps after the first row has arrived
_STALE = 150  # steps without improvement
_TWO_CELLS = 0.3  # share of the steps that change two cells
_MIXED = 0.9  # share of the steps, in a table of numbers only, that move all numbers towards those of the public row
_OTHER_LABEL = 0.1  # share of the steps that change the label, where labels change the direction of d
_NEAR = 0.1  # least share of d outside the span of those that were found


def climb(
    left: Array, taken: Array, columns: InputColumns, public: Array, directions: Directions, labels: int,
    draws: np.random.Generator, *, inside: float, within: tuple[Array, Array] | None = None,
) -> Array:  # fmt: skip
    """Rows [k, n] whose d lies in the space `left` [units, rank] and, to a good part, outside of `taken` [units, k].

    `within`, a point and directions, is an affine space that holds the rows. It is used where all cells are numbers: in it,
    other rows have no categories.
    """
    generator = torch.Generator().manual_seed(int(draws.integers(2**63)))
    pool, space, known = (torch.from_numpy(each).float() for each in (public, left, taken))
    owner = torch.zeros(pool.shape[1], dtype=torch.int64)
    for number, column in enumerate(columns):
        owner[column.inputs] = number
    numbers = torch.tensor([column.is_number for column in columns])[owner]

    if within is not None and bool(numbers.all()):
        base = torch.from_numpy(within[0]).float()
        across = torch.from_numpy(np.linalg.qr(within[1].T)[0]).float()
        pool = base + (pool - base) @ across @ across.T

    def draw(count: int) -> Tensor:
        return pool[torch.randint(len(pool), (count,), generator=generator)]

    def share(rows: Tensor, label: Tensor) -> Tensor:
        d = directions(rows, label)
        rest = (d - (d @ space) @ space.T).square().sum(1)
        new, whole = (d - (d @ known) @ known.T).square().sum(1), d.square().sum(1)
        return torch.where(new > _NEAR**2 * whole, rest / new, torch.inf).nan_to_num(torch.inf)

    first = _best(pool, share, labels)
    rows, label, score = (each.clone() for each in first)
    stale, count = torch.zeros(len(rows)), len(rows)
    left_over = _STEPS
    while left_over > 0:
        left_over -= 1
        if bool((score <= inside**2).any()):  # a few more steps: a neighbouring d may differ very little
            left_over = min(left_over, _FINISH)
        tried = _changed(rows, draw(count), owner, numbers, len(columns), generator)
        if within is not None and bool(numbers.all()):
            tried = base + (tried - base) @ across @ across.T
        tried_label = label
        if labels > 2:
            changes = torch.rand(count, generator=generator) < _OTHER_LABEL
            tried_label = torch.where(changes, torch.randint(labels, (count,), generator=generator), label)
        reached = share(tried, tried_label)
        better = reached < score
        rows, label = torch.where(better[:, None], tried, rows), torch.where(better, tried_label, label)
        score, stale = torch.minimum(score, reached), torch.where(better, 0, stale + 1)
        old = ((stale > _STALE) & (score > inside**2)).nonzero()[:, 0]
        if len(old):
            rows[old], stale[old] = draw(len(old)), 0
            score[old] = share(rows[old], label[old])
    return rows[score <= inside**2].double().numpy()


def _best(pool: Tensor, share: Callable[[Tensor, Tensor], Tensor], labels: int) -> tuple[Tensor, Tensor, Tensor]:
    """The public rows to begin with: those whose d is nearest to the space, with their labels and shares."""
    of_labels = [share(pool, torch.full((len(pool),), each)) for each in range(labels if labels > 2 else 1)]
    score, label = torch.stack(of_labels).min(0)
    chosen = score.argsort()[:_CHAINS]
    return pool[chosen], label[chosen], score[chosen]


def _changed(
    rows: Tensor, source: Tensor, owner: Tensor, numbers: Tensor, columns: int, generator: torch.Generator
) -> Tensor:
    """Rows with one or two cells taken from the source, or moved by a random step of any size."""
    count = len(rows)
    cells = torch.randint(columns, (count, 2), generator=generator)
    second = torch.rand(count, generator=generator) < _TWO_CELLS
    change = (owner == cells[:, :1]) | ((owner == cells[:, 1:]) & second[:, None])
    size = 10 ** (-2 * torch.rand(count, 1, generator=generator))
    moved = rows + size * torch.randn(count, 1, generator=generator)
    small = (torch.rand(count, 1, generator=generator) < 0.5) & numbers
    mixed = torch.rand(count, 1, generator=generator) < _MIXED * float(numbers.double().mean())
    blended = torch.where(numbers, rows + size * (source - rows), rows)
    return torch.where(mixed, blended, torch.where(change, torch.where(small, moved, source), rows))
