from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcdp.data import load_file
from fedcdp.data.prepare import stratified_split
from fedcdp.errors import DataError

LABELS = np.arange(20) % 2


def npz(tmp_path: Path, **arrays: Any) -> Path:
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays)
    return path


def csv(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return path


def together(path: Path, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """All records of the file in the order of their first value, with their labels."""
    splits = load_file(path, **options)
    inputs = torch.cat([splits.train.inputs, splits.validation.inputs])
    order = inputs.flatten(1)[:, 0].argsort()
    return inputs[order], torch.cat([splits.train.targets, splits.validation.targets])[order].tolist()


@pytest.mark.parametrize("pair", ["x y", "X y", "inputs targets", "images labels", "data target"])
def test_any_usual_pair_of_array_names_is_read(tmp_path: Path, pair: str) -> None:
    values = np.arange(60, dtype=np.float64).reshape(20, 3)
    inputs, labels = together(npz(tmp_path, **dict(zip(pair.split(), (values, LABELS), strict=True)), extra=[1]))
    np.testing.assert_array_equal(inputs, values)
    assert labels == LABELS.tolist()


def test_a_fifth_is_for_validation_and_each_class_is_in_proportion(tmp_path: Path) -> None:
    splits = load_file(npz(tmp_path, x=np.zeros((20, 3)), y=LABELS))
    assert splits.name == "mine"
    assert splits.test is None
    assert torch.bincount(splits.train.targets).tolist() == [8, 8]
    assert torch.bincount(splits.validation.targets).tolist() == [2, 2]
    assert splits.normalisation == "inputs as in the file"


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_side_has_at_least_one_record(tmp_path: Path, fraction: float) -> None:
    splits = load_file(npz(tmp_path, x=np.zeros((20, 3)), y=LABELS), validation_fraction=fraction)
    assert {len(splits.train), len(splits.validation)} == {1, 19}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ((20, 28, 30), (1, 28, 30)),
        ((20, 28, 30, 3), (3, 28, 30)),
        ((20, 28, 30, 1), (1, 28, 30)),
        ((20, 3, 28, 30), (3, 28, 30)),
        ((20, 28, 30, 4), (28, 30, 4)),
        ((20, 7), (7,)),
    ],
)
def test_images_get_their_channels_first(tmp_path: Path, stored: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert load_file(npz(tmp_path, x=np.zeros(stored), y=LABELS)).train.shape == expected


def test_channels_last_pixels_keep_their_place(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).normal(size=(20, 4, 5, 3))
    pixels[:, 0, 0, 0] = np.arange(20)
    inputs, _ = together(npz(tmp_path, x=pixels, y=LABELS))
    np.testing.assert_allclose(inputs, pixels.transpose(0, 3, 1, 2).astype(np.float32))


def test_images_of_bytes_are_scaled_and_tables_of_bytes_are_not(tmp_path: Path) -> None:
    images = load_file(npz(tmp_path, x=np.full((20, 4, 4), 255, np.uint8), y=LABELS))
    assert images.train.inputs.unique().tolist() == [1]
    assert "divided by 255" in images.normalisation
    table = load_file(npz(tmp_path, x=np.full((20, 4), 255, np.uint8), y=LABELS))
    assert table.train.inputs.unique().tolist() == [255]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.array([5, -1, 5, 7]), [1, 0, 1, 2]),
        (np.array([1.0, 0.0, 1.0, 3.0]), [1, 0, 1, 2]),
        (np.array([True, False, True, True]), [1, 0, 1, 1]),
        (np.array(["b", "a", "b", "c"]), [1, 0, 1, 2]),
        (np.array(["10", "9", "10", "11"]), [1, 0, 1, 2]),
        (np.array([[1], [0], [1], [2]]), [1, 0, 1, 2]),
    ],
)
def test_classes_are_numbered_by_value_or_alphabet(tmp_path: Path, labels: np.ndarray, classes: list[int]) -> None:
    assert together(npz(tmp_path, x=np.arange(4.0)[:, None], y=labels))[1] == classes


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_inputs_that_are_not_finite_are_refused_by_record(tmp_path: Path, bad: float) -> None:
    values = np.zeros((20, 3))
    values[7, 1] = bad
    with pytest.raises(DataError, match=r"mine\.npz holds a NaN, an infinity or .* record 7"):
        load_file(npz(tmp_path, x=values, y=LABELS))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": [1], "b": [2]}, "holds the arrays a, b: name them x/y, inputs/targets"),
        ({"x": np.zeros((19, 3)), "y": LABELS}, "19 inputs but 20 labels"),
        ({"x": np.zeros(20), "y": LABELS}, r"inputs of shape \(20,\)"),
        ({"x": np.zeros((20, 0)), "y": LABELS}, r"inputs of shape \(20, 0\)"),
        ({"x": np.array([["a"]] * 20), "y": LABELS}, "inputs of type <U1"),
        ({"x": np.zeros((20, 3)), "y": np.zeros((20, 2))}, r"labels of shape \(20, 2\)"),
        ({"x": np.zeros((20, 3)), "y": LABELS + 0.5}, "column 'y': labels are numbers that are not whole"),
        ({"x": np.zeros((20, 3)), "y": np.full(20, np.inf)}, "column 'y': labels are numbers that are not whole"),
        ({"x": np.zeros((20, 3)), "y": LABELS.astype("M8[s]")}, "labels of type datetime64"),
        ({"x": np.zeros((20, 3)), "y": np.zeros(20, int)}, "1 class: at least two are needed"),
        ({"x": np.array([[None]] * 20), "y": LABELS}, "cannot be read as a .npz file: Object arrays"),
    ],
)
def test_arrays_that_are_no_dataset_are_refused_by_name(tmp_path: Path, arrays: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"mine.npz.*{message}"):
        load_file(npz(tmp_path, **arrays))


def test_standardising_uses_and_names_training_statistics_alone(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(3, 2, size=(20, 3))
    before = load_file(npz(tmp_path, x=values, y=LABELS), standardise=True, split_seed=5)
    torch.testing.assert_close(before.train.inputs.mean(dim=0), torch.zeros(3), atol=1e-6, rtol=0)
    assert "over the training data, statistics that are not covered by any ε" in before.normalisation
    _, validation = stratified_split(LABELS, 4, seed=5)
    values[validation] += 1000
    after = load_file(npz(tmp_path, x=values, y=LABELS), standardise=True, split_seed=5)
    assert torch.equal(before.train.inputs, after.train.inputs)
    assert not torch.equal(before.validation.inputs, after.validation.inputs)


@pytest.mark.parametrize("name", ["label", "Target", "Y", "CLASS"])
def test_a_csv_label_column_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    inputs, labels = together(csv(tmp_path, f"a,{name},b\n1,yes,2\n\n3,no,4.5\n5,yes,-6e1\n"))
    assert inputs.tolist() == [[1, 2], [3, 4.5], [5, -60]]
    assert labels == [1, 0, 1]


def test_otherwise_the_last_csv_column_is_the_label(tmp_path: Path) -> None:
    inputs, labels = together(csv(tmp_path, "\ufeffa, b, kind\n1,2,9\n3,4,10\n5,6,9\n"))
    assert inputs.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert labels == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,label\n1,2,0\n1,x,1\n", "line 3, column 'b': there is no finite number"),
        ("a,b,label\n1,,0\n1,2,1\n", "line 2, column 'b': the value is missing; --missing indicator"),
        ("label,b\n0,nan\n1,2\n", "line 2, column 'b': the value is missing; --missing indicator"),
        ("a,label\ninf,0\n1,1\n", "line 2, column 'a': there is no finite number"),
        ("a,label\n1e300,0\n1,1\n", "line 2, column 'a': there is no finite number"),
        ("a,label\n1_000,0\n1,1\n", "line 2, column 'a': there is no finite number"),
        ("a,label\n1,0\n2, \n", "line 3, column 'label': the label is missing"),
        ("a,b,label\n1,2,0\n1,2\n", "line 3: 2 values instead of 3"),
        ("a,label\n", "has a header row but no records"),
        ("label\n1\n", "needs a header row"),
        ("", "needs a header row"),
        ("a,label\n1,0\n", "1 class: at least two are needed"),
    ],
)
def test_a_bad_csv_is_refused_with_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_file(csv(tmp_path, text))
    assert "mine.csv" in str(caught.value)
    assert message in str(caught.value)


def test_a_csv_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(b"a,label\n\xff\xfe,1\n")
    with pytest.raises(DataError, match=r"mine\.csv cannot be read"):
        load_file(tmp_path / "mine.csv")


@pytest.mark.parametrize(("name", "message"), [("mine.xlsx", "is not a .npz, .csv or"), ("no.csv", "not exist")])
def test_a_file_of_another_kind_or_none_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_file(tmp_path / name)


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan")])
def test_a_validation_fraction_outside_0_to_1_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(DataError, match="validation_fraction is"):
        load_file(npz(tmp_path, x=np.zeros((20, 3)), y=LABELS), validation_fraction=fraction)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=64) | st.binary(max_size=40).map(lambda tail: b"PK\x03\x04" + tail))
def test_random_bytes_in_a_file_give_a_data_error(tmp_path: Path, content: bytes) -> None:
    for name in ("noise.npz", "noise.csv", "noise.parquet"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError):
            load_file(tmp_path / name)
