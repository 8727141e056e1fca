from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcdp.data.prepare import random_split, seeded_order, stratified_split
from fedcdp.errors import DataError

labels_and_validation_count = st.lists(st.integers(0, 5), min_size=2, max_size=60).flatmap(
    lambda labels: st.tuples(st.just(np.array(labels)), st.integers(1, len(labels) - 1))
)


def test_a_seed_names_the_same_order_for_good() -> None:
    assert seeded_order(10, seed=0).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]


def test_different_seeds_give_different_orders() -> None:
    assert seeded_order(100, seed=1).tolist() != seeded_order(100, seed=2).tolist()


@given(count=st.integers(2, 200), seed=st.integers(0, 2**64), data=st.data())
def test_a_random_split_covers_every_record_once(count: int, seed: int, data: st.DataObject) -> None:
    validation_count = data.draw(st.integers(1, count - 1))
    train, validation = random_split(count, validation_count, seed)
    assert len(validation) == validation_count
    assert sorted([*train, *validation]) == list(range(count))


@given(case=labels_and_validation_count, seed=st.integers(0, 1000))
def test_a_stratified_split_shares_out_each_class_to_within_one_record(case: tuple[np.ndarray, int], seed: int) -> None:
    labels, validation_count = case
    train, validation = stratified_split(labels, validation_count, seed)
    assert len(validation) == validation_count
    assert sorted([*train, *validation]) == list(range(len(labels)))
    for label in set(labels.tolist()):
        share = (labels == label).sum() * validation_count / len(labels)
        assert abs((labels[validation] == label).sum() - share) <= 1


@given(case=labels_and_validation_count, seed=st.integers(0, 1000))
def test_rounding_leaves_every_class_a_training_record_where_it_can(case: tuple[np.ndarray, int], seed: int) -> None:
    labels, validation_count = case
    train, _ = stratified_split(labels, validation_count, seed)
    classes = len(set(labels.tolist()))
    sizes = np.unique(labels, return_counts=True)[1]
    shares = sizes * validation_count // len(labels)
    spare = int((sizes - 1 - shares > 0).sum())
    if validation_count - shares.sum() <= spare:
        assert len(set(labels[train].tolist())) == classes


@pytest.mark.parametrize("validation_count", [0, 5, 6])
def test_a_split_with_an_empty_side_is_refused(validation_count: int) -> None:
    with pytest.raises(DataError, match="both sides need at least one record"):
        random_split(5, validation_count, seed=0)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(DataError, match="split_seed is -1"):
        seeded_order(5, seed=-1)
