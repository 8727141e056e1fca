from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcdp.data import load
from fedcdp.data.datasets import adult
from fedcdp.data.prepare import random_split
from fedcdp.errors import DataError

FIRST = "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
MISSING = "18, ?, 103497, Some-college, 10, Never-married, ?, Own-child, White, Female, 0, 0, 30, "


def record(age: int, income: str = "<=50K") -> str:
    return FIRST.replace("39", str(age), 1) + f"United-States, {income}"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up Adult of 20 and 10 records in tmp_path/adult; record i is a person of age i."""
    monkeypatch.setattr(adult, "ROWS", {"adult.data": 20, "adult.test": 10})
    monkeypatch.setattr(adult, "VALIDATION_RECORDS", 7)
    folder = tmp_path / "adult"
    folder.mkdir()
    write(folder, list(range(30)))
    return folder


def write(folder: Path, ages: list[int]) -> None:
    train = "".join(record(age) + "\n" for age in ages[:20])
    test = "".join(record(age, ">50K.") + "\n" for age in ages[20:])
    (folder / "adult.data").write_text(train + "\n")
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + test + "\n")


def test_there_are_105_features_6_numeric_first() -> None:
    assert len(adult.FEATURES) == len(set(adult.FEATURES)) == 105
    sizes = {column: len(values) for column, values in adult.CATEGORIES.items()}
    assert list(sizes.values()) == [8, 16, 7, 14, 6, 5, 2, 41]
    assert all(values == sorted(values) for values in adult.CATEGORIES.values())
    assert list(sizes) == [column for column in adult.COLUMNS[:-1] if column not in adult.NUMERIC]


def test_a_record_becomes_numbers_then_one_hot_columns() -> None:
    features, labels = adult.parse_adult(f"{FIRST}Cuba, >50K.\n".encode(), "adult.test")
    assert labels.tolist() == [1]
    assert features[0, :6].tolist() == [39, 77516, 13, 2174, 0, 40]
    assert [adult.FEATURES[index] for index in np.flatnonzero(features[0, 6:]) + 6] == [
        "workclass=State-gov",
        "education=Bachelors",
        "marital-status=Never-married",
        "occupation=Adm-clerical",
        "relationship=Not-in-family",
        "race=White",
        "sex=Male",
        "native-country=Cuba",
    ]


def test_a_missing_value_is_all_zeros() -> None:
    features, _ = adult.parse_adult(f"{MISSING}?, <=50K\n".encode(), "adult.data")
    present = {adult.FEATURES[index].partition("=")[0] for index in np.flatnonzero(features[0, 6:]) + 6}
    assert present == set(adult.CATEGORIES) - {"workclass", "occupation", "native-country"}


def test_both_files_are_pooled_then_split(small: Path) -> None:
    splits = load("adult", small.parent)
    assert splits.train.inputs.shape == (23, 105)
    assert splits.validation.inputs.shape == (7, 105)
    assert sum(int(part.targets.sum()) for part in (splits.train, splits.validation)) == 10
    assert splits.train.inputs[:, 0].mean().abs() < 1e-6
    assert set(splits.train.inputs[:, 6:].unique().tolist()) == {0, 1}
    assert "pooled training split" in splits.normalisation
    assert "not covered by any ε" in splits.normalisation


def test_training_inputs_do_not_depend_on_validation_records(small: Path) -> None:
    before = load("adult", small.parent, split_seed=4)
    _, validation = random_split(30, 7, seed=4)
    write(small, [99 if age in validation else age for age in range(30)])
    after = load("adult", small.parent, split_seed=4)
    assert torch.equal(before.train.inputs, after.train.inputs)
    assert not torch.equal(before.validation.inputs, after.validation.inputs)


def test_gzip_files_serve_as_well(small: Path) -> None:
    plain = load("adult", small.parent)
    for path in list(small.iterdir()):
        (small / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert torch.equal(load("adult", small.parent).train.inputs, plain.train.inputs)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("39, State-gov", "line 2: 2 values instead of 15"),
        (record(39, "lots"), "line 2: 'lots' is not a value of income"),
        (record(39).replace("77516", "many"), "line 2: 'many' is not a value of fnlwgt"),
        (record(39).replace("77516", "?"), "line 2: '?' is not a value of fnlwgt"),
        (record(39).replace("White", "Green"), "line 2: 'Green' is not a value of race"),
        (record(39).replace("White", "Wh\xefte"), "is not a text file of the Adult dataset"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(line: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        adult.parse_adult(f"{record(39)}\n{line}\n".encode(), "adult.data")
    assert str(caught.value).startswith("adult.data")
    assert message in str(caught.value)


def test_a_truncated_file_is_refused_by_name(small: Path) -> None:
    path = small / "adult.data"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:15]))
    with pytest.raises(DataError, match=r"adult\.data holds 15 records: adult\.data has 20"):
        load("adult", small.parent)


@pytest.mark.full
def test_full_adult_has_the_published_counts(full_data: Path) -> None:
    splits = load("adult", full_data, download=False)
    assert splits.train.inputs.shape == (36_631, 105)
    assert splits.validation.inputs.shape == (12_211, 105)
    counts = torch.bincount(splits.train.targets) + torch.bincount(splits.validation.targets)
    assert counts.tolist() == [37_155, 11_687]
    one_hot = torch.cat([splits.train.inputs, splits.validation.inputs])[:, 6:]
    assert (one_hot.sum(dim=0) > 0).all()
    missing, start = {}, 0
    for column, values in adult.CATEGORIES.items():
        missing[column] = int((one_hot[:, start : start + len(values)].sum(dim=1) == 0).sum())
        start += len(values)
    assert {column: count for column, count in missing.items() if count} == {
        "workclass": 2799,
        "occupation": 2809,
        "native-country": 857,
    }
    torch.testing.assert_close(splits.train.inputs[:, :6].std(dim=0), torch.ones(6), atol=1e-3, rtol=0)
