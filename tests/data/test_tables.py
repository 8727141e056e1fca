"""Tables of named clients: one reading of CSV, Parquet, npz and data frames, and every refusal."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcdp
from fedcdp.data import Splits, load_file
from fedcdp.data.own_files import splits_of_frame
from fedcdp.data.table_rules import column_rules
from fedcdp.errors import DataError, FedcdpError, PlanError

SECRET = "Zx81"
"""A text in a cell, which no message may show."""


def write(tmp_path: Path, text: str, name: str = "mine.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def rows_of(splits: Splits) -> list[tuple[list[float], float]]:
    """All records, sorted: their inputs and their target."""
    inputs = torch.cat([splits.train.tensor, splits.validation.tensor]).tolist()
    targets = torch.cat([splits.train.targets, splits.validation.targets]).tolist()
    return sorted(zip(inputs, targets, strict=True))


def frame() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "ward": np.array(["Jena", "Ulm", "Bad Aibling"], dtype=object)[rng.integers(0, 3, 60)],
        "id": np.arange(60),
        "age": rng.integers(20, 90, 60),
        "sex": np.array(["f", "m", "d"], dtype=object)[rng.integers(0, 3, 60)],
        "bmi": np.where(rng.random(60) < 0.1, np.nan, np.round(rng.normal(27, 4, 60), 1)),
        "smoker": rng.random(60) < 0.5,
        "sick": np.array(["no", "yes"], dtype=object)[rng.integers(0, 2, 60)],
    }


OPTIONS: dict[str, Any] = {
    "client": "ward", "label": "sick", "task": "binary", "drop": "id", "missing": "indicator",
    "categories": {"sex": ["f", "m"], "smoker": ["False", "True"]}, "ranges": {"age": (0, 110)},
}  # fmt: skip


def as_csv(path: Path, table: dict[str, Any]) -> Path:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(table).to_csv(path / "t.csv", index=False, sep=";")
    return path / "t.csv"


def as_parquet(path: Path, table: dict[str, Any]) -> Path:
    pytest.importorskip("pyarrow")
    pytest.importorskip("pandas").DataFrame(table).to_parquet(path / "t.parquet")
    return path / "t.parquet"


def as_npz(path: Path, table: dict[str, Any]) -> Path:
    np.savez(
        path / "t.npz", **{name: values.astype(str) if values.dtype == object else values for name, values in table.items()}
    )
    return path / "t.npz"


@pytest.mark.parametrize("store", [as_csv, as_parquet, as_npz])
def test_a_table_is_read_the_same_from_every_format(tmp_path: Path, store: Callable[..., Path]) -> None:
    expected = splits_of_frame(frame(), column_rules(**OPTIONS), None, 0, 0.2)
    found = load_file(store(tmp_path, frame()), **OPTIONS)
    for part in ("train", "validation"):
        one, other = getattr(expected, part), getattr(found, part)
        assert torch.equal(one.tensor, other.tensor)
        assert torch.equal(one.targets, other.targets)
    assert found.owners is not None
    assert found.owners.tolist() == expected.owners.tolist()  # type: ignore[union-attr]
    assert found.owner_names == ("Bad Aibling", "Jena", "Ulm")
    assert (found.train.task, found.train.classes, found.train.shape) == ("binary", 2, (12,))


def test_a_pandas_frame_is_read_with_its_own_types() -> None:
    pandas = pytest.importorskip("pandas")
    table = frame()
    given = pandas.DataFrame(table).astype({"sex": "category", "age": "Int64", "bmi": "Float64", "smoker": "boolean"})
    given["sick"] = given["sick"].astype("string")
    one = fedcdp.Federation.from_frame(given, **OPTIONS)
    other = fedcdp.Federation.from_frame(table, **OPTIONS)
    assert torch.equal(one.train.tensor, other.train.tensor)
    assert one.names == other.names == ("Bad Aibling", "Jena", "Ulm")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize(("delimiter", "option"), [(",", None), (";", None), ("\t", None), (";", "semicolon"), (";", ";")])
def test_delimiters_quotes_and_marks_are_read(
    tmp_path: Path, delimiter: str, option: str | None, bom: str, end: str
) -> None:
    lines = [["a", '"b, c; d"', "label"], ["1", '"2.5"', '"x ""y"""'], ["3", " 4 ", "z"], [], ["5", "-6e1", '"two\nlines"']]
    text = bom + end.join(delimiter.join(line) for line in lines) + end
    (tmp_path / "mine.csv").write_bytes(text.encode())
    splits = load_file(tmp_path / "mine.csv", delimiter=option, classes=['x "y"', "z", "two\nlines"])
    assert rows_of(splits) == [([1, 2.5], 0), ([3, 4], 1), ([5, -60], 2)]


def test_a_delimiter_that_is_given_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "a;b;c;d,label\n1,x\n2,y\n3,y\n")
    assert load_file(path, delimiter="comma").train.shape == (1,)
    with pytest.raises(DataError, match="line 2: 1 values instead of 4"):
        load_file(path)


def test_categories_and_missing_values_become_inputs(tmp_path: Path) -> None:
    text = "sex,age,label\nf,50,0\nm,NA,1\nd,0,0\n,200,1\nNULL,-7,1\n"
    splits = load_file(write(tmp_path, text), categories="sex=f|m", ranges={"age": (0, 100)}, missing="indicator")
    # f, m, other, missing; age, missing
    assert rows_of(splits) == sorted(
        [
            ([1, 0, 0, 0, 0, 0], 0),
            ([0, 1, 0, 0, 0, 1], 1),
            ([0, 0, 1, 0, -1, 0], 0),
            ([0, 0, 0, 1, 1, 0], 1),
            ([0, 0, 0, 1, -1, 0], 1),
        ]
    )
    assert splits.normalisation == (
        "1 column scaled from public ranges to −1 … 1; 1 column one-hot from public lists, with an input for other values; "
        "missing values are 0, with an indicator input for each column"
    )


def test_a_listed_category_is_not_missing(tmp_path: Path) -> None:
    splits = load_file(write(tmp_path, "country,label\nNA,0\nDE,1\nDE,1\n"), categories="country=DE|NA")
    assert rows_of(splits) == [([0, 1, 0], 0), ([1, 0, 0], 1), ([1, 0, 0], 1)]


@pytest.mark.parametrize("missing", ["", " ", "NA", "n/a", "NaN", "null"])
def test_the_number_of_inputs_does_not_depend_on_values(tmp_path: Path, missing: str) -> None:
    whole = load_file(write(tmp_path, "a,b,label\n1,2,0\n3,4,1\n5,6,1\n"), missing="indicator")
    holes = load_file(write(tmp_path, f"a,b,label\n1,{missing},0\n3,4,1\n{missing},6,1\n"), missing="indicator")
    assert whole.train.shape == holes.train.shape == (4,)
    assert rows_of(holes) == sorted([([1, 0, 0, 1], 0), ([3, 0, 4, 0], 1), ([0, 1, 6, 0], 1)])


def test_clients_are_numbered_by_name(tmp_path: Path) -> None:
    path = write(
        tmp_path, "site,a,label\n" + "".join(f"{site},1,{n % 2}\n" for n, site in enumerate([10, 9, 9, 10, 2, 2] * 4))
    )
    splits = load_file(path, client="site")
    assert splits.owner_names == ("2", "9", "10")
    federation = fedcdp.partition(splits)
    assert (federation.scheme, federation.names) == ("natural", ("2", "9", "10"))
    assert federation.sizes(range(3)).tolist() == np.bincount(splits.owners).tolist()  # type: ignore[arg-type]
    for client in range(3):
        assert set(splits.owners[federation.indices(client)]) == {client}  # type: ignore[index]
    assert federation.validation_clients is splits.validation_owners


def test_each_client_and_class_is_held_out_in_proportion(tmp_path: Path) -> None:
    sizes = {"a": 1000, "b": 100, "c": 10, "d": 1}
    rows = [f"{site},{n % 5 == 0:d}" for site, size in sizes.items() for n in range(size)]
    splits = load_file(write(tmp_path, "site,label,x\n" + "".join(f"{row},3\n" for row in rows)), client="site")
    assert np.bincount(splits.validation_owners, minlength=4).tolist() == [200, 20, 2, 0]  # type: ignore[arg-type]
    assert np.bincount(splits.owners).tolist() == [800, 80, 8, 1]  # type: ignore[arg-type]
    for owner, expected in enumerate([200, 20, 2]):
        held = splits.validation.targets.numpy()[splits.validation_owners == owner]
        assert abs(int(held.sum()) - expected / 5) < 1


def test_each_client_keeps_a_training_record(tmp_path: Path) -> None:
    path = write(tmp_path, "site,label,x\n" + "".join(f"{site},{n % 2},1\n" for site in "abc" for n in range(4)))
    splits = load_file(path, client="site", validation_fraction=0.99)
    assert np.bincount(splits.owners).tolist() == [1, 1, 1]  # type: ignore[arg-type]


def test_clients_of_one_record_leave_nothing_to_hold_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="each client has a single record"):
        load_file(write(tmp_path, "site,label,x\na,0,1\nb,1,1\n"), client="site")


@pytest.mark.parametrize(
    ("labels", "options", "targets"),
    [
        (["no", "yes", "no"], {"task": "binary"}, [0, 1, 0]),
        (["1", "0", "0"], {"task": "binary"}, [1, 0, 0]),
        (["no", "yes", "no"], {"task": "binary", "classes": "yes|no"}, [1, 0, 1]),
        (["b", "a", "b"], {"classes": "a|b|c"}, [1, 0, 1]),
        (["1.0", "10", "9"], {}, [0, 2, 1]),
        (["0.5", "-3", "1e2"], {"task": "regression"}, [0.5, -3, 100]),
        (["0", "75", "200"], {"task": "regression", "label": "label", "ranges": {"label": (0, 100)}}, [-1, 0.5, 1]),
    ],
)
def test_labels_become_the_targets_of_the_task(
    tmp_path: Path, labels: list[str], options: Any, targets: list[float]
) -> None:
    path = write(tmp_path, "x,label\n" + "".join(f"{n},{label}\n" for n, label in enumerate(labels)))
    splits = load_file(path, **options)
    assert [target for _, target in rows_of(splits)] == targets
    assert splits.train.task == options.get("task", "classification")


def test_a_target_remembers_its_range(tmp_path: Path) -> None:
    path = write(tmp_path, "x,days\n" + "".join(f"{n},{n}\n" for n in range(10)))
    train = load_file(path, task="regression", label="days", ranges={"days": (0, 20)}).train
    assert train.target_range == (0, 20)
    assert train.take(torch.arange(2)).target_range == (0, 20)
    assert load_file(path, task="regression").train.target_range is None


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_several_label_columns_keep_their_order(tmp_path: Path, task: Any) -> None:
    path = write(tmp_path, "a,x,b\n" + "".join(f"{n % 2},{n},1\n" for n in range(10)))
    splits = load_file(path, task=task, label="b,a")
    assert splits.train.targets.shape == (8, 2)
    assert splits.train.targets.dtype == torch.float32
    assert splits.train.targets[:, 0].tolist() == [1] * 8
    assert splits.train.targets[:, 1].tolist() == [x % 2 for [x] in splits.train.tensor.tolist()]


@pytest.mark.parametrize(("values", "expected"), [(["1", "0", "1"], [1, 0, 1]), (["True", "False", "TRUE"], [1, 0, 1])])
def test_a_multilabel_answer_is_zero_or_one(tmp_path: Path, values: list[str], expected: list[int]) -> None:
    path = write(tmp_path, "x,a\n" + "".join(f"{n},{value}\n" for n, value in enumerate(values)))
    assert [target for _, target in rows_of(load_file(path, task="multilabel"))] == [[each] for each in expected]


def test_arrays_have_labels_and_clients_by_name(tmp_path: Path) -> None:
    images = np.arange(12 * 9, dtype=np.float32).reshape(12, 3, 3)
    sites = np.array(["b", "a"] * 6)
    np.savez(tmp_path / "t.npz", x=images, site=sites, ages=np.arange(12.0), many=np.eye(12)[:, :3])
    splits = load_file(tmp_path / "t.npz", client="site", label="ages", task="regression")
    assert (splits.train.shape, splits.owner_names) == ((1, 3, 3), ("a", "b"))
    first = splits.train.tensor[:, 0, 0, 0].numpy() / 9
    assert first.tolist() == splits.train.targets.tolist()
    assert sites[first.astype(int)].tolist() == ["ab"[owner] for owner in splits.owners.tolist()]  # type: ignore[union-attr]
    assert load_file(tmp_path / "t.npz", label="many", task="multilabel").train.targets.shape == (10, 3)


def test_only_numbers_without_a_range_are_standardised(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n},{'fm'[n % 2]},{n % 3 % 2}\n" for n in range(50)) + "NA,3,f,0\n"
    options: dict[str, Any] = {"categories": "sex=f|m", "ranges": {"b": (0, 49)}, "missing": "indicator"}
    splits = load_file(write(tmp_path, "a,b,sex,label\n" + rows), scaling="training", **options)
    a, a_missing, b = splits.train.tensor[:, 0], splits.train.tensor[:, 1], splits.train.tensor[:, 2]
    present = a_missing == 0
    assert abs(float(a[present].mean())) < 1e-6
    assert abs(float(a[present].std(correction=0)) - 1) < 1e-5
    assert a[~present].tolist() == [0] * int((~present).sum())
    assert float(b.min()) >= -1
    assert float(b.max()) <= 1
    assert set(splits.train.tensor[:, 4:].unique().tolist()) == {0, 1}
    assert "not covered by any ε" in splits.normalisation
    with pytest.raises(DataError, match="scaling: public needs a range for every number, and 'a' has none"):
        load_file(tmp_path / "mine.csv", scaling="public", **options)


def test_images_of_bytes_are_scaled_by_public_constants(tmp_path: Path) -> None:
    np.savez(tmp_path / "bytes.npz", x=np.zeros((9, 4, 4), np.uint8), y=np.arange(9) % 2)
    np.savez(tmp_path / "floats.npz", x=np.zeros((9, 4, 4)), y=np.arange(9) % 2)
    assert load_file(tmp_path / "bytes.npz", scaling="public").train.shape == (1, 4, 4)
    with pytest.raises(DataError, match="scaling: public needs a range for every number, and 'the inputs' has none"):
        load_file(tmp_path / "floats.npz", scaling="public")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "private"}, "scaling: private happens in training"),
        ({"scaling": "own"}, "scaling: 'own' is not one of training, public, private"),
        ({"scaling": "public", "standardise": True}, "scaling: public contradicts standardise"),
    ],
)
def test_a_bad_scaling_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_file(write(tmp_path, "a,label\n1,0\n2,1\n"), **options)


CASES: list[tuple[str, dict[str, Any], str]] = [
    (f"a,label\n1,0\n{SECRET},1\n", {}, "line 3, column 'a': there is no finite number; if the column is text, list its "
     "values with --categories 'a=first|second', or leave it out with --drop-columns a"),
    ("a;label\n1;0\n1,5;1\n", {}, "line 3, column 'a': there is no finite number; write numbers with a decimal point"),
    (f'a,label\n1,0\n"two\nlines",1\n{SECRET}\n', {"categories": "a=1|2", "task": "regression"}, "line 5: 1 values"),
    (f'a,label\n1,0\n2,"{SECRET}\n3,1\n', {}, "line 3: unexpected end of data"),
    (f'a,label\n1,0\n2,"{SECRET}"x\n3,1\n', {}, "line 3: ',' expected after '\"'"),
    (f"site,a,label\n{SECRET},1,0\n,1,1\n", {"client": "site"}, "line 3, column 'site': the client's name is missing"),
    (f"site,a,label\n{'n' * 101},1,0\n", {"client": "site"}, "line 2, column 'site': the client's name is longer than 100"),
    (f"site,a,label\n\x1b[2J{SECRET},1,0\n", {"client": "site"}, "line 2, column 'site': the client's name is longer than"),
    (f"a,label\n1,{SECRET}\n2,NA\n", {}, "line 3, column 'label': the label is missing"),
    (f"a,label\n1,{SECRET * 30}\n2,b\n", {}, "line 2, column 'label': the label has more than 100 characters"),
    (f"a,label\n1,{SECRET}\n2,b\n", {"classes": "a|b"}, "line 2, column 'label': the label is not a|b"),
    ("a,label\n1,b\n2,\n", {"classes": "a|b"}, "line 3, column 'label': the label is missing"),
    (f"a,label\n1,{SECRET}\n2,0\n", {"task": "multilabel"}, "line 2, column 'label': the label is not 0 or 1"),
    (f"a,label\n1,{SECRET}\n2,0\n", {"task": "regression"}, "line 2, column 'label': there is no finite number"),
    ("a,label\n1,\n2,0\n", {"task": "regression"}, "line 2, column 'label': the label is missing"),
    ("a,label\n1,1e39\n2,0\n", {"task": "regression"}, "line 2, column 'label': there is no finite number"),
    ("a,label\n1,0.5\n2,1.5\n", {}, "column 'label': labels are numbers that are not whole"),
    (f"a,label\n1,{SECRET}\n2,y\n3,z\n", {"task": "binary"}, "column 'label': 3 classes, but task binary has 2"),
    ("a,b,c\n1,2,3\n1,2,3\n", {"label": "b,c", "task": "regression", "ranges": {"b": (0, 9)}}, "need the same range"),
    ("a,label\n1,0\n2,1\n", {"validation_fraction": 2}, "validation_fraction is 2"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "message"), CASES)
def test_what_cannot_be_read_is_named_but_not_quoted(tmp_path: Path, text: str, options: Any, message: str) -> None:
    with pytest.raises(FedcdpError) as caught:
        load_file(write(tmp_path, text), **options)
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.array(["2020-01-01"] * 6, dtype="M8[D]"), "column 'bad' holds datetime64"),
        (np.zeros((6, 2)), r"column 'bad' holds an array of shape \(6, 2\)"),
        (np.array([1, 2, 3, [SECRET], 5, 6], dtype=object), "record 3, column 'bad': there is a list"),
        (
            np.array([1, 2, SECRET, 4, 5, 6], dtype=object),
            "record 2, column 'bad': there is no finite number; if the column",
        ),
        (np.array([1, 2, Decimal("1e999"), 4, 5, 6], dtype=object), "record 2, column 'bad': there is no finite number"),
        (np.array([1, 2, 10**400, 4, 5, 6], dtype=object), "record 2, column 'bad': there is no finite number"),
        (np.array([1, 2, np.inf, 4, 5, 6]), "record 2, column 'bad': there is no finite number"),
        (np.array([1, 2, None, 4, 5, 6], dtype=object), "record 2, column 'bad': the value is missing"),
        (np.arange(5), "the frame has columns of different lengths: bad 5, label 6"),
    ],
)
def test_a_bad_column_of_a_frame_is_named(column: Any, message: str) -> None:
    table = {"bad": column, "label": np.arange(6) % 2}
    with pytest.raises(DataError, match=message) as caught:
        splits_of_frame(table, column_rules(), None, 0, 0.2)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"), [(3, "the frame is int"), ({1: [1], 2: [2]}, "a column whose name is no text")]
)
def test_what_is_no_frame_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fedcdp.Federation.from_frame(given, client="a", label="b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": "site"}, "client_column: .* has no array 'site'; it has x, y"),
        ({"label": "z"}, "label_column: .* has no array 'z'"),
        ({"drop": "x"}, "drop_columns: .* holds its inputs in one array"),
        ({"categories": "x=1|2"}, "categories: .* holds its inputs in one array"),
        ({"missing": "indicator"}, "missing: .* holds its inputs in one array"),
        ({"ranges": {"x": (0, 1)}}, "range: .* holds its inputs in one array"),
    ],
)
def test_rules_for_columns_do_not_fit_an_array(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2)
    with pytest.raises(DataError, match=message):
        load_file(tmp_path / "t.npz", **options)


def test_a_range_is_for_one_column_of_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((9, 2)), y=np.zeros((9, 3)))
    with pytest.raises(DataError, match="holds the label 'y' in 3 columns; a range is for one"):
        load_file(tmp_path / "t.npz", label="y", task="regression", ranges={"y": (0, 1)})


def test_names_that_look_like_numbers_are_names(tmp_path: Path) -> None:
    path = write(tmp_path, "site,a,label\n" + "--5,1,0\n-5,1,1\n10,2,0\n9,3,1\n" * 3)
    assert load_file(path, client="site").owner_names == ("--5", "-5", "10", "9")


def test_clients_and_labels_of_arrays_have_one_length(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2, site=np.array(["a"] * 8))
    with pytest.raises(DataError, match="labels and clients of different lengths"):
        load_file(tmp_path / "t.npz", client="site")


class TestParquet:
    """What only a `.parquet` file can hold."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Callable[..., Path]:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        def write_table(columns: dict[str, Any], **options: Any) -> Path:
            pq.write_table(pa.table(columns), tmp_path / "mine.parquet", **options)
            return tmp_path / "mine.parquet"

        return write_table

    def test_nulls_and_dictionaries_are_read(self, store: Callable[..., Path]) -> None:
        columns = {"sex": ["f", None, "m", "f"] * 5, "age": [1, 2, None, 4] * 5, "label": [True, False, False, True] * 5}
        splits = load_file(store(columns), categories="sex=f|m", missing="indicator", task="binary")
        expected = [([1, 0, 0, 0, 1, 0], 1), ([0, 0, 0, 1, 2, 0], 0), ([0, 1, 0, 0, 0, 1], 0), ([1, 0, 0, 0, 4, 0], 1)]
        assert rows_of(splits) == sorted(expected * 5)

    def test_dictionaries_of_any_index_are_read(self, store: Callable[..., Path]) -> None:
        import pyarrow as pa

        columns = {"grade": pa.DictionaryArray.from_arrays(pa.array([0, None, 1, 0] * 5, pa.uint8()), [3, 5])}
        columns["sex"] = pa.array(["f", "m", None, "f"] * 5).dictionary_encode()
        path = store(columns | {"label": [0, 1, 1, 0] * 5})
        splits = load_file(path, categories="sex=f|m", missing="indicator")
        expected = [([3, 0, 1, 0, 0, 0], 0), ([0, 1, 0, 1, 0, 0], 1), ([5, 0, 0, 0, 0, 1], 1), ([3, 0, 1, 0, 0, 0], 0)]
        assert rows_of(splits) == sorted(expected * 5)

    def test_columns_whose_names_begin_alike_are_told_apart(self, store: Callable[..., Path]) -> None:
        path = store({"x": [1, 2, 3, 4], "x.1": [9, 9, 9, 9], "y.z": [5, 6, 7, 8], "label": [0, 1, 0, 1]})
        assert rows_of(load_file(path, drop="x.1")) == [([1, 5], 0), ([2, 6], 1), ([3, 7], 0), ([4, 8], 1)]

    def test_a_bad_value_is_named_by_record(self, store: Callable[..., Path]) -> None:
        with pytest.raises(DataError, match="record 70001, column 'a': there is no finite number") as caught:
            load_file(store({"a": ["1"] * 70_001 + [SECRET], "label": [0, 1] * 35_001}))
        assert SECRET not in str(caught.value)

    @pytest.mark.parametrize("values", [[[1, 2]] * 4, [{"b": 1}] * 4, [b"x"] * 4])
    def test_a_nested_column_is_refused(self, store: Callable[..., Path], values: Any) -> None:
        with pytest.raises(DataError, match=r"mine\.parquet, .*column 'a'.* use --drop-columns a"):
            load_file(store({"a": values, "label": [0, 1, 0, 1]}))
        assert load_file(store({"a": values, "b": [1, 2, 3, 4], "label": [0, 1, 0, 1]}), drop="a").train.shape == (1,)

    def test_a_file_that_unpacks_to_too_much_is_refused(self, store: Callable[..., Path]) -> None:
        import pyarrow as pa

        path = store({"a": pa.nulls(20_000_000), "label": pa.nulls(20_000_000)})
        assert path.stat().st_size < 2**20
        with pytest.raises(DataError, match="unpacks to 320,000,000 bytes; at most 268,435,456 are read"):
            load_file(path)

    def test_a_damaged_file_is_refused_by_name(self, store: Callable[..., Path]) -> None:
        path = store({"a": [float(n) for n in range(500)], "label": [0, 1] * 250}, compression="zstd")
        content = bytearray(path.read_bytes())
        content[20:120] = bytes(100)
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"mine\.parquet cannot be read as a \.parquet file"):
            load_file(path)

    def test_without_pyarrow_the_message_says_how_to_install(
        self, store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = store({"a": [1, 2], "label": [0, 1]})
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(DataError, match=r"needs pyarrow, which is not installed: pip install 'fedcdp\[tables\]'"):
            load_file(path)
