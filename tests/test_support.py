"""The helpers of the tests do what the tests rely on."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.support.made_once import made_once
from tests.support.pairs import pairs_first, pairwise, sample_first

CHOICES = {"place": range(5), "when": ["before", "after"], "seeded": [True, False], "mode": ["a", "b", "c"]}


def test_every_pair_of_values_occurs() -> None:
    chosen = pairwise(**CHOICES)
    assert len(chosen) < 5 * 2 * 2 * 3 / 2
    assert len(set(chosen)) == len(chosen)
    for (one, first), (other, second) in combinations(enumerate(CHOICES.values()), 2):
        for pair in product(first, second):
            assert any((each[one], each[other]) == pair for each in chosen), pair


def test_one_choice_alone_is_whole() -> None:
    assert pairwise(place=range(3)) == [(0,), (1,), (2,)]


def test_every_combination_is_there_and_the_rest_is_slow() -> None:
    every = pairs_first(**CHOICES)
    assert [each.values for each in every] == list(product(*CHOICES.values()))
    quick = [each.values for each in every if not each.marks]
    assert quick == pairwise(**CHOICES)
    assert all(each.marks[0].name == "slow" for each in every if each.marks)


def test_all_but_the_first_values_are_slow() -> None:
    every = sample_first("abc", quick=2)
    assert [each.values for each in every] == [("a",), ("b",), ("c",)]
    assert [[mark.name for mark in each.marks] for each in every] == [[], [], ["slow"]]


def test_what_is_made_once_is_not_made_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    made: list[Path] = []

    def make(place: Path) -> None:
        place.write_text("made")
        made.append(place)

    first, second = (made_once(tmp_path_factory, f"once-{id(made)}", make) for _ in range(2))
    assert first == second
    assert made == [first]
