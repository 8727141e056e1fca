"""The columns behind a table's inputs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcdp
from fedcdp.data.input_columns import MISSING, OTHER, InputColumn, columns_of_schema, infer_columns, named_columns
from fedcdp.data.table_schema import TableSchema


def test_numbers_come_first_then_categories() -> None:
    columns = named_columns(["age", "hours"], {"sex": ["f", "m"], "colour": ["r", "g", "b"]}, may_be_empty=True)
    assert [(column.name, column.inputs) for column in columns] == [
        ("age", slice(0, 1)), ("hours", slice(1, 2)), ("sex", slice(2, 4)), ("colour", slice(4, 7)),
    ]  # fmt: skip
    assert [column.choices() for column in columns] == [1, 1, 3, 4]
    assert columns[2].say(1) == "m"
    assert columns[2].say(2) == MISSING


def test_a_frame_with_missing_values_names_every_input() -> None:
    frame = {
        "ward": list("AB") * 30, "age": [40.0, float("nan"), 60.0] * 20, "sex": ["f", "m", ""] * 20, "ill": [0, 1] * 30,
    }  # fmt: skip
    federation = fedcdp.Federation.from_frame(
        frame, client="ward", label="ill", task="binary", categories={"sex": ["f", "m"]}, ranges={"age": (0, 100)},
        missing="indicator",
    )  # fmt: skip
    columns = federation.train.columns
    assert columns is not None
    assert [column.name for column in columns] == ["age", f"age {MISSING}", "sex"]
    assert columns[2].values == ("f", "m", OTHER, MISSING)
    inputs = federation.train.tensor
    assert inputs.shape[1] == columns[-1].inputs.stop
    assert bool((inputs[:, columns[2].inputs].sum(1) == 1).all())


def test_numbers_of_a_schema_are_single_inputs() -> None:
    columns = columns_of_schema(TableSchema((("age", (0.0, 99.0)), ("dose", None), ("sex", ("f", "m"))), (("y", None),)))
    assert columns == (InputColumn("age", 0), InputColumn("dose", 1), InputColumn("sex", 2, ("f", "m", OTHER)))


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 1000))
def test_one_hot_blocks_are_found_in_the_rows(widths: list[int], numbers: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    parts = [draws.normal(size=(200, numbers))] if numbers else []
    parts += [np.eye(width)[np.concatenate([np.arange(width), draws.integers(width, size=200 - width)])] for width in widths]
    for part in parts[numbers > 0 :]:
        draws.shuffle(part)
    columns = infer_columns(torch.from_numpy(np.concatenate(parts, axis=1)).float())
    assert [column.width for column in columns if not column.is_number] == widths
    assert sum(column.is_number for column in columns) == numbers
    assert not any(column.may_be_empty for column in columns)


def test_columns_go_when_other_inputs_take_their_place() -> None:
    columns = named_columns(["a", "b"], {})
    assert fedcdp.Dataset(torch.zeros(4, 2), torch.arange(4) % 2, columns=columns).columns == columns
    assert fedcdp.Dataset(torch.zeros(4, 3), torch.arange(4) % 2, columns=columns).columns is None


def test_the_benchmarks_name_their_columns() -> None:
    columns = fedcdp.load("cancer", quiet=True).train.columns
    assert columns is not None
    assert len(columns) == 30
    assert columns[0].name == "mean radius"
    assert columns[29].name == "worst fractal dimension"
