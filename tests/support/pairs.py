"""Parametrise by pairs of values instead of by every combination."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**choices: Any) -> list[tuple[Any, ...]]:
    """Combinations, in the order of the choices, in which every two values of different choices occur together.

    Greedy, so not always the fewest; the same choices give the same combinations.
    """
    every = list(product(*(list(enumerate(values)) for values in choices.values())))
    places = [tuple(index for index, _ in each) for each in every]
    uncovered = {pair for place in places for pair in _pairs(place)}
    chosen: list[int] = []
    while uncovered:
        best = max(range(len(places)), key=lambda number: len(uncovered & _pairs(places[number])))
        uncovered -= _pairs(places[best])
        chosen.append(best)
    return [tuple(value for _, value in every[number]) for number in sorted(chosen)]


def pairs_first(**choices: Any) -> list[Any]:
    """Every combination for `pytest.mark.parametrize`; all that `pairwise` does without are marked slow."""
    quick = pairwise(**choices)
    every = product(*choices.values())
    return [pytest.param(*each, marks=[] if each in quick else pytest.mark.slow) for each in every]


def sample_first(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """The values for `pytest.mark.parametrize`; all but the first `quick` ones are marked slow."""
    return [pytest.param(value, marks=[] if at < quick else pytest.mark.slow) for at, value in enumerate(values)]


def _pairs(place: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Which values of which choices a combination brings together; with a single choice, its value."""
    return set(combinations(enumerate(place), min(2, len(place))))
