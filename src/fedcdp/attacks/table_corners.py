"""Corners: points of zeros and ones in the row space of a gradient.

The rows of a batch lie in the row space, and their categories are 0 or 1, so they are corners of the polytope 0 ≤ x ≤ 1 in
that space. A linear program finds the corner that is nearest to a public row. The next programs look for the corner that is
nearest to the last one. This increases Σ x² until all categories are 0 or 1, or a corner in between is reached.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcdp.data.input_columns import InputColumns

Array = NDArray[np.float64]

_SOFT = 0.05  # largest distance of a category from 0 or 1
_SLACK = 1e-3  # by which a corner may leave the polytope
_STARTS, _MOVES = 24, 8  # corners to look for; programs for each
_POINTS = 128  # tried on the line of points that share their categories
_BEYOND = 0.5  # of a number's public range: how far a private value may lie outside it


def affine_span(gradient: Array, taken: Array, missing: int, one: Array, inputs: int) -> tuple[Array, Array] | None:
    """The affine space of the `missing` rows, as a point [n] and directions [missing − 1, n].

    The d of the other rows are `taken` [units, k]. Every row has inner product 1 with `one`. None if no point has.
    """
    space = np.linalg.svd(gradient - taken @ (taken.T @ gradient), full_matrices=False)[2][:missing]
    along = space @ one
    if not along.any():
        return None
    base = (along / (along @ along)) @ space[:, :inputs]
    return base, np.linalg.svd(along[None], full_matrices=True)[2][1:] @ space[:, :inputs]


def corners(within: tuple[Array, Array], columns: InputColumns, public: Array, draws: np.random.Generator) -> Array:
    """Points [k, n] whose categories are zeros and ones in an affine space.

    Where the categories of a point determine its numbers, so they are; where they leave one line of points, several of it
    are returned; otherwise none.
    """
    from scipy.optimize import linprog

    base, moves = within
    inputs, missing = len(base), 1 + len(moves)
    nothing = np.zeros((0, inputs))
    category = np.zeros(inputs, dtype=bool)
    for column in columns:
        category[column.inputs] = not column.is_number
    if missing == 1:
        return np.where(category, base.round(), base)[None]
    _, values, right = np.linalg.svd(moves[:, category].T, full_matrices=True)
    sure = int((values > 1e-4 * values.max(initial=0)).sum())
    if sure < missing - 2:
        return nothing
    low, high = public.min(0), public.max(0)
    low, high = low - _BEYOND * (high - low), high + _BEYOND * (high - low)
    low[category], high[category] = 0, 1
    inside = np.concatenate([moves, -moves], axis=1).T, np.concatenate([high - base, base - low]) + _SLACK
    found = []
    for _ in range(_STARTS):
        point = base
        wanted = np.where(category, public[draws.integers(len(public))] - 0.5, 0.0)
        for move in range(_MOVES):
            answer = linprog(-(moves @ wanted), A_ub=inside[0], b_ub=inside[1], bounds=(None, None), method="highs")
            if answer.status != 0:
                break
            corner = base + answer.x @ moves
            if move and (corner[category] ** 2).sum() <= (point[category] ** 2).sum() + 1e-6:
                break
            point, wanted = corner, np.where(category, corner - 0.5, 0.0)
        if np.abs(point[category] - point[category].round()).max(initial=0.0) < _SOFT:
            found += _with_these_categories(point, moves, right[:sure], right[sure:], category, low, high)
    return np.unique(np.array(found).reshape(-1, inputs), axis=0)


def _with_these_categories(
    point: Array, moves: Array, sure: Array, free: Array, category: NDArray[np.bool_], low: Array, high: Array
) -> list[Array]:
    """The point of the span with exactly these categories, or several on the line of such points."""
    exact = np.where(category, point.round(), point)
    change = np.linalg.lstsq((sure @ moves)[:, category].T, (exact - point)[category], rcond=None)[0]
    number = ~category
    exact[number] += (change @ sure @ moves)[number]
    found = [exact]
    for way in (free @ moves)[:, number]:
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.sort(np.stack([(low[number] - exact[number]) / way, (high[number] - exact[number]) / way]), axis=0)
        for step in np.linspace(np.nanmax(ends[0]), np.nanmin(ends[1]), _POINTS):
            found.append(exact.copy())
            found[-1][number] += step * way
    return found
