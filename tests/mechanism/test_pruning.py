from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fedcdp.files.tree import Layout
from fedcdp.mechanism.pruning import keep_largest

LAYOUT = Layout({"w": torch.Size([2, 3]), "b": torch.Size([4])}, ())


def update_of(rows: list[list[float]]) -> dict[str, torch.Tensor]:
    return LAYOUT.unflatten(torch.tensor(rows))


def sent(rows: list[list[float]], fraction: float) -> list[list[float]]:
    return LAYOUT.flatten(keep_largest(update_of(rows), LAYOUT, fraction), lead=1).tolist()


def test_the_largest_magnitudes_over_the_whole_update_are_kept_as_they_are():
    row = [1.0, -9.0, 2.0, 3.0, -4.0, 0.5, 8.0, -7.0, 0.1, 6.0]
    assert sent([row], 0.4) == [[0, -9, 0, 0, 0, 0, 8, -7, 0, 6]]


def test_clients_are_judged_one_by_one():
    small, large = [0.01 * i for i in range(10)], [100.0 * i for i in range(10)]
    kept = sent([small, large], 0.2)
    assert kept == [pytest.approx([0] * 8 + small[8:]), pytest.approx([0] * 8 + large[8:])]


def test_among_equal_magnitudes_the_earlier_coordinates_are_kept():
    assert sent([[1.0, -1.0] * 5], 0.3) == [[1, -1, 1, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("fraction", [1e-9, 0.04, 0.1])
def test_at_least_one_entry_is_kept(fraction):
    assert sent([[1.0, 5.0, 2.0, 0, 0, 0, 0, 0, 0, 0]], fraction) == [[0, 5, 0, 0, 0, 0, 0, 0, 0, 0]]


def test_keeping_everything_changes_nothing():
    row = torch.randn(3, 10).tolist()
    assert sent(row, 1.0) == row


def test_an_update_of_zeros_stays_zero():
    assert sent([[0.0] * 10], 0.5) == [[0.0] * 10]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    rows=st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=10, max_size=10), min_size=1, max_size=3),
    fraction=st.floats(0, 1, exclude_min=True),
)
def test_no_dropped_entry_is_larger_than_a_kept_one_and_the_number_kept_is_right(rows, fraction):
    for row, kept in zip(rows, sent(rows, fraction), strict=True):
        assert all(after in (before, 0) for before, after in zip(row, kept, strict=True))
        dropped = [abs(before) for before, after in zip(row, kept, strict=True) if before != after]
        left = [abs(after) for before, after in zip(row, kept, strict=True) if before == after and after != 0]
        assert max(dropped, default=0) <= min(left, default=float("inf"))
        assert len(dropped) <= 10 - max(1, round(10 * fraction))
        assert len(left) <= max(1, round(10 * fraction))


def test_a_network_with_a_scalar_weight_can_be_pruned():
    model = nn.Linear(3, 1, bias=False)
    model.scale = nn.Parameter(torch.tensor(1.0))
    layout = Layout.of(model)
    update = {"weight": torch.tensor([[[1.0, 5.0, 2.0]]]), "scale": torch.tensor([-9.0])}
    kept = keep_largest(update, layout, 0.5)
    assert kept["weight"].tolist() == [[[0, 5, 0]]]
    assert kept["scale"].tolist() == [-9]
