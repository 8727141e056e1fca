"""Rows as free values, cell scores, and the whitened metric."""

from __future__ import annotations

import csv
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcdp.attacks.table_metric import WhitenedMetric
from fedcdp.attacks.table_rows import RowSpace, decode, encode
from fedcdp.attacks.table_scores import score_cells
from tests.support.small_tables import COLUMNS, rows


def test_cells_make_the_rows_they_were_read_from() -> None:
    given_rows = rows(50)
    assert torch.equal(encode(decode(given_rows, COLUMNS), COLUMNS), given_rows)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_relaxed_rows_are_shares_of_categories(seed: int) -> None:
    public = rows(100)
    space = RowSpace.of(COLUMNS, public)
    free = space.begin(public, (3, 4), torch.Generator().manual_seed(seed))
    relaxed = space.rows(free)
    assert relaxed.shape == (3, 4, 26)
    for column in COLUMNS[2:]:
        filled = relaxed[..., column.inputs].sum(-1)
        assert bool(((filled > 0) & (filled < 1)).all())  # the rest is the share of "missing"
    assert bool((space.kept(1e9 * free)[..., :2] <= space.high[:2]).all())


def test_free_values_of_rows_give_these_rows() -> None:
    public = rows(80)
    space = RowSpace.of(COLUMNS, public)
    assert torch.equal(decode(space.rows(space.free_of(public)), COLUMNS), decode(public, COLUMNS))


def test_frequent_rows_are_less_surprising() -> None:
    public = rows(300)
    space = RowSpace.of(COLUMNS, public)
    cells = torch.tensor([[0.0, 0, 0, 0, 0, 0], [0, 0, 5, 5, 5, 5]])
    usual, odd = space.surprise(space.free_of(encode(cells, COLUMNS)))
    assert float(usual) < float(odd)


# Scores ---------------------------------------------------------------------------------------------------------------


def test_the_truth_in_any_order_is_right_in_every_cell() -> None:
    truth = rows(12).view(2, 6, 26)
    present = torch.ones(2, 6, dtype=torch.bool)
    present[1, 4:] = False
    shuffled = truth.clone()
    shuffled[0], shuffled[1, :4] = truth[0, torch.randperm(6)], truth[1, [3, 0, 2, 1]]
    found = score_cells(shuffled, truth, present, COLUMNS, rows(200, seed=1))
    assert (found.cells_right, found.rows_right) == (1.0, 1.0)
    assert not bool(found.right[1, 4:].any())


def test_one_wrong_cell_spoils_its_row_only() -> None:
    truth, present = rows(5)[None], torch.ones(1, 5, dtype=torch.bool)
    cells = decode(truth, COLUMNS)
    cells[0, 2, 3] = (cells[0, 2, 3] + 1) % 7
    found = score_cells(encode(cells, COLUMNS), truth, present, COLUMNS, rows(200, seed=1))
    assert found.cells_right == pytest.approx(29 / 30)
    assert found.rows_right == pytest.approx(4 / 5)
    assert found.summary()["columns_right"]["town"] == pytest.approx(4 / 5)


def test_numbers_are_right_within_the_tolerance() -> None:
    public, truth = rows(2000, seed=1), rows(1)[None]
    spread = float(public[:, 0].std(correction=0))
    for off, right in ((0.31, 1.0), (0.33, 5 / 6)):
        near = truth.clone()
        near[..., 0] += off * spread
        found = score_cells(near, truth, torch.ones(1, 1, dtype=torch.bool), COLUMNS, public)
        assert found.cells_right == pytest.approx(right)


def test_the_mode_beats_a_row_of_rare_values() -> None:
    truth, present = rows(60)[:, None], torch.ones(60, 1, dtype=torch.bool)
    rare = encode(torch.tensor([4.0, 4, 5, 5, 5, 5]), COLUMNS).expand_as(truth)
    found = score_cells(rare, truth, present, COLUMNS, rows(500, seed=1))
    assert found.cells_right < 0.1 < found.baselines["mode"][0] < 0.5
    assert found.baselines["marginals"][0] < found.baselines["mode"][0]


def test_the_file_has_each_row_true_and_found() -> None:
    truth = rows(3)[None]
    found = score_cells(truth, truth, torch.ones(1, 3, dtype=torch.bool), COLUMNS, rows(100, seed=1))
    lines = list(csv.DictReader(io.StringIO(found.as_csv())))
    assert [line["which"] for line in lines] == ["true", "found"] * 3
    assert lines[0]["job"] == lines[1]["job"] != ""
    assert lines[1]["cells right"] == "6"


# Metric ---------------------------------------------------------------------------------------------------------------


def test_the_metric_sees_small_directions() -> None:
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(20, 20)).Q, torch.linalg.qr(torch.randn(30, 30)).Q
    values = torch.tensor([1.0, 0.03])
    seen = {"a.weight": (left[:, :2] * values @ right[:, :2].T)[None], "a.bias": torch.zeros(1, 20)}
    metric = WhitenedMetric.of(seen)
    without = [{**seen, "a.weight": (left[:, [keep]] * values[keep] @ right[:, [keep]].T)[None]} for keep in (0, 1)]
    small, large = (float(metric.between(each)) for each in without)
    assert float(metric.between(seen)) == pytest.approx(0, abs=1e-6)
    assert small > 0.02 * large  # in the squared distance: 0.0009


def test_entries_that_were_not_shared_are_not_compared() -> None:
    torch.manual_seed(0)
    seen = {"a.weight": torch.randn(2, 5, 7), "a.bias": torch.randn(2, 5), "b": torch.randn(2, 3)}
    shared = {name: value * (value > 0) for name, value in seen.items()}
    assert WhitenedMetric.of(shared, shared_only=True).between(seen).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert float(WhitenedMetric.of(shared).between(seen).min()) > 0.1
