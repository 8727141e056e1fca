"""Exact rows of a table from the gradient of a dense first layer, found one at a time in the spaces of the gradient.

Over a batch, the gradient of a layer z = Wx + b is [dW | db] = Dᵀ[X | 1], where D = dL/dZ has one row per example. While the
layer has more units than the batch has examples, two facts hold for every example by itself:

- d lies in the column space of the gradient. The network's weights give d for any row and label, and behind a ReLU all rows
  that open the same units have the same d. `table_climb` changes public rows cell by cell until their d lies in the space.
- [x | 1] lies in the row space. There, rows of a table are rare points: their categories are 0 or 1. `table_corners` finds
  such points, and their d tells those of the batch from all others.

A row that is found is removed: the gradient, projected on the complement of its d, has the row space of the other rows. So
each row makes the next one easier. Once all are found, least squares gives them to rounding. Clipping and weighting scale
each d, and change neither space. This is no part of TabLeak (Vero et al., 2023), whose search follows it. It shares the
first fact, and the last step, with SPEAR (`analytic.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.attacks.table_climb import Directions, climb
from fedcdp.attacks.table_corners import affine_span, corners
from fedcdp.data.input_columns import InputColumns
from fedcdp.mechanism.randomness import numpy_generator

Array = NDArray[np.float64]

_NOISE = 1e-4  # of the largest singular value: larger ones beyond the number of examples are noise
_RANK = 10.0  # times the rounding: least singular value
_INSIDE = 3e-3  # largest share of a d outside the column space
_NEW = 0.03  # least share of a d outside the span of those that were found
_CLEAR = 5.0  # times the median share: what fits worse is doubted
_IDLE = 4  # attempts of both kinds in a row without a row
_LARGEST = 512  # units of the largest layer that is tried


@dataclass(frozen=True)
class SolvedRows:
    """The rows that were found. `complete`: all of them, solved to rounding; else numbers may be rough."""

    rows: Tensor
    """[k, n]."""
    labels: Tensor
    """[k]: the label whose d fits; 0 where the rows have no classes."""
    complete: bool


@dataclass
class _Search:
    """The spaces of a gradient [units, n (+ 1)], and the rows found so far."""

    gradient: Array
    one: Array
    """[n (+ 1)]: has inner product 1 with every row: the input of the bias, or a category that is never empty."""
    left: Array
    """[units, rank]: an orthonormal basis of the column space."""
    inverse: Array
    """[n (+ 1), units]: the pseudo-inverse."""
    directions: Directions
    labels: int
    rows: list[Array]
    found: list[tuple[int, Array]]
    """The label and d of each row found."""
    taken: Array
    """[units, k]: an orthonormal basis of the d found."""
    inside: float = _INSIDE
    """The largest share of a d outside the column space."""

    @property
    def missing(self) -> int:
        return int(self.left.shape[1]) - int(self.taken.shape[1])

    def within(self, inputs: int) -> tuple[Array, Array] | None:
        """The affine space of the rows that are still missing; None if there are none."""
        return affine_span(self.gradient, self.taken, self.missing, self.one, inputs) if self.missing else None

    def admit(self, rows: Array) -> bool:
        """Keep the rows whose d lies in the column space and is new; whether there is one."""
        before = len(self.rows)
        if not len(rows):
            return False
        share, label, shown = self._best(rows)
        for place in np.argsort(share):
            size = np.linalg.norm(shown[place])
            new = shown[place] - self.taken @ (self.taken.T @ shown[place])
            if share[place] > self.inside or np.linalg.norm(new) < _NEW * size or not self.missing:
                continue
            self.taken = np.concatenate([self.taken, (new / np.linalg.norm(new))[:, None]], axis=1)
            self.rows.append(rows[place])
            self.found.append((int(label[place]), shown[place]))
        return len(self.rows) > before

    def drop_doubtful(self) -> bool:
        """Forget rows whose d fits much worse than the others', and be stricter from now on; whether there are any.

        Next to the units that an example opens, there are often others that change d very little.
        """
        if not self.rows:
            return False
        rows, share = np.stack(self.rows), self._best(np.stack(self.rows))[0]
        stricter = _CLEAR * float(np.median(share))
        if stricter >= self.inside or (share <= stricter).all():
            return False
        self.inside, self.rows, self.found, self.taken = stricter, [], [], self.taken[:, :0]
        self.admit(rows)
        return True

    def _best(self, rows: Array) -> tuple[Array, NDArray[np.int64], Array]:
        """For each row the share of its d outside the column space, for the label that fits best; that label; its d."""
        given = torch.from_numpy(rows).float()
        of_labels = []
        for label in range(self.labels):
            shown = self.directions(given, torch.full((len(given),), label)).double().cpu().numpy()
            size = np.linalg.norm(shown, axis=1)
            rest = np.linalg.norm(shown - (shown @ self.left) @ self.left.T, axis=1)
            share = np.where(size > 0, rest / np.where(size > 0, size, 1), 1.0)
            # The weight of d xᵀ in the gradient G is 1 / (xᵀ G⁺ d). It is positive for the right label.
            whole = np.concatenate([rows, np.ones((len(rows), len(self.one) - rows.shape[1]))], axis=1)
            weight = ((whole @ self.inverse) * shown).sum(1)
            of_labels.append((np.where(np.isfinite(share), share, 1.0) + (weight <= 0) * self.inside / 2, shown))
        shares = np.stack([share for share, _ in of_labels])
        label = shares.argmin(0)
        places = np.arange(len(rows))
        return shares[label, places], label, np.stack([shown for _, shown in of_labels])[label, places]

    def settled(self) -> tuple[Array, NDArray[np.int64]]:
        """The rows by least squares from all d, and their labels, whose weights are positive."""
        solved = np.linalg.lstsq(np.stack([d for _, d in self.found]).T, self.gradient, rcond=None)[0]
        weight = solved @ self.one
        rough = np.stack(self.rows)
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = (solved / weight[:, None])[:, : rough.shape[1]]
        exact = np.where(np.isfinite(exact).all(axis=1, keepdims=True), exact, rough)
        labels = np.array([label for label, _ in self.found])
        if self.labels == 2:  # both labels have the same d up to its sign
            labels = np.where(weight < 0, 1 - labels, labels)
        return exact, labels


def solve_rows(
    gradient: Tensor, examples: int, columns: InputColumns, public: Tensor, directions: Directions, *,
    labels: int, bias: bool, seed: int = 0, hints: Tensor | None = None,
) -> SolvedRows:  # fmt: skip
    """Find the rows behind a layer's gradient [units, n], or [units, n + 1] with a bias.

    `public` rows [N, n] are where the search begins, after rows that another attack found (`hints`). No gradient raises an
    error: under noise, or with more examples than units, nothing is found.
    """
    search = _opened(gradient, examples, columns, directions, labels, bias)
    if search is None:
        return SolvedRows(public.new_zeros(0, public.shape[1]), torch.zeros(0, dtype=torch.int64), complete=False)
    draws, inputs = numpy_generator(seed, "table-span"), public.shape[1]
    seen = np.abs(search.gradient).max(0)[:inputs] > np.finfo(np.float32).eps * np.abs(search.gradient).max()
    likely = _with_seen_categories(public.double().cpu().numpy(), columns, seen)
    if hints is not None:
        search.admit(hints.double().cpu().numpy())
    idle = 0
    while search.missing and idle < _IDLE:
        within = search.within(inputs)
        found = examples > 1 and search.admit(
            climb(search.left, search.taken, columns, likely, directions, labels, draws, inside=search.inside, within=within)
        )
        while (within := search.within(inputs)) is not None and search.admit(corners(within, columns, likely, draws)):
            found = True
        idle = 0 if found else idle + 1
        if idle == _IDLE - 1 and search.drop_doubtful():
            idle = 0
    if not search.rows:
        return SolvedRows(public.new_zeros(0, public.shape[1]), torch.zeros(0, dtype=torch.int64), complete=False)
    complete = not search.missing
    rows, chosen = search.settled() if complete else (np.stack(search.rows), np.array([each for each, _ in search.found]))
    return SolvedRows(torch.from_numpy(rows).to(public), torch.from_numpy(chosen), complete)


def _opened(
    gradient: Tensor, examples: int, columns: InputColumns, directions: Directions, labels: int, bias: bool
) -> _Search | None:
    """The search, if the gradient has the spaces of the examples; else None."""
    whole = gradient.detach().double().cpu().numpy()
    if examples >= len(whole) or len(whole) > _LARGEST or not np.isfinite(whole).all() or not whole.any():
        return None
    one = np.zeros(whole.shape[1])
    if bias:
        one[-1] = 1
    else:
        full = next((each for each in columns if not each.is_number and not each.may_be_empty), None)
        if full is None:
            return None
        one[full.inputs] = 1
    left, values, right = np.linalg.svd(whole, full_matrices=False)
    beyond = values[examples] if examples < len(values) else 0.0
    rounding = max(beyond, np.finfo(np.float32).eps * values[0])
    if rounding > _NOISE * values[0]:
        return None
    rank = int((values[:examples] > _RANK * rounding).sum())
    inverse = (right[:rank].T / values[:rank]) @ left[:, :rank].T
    return _Search(
        whole, one, left[:, :rank], inverse, directions, labels, rows=[], found=[], taken=np.zeros((len(whole), 0))
    )


def _with_seen_categories(public: Array, columns: InputColumns, seen: NDArray[np.bool_]) -> Array:
    """The public rows, less those with a category that no row of the batch has: its inputs have no gradient."""
    fits = np.ones(len(public), dtype=bool)
    for column in columns:
        if not column.is_number:
            fits &= ~(public[:, column.inputs] * ~seen[column.inputs]).any(1)
    return public[fits] if fits.any() else public
