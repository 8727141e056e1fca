"""What is said about the columns of a table, and every way of saying it wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedcdp.data.table_rules import column_rules
from fedcdp.errors import DataError, FedcdpError, PlanError

HEADER = ["ward", "id", "age", "sex", "note, long", "sick"]


def test_texts_mean_what_python_values_mean() -> None:
    written = column_rules(
        client="ward",
        label="sick",
        drop='id, "note, long"',
        categories="sex=f|m, age=1|2",
        classes="no|yes",
        delimiter="tab",
    )
    given = column_rules(
        client="ward", label=["sick"], drop=["id", "note, long"], categories={"sex": ["f", "m"], "age": [1, 2.0]},
        classes=["no", "yes"], delimiter="\t",
    )  # fmt: skip
    assert written == given
    assert written.categories == {"sex": ("f", "m"), "age": ("1", "2")}


def test_each_column_has_a_role() -> None:
    rules = column_rules(client="ward", label="sick", drop="id", categories="sex=f|m")
    roles = {"ward": "client", "id": "unused", "age": "number", "sex": "category", "note, long": "number", "sick": "label"}
    assert rules.roles(HEADER, "table") == roles


@pytest.mark.parametrize(("header", "label"), [(["Y", "label", "a"], "label"), (["a", "Class"], "Class"), (["a", "b"], "b")])
def test_the_label_is_known_by_its_name_or_comes_last(header: list[str], label: str) -> None:
    assert [name for name, role in column_rules().roles(header, "table").items() if role == "label"] == [label]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "ranking"}, "task: 'ranking' is not one of classification, binary, multilabel, regression"),
        ({"missing": "mean"}, "missing: 'mean' is not one of refuse, indicator"),
        ({"delimiter": "|"}, "delimiter: '|' is not one of comma, semicolon, tab"),
        ({"client": ""}, "client_column: '' is not the name of a column"),
        ({"client": 3}, "client_column: 3 is not the name of a column"),
        ({"label": "a,,b", "task": "multilabel"}, "label_column: 'a,,b' is not a list of distinct column names"),
        ({"label": "a,b"}, "label_column: 2 columns are given, but task classification has one label"),
        ({"drop": "a,a"}, "drop_columns: 'a,a' is not a list of distinct column names"),
        ({"drop": ""}, "drop_columns: '' is not a list"),
        ({"drop": "a\nb"}, "drop_columns: 'a\\nb' cannot be read"),
        ({"drop": [1]}, "drop_columns: [1] is not a list"),
        ({"categories": "sex"}, "categories: 'sex' is not of the form column=first|second"),
        ({"categories": "=f|m"}, "categories: '=f|m' is not of the form"),
        ({"categories": "sex=f"}, "categories of sex: at least two distinct values are needed"),
        ({"categories": "sex=f|f"}, "categories of sex: at least two distinct values are needed"),
        ({"categories": {"sex": ["f", ""]}}, "categories of sex: at least two distinct values"),
        ({"categories": {"sex": "fm"}}, "categories of sex: at least two distinct values"),
        ({"categories": {"sex": [None, "m"]}}, "categories of sex: it must list texts or numbers"),
        ({"ranges": {"age": (5, 5)}}, "range of age: it must be two finite numbers, the lower one first"),
        ({"ranges": {"age": (0, float("inf"))}}, "range of age: it must be two finite numbers"),
        ({"ranges": {"age": (0, 10**400)}}, "range of age: it must be two finite numbers"),
        ({"ranges": {"age": "05"}}, "range of age: it must be two finite numbers"),
        ({"ranges": {"age": (0, 1, 2)}}, "range of age: it must be two finite numbers"),
        ({"ranges": {"age": (False, True)}}, "range of age: it must be two finite numbers"),
        ({"ranges": {"age": (0, 1)}, "categories": "age=1|2"}, "columns: 'age' has categories and a range"),
        ({"classes": "yes"}, "classes: at least two distinct values are needed"),
        ({"classes": "a|b|c", "task": "binary"}, "classes: 3 are given, but task binary has 2"),
        ({"classes": "a|b", "task": "regression"}, "classes: task regression has none"),
        ({"label": "sick", "ranges": {"sick": (0, 1)}}, "'sick' is a label of task classification, which has no range"),
        ({"label": "a,b", "task": "multilabel", "categories": "a=0|1"}, "is a label of task multilabel, which has no cat"),
        ({"client": "ward", "categories": "ward=a|b"}, "columns: 'ward' is the client column"),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_in_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        column_rules(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "header", "message"),
    [
        ({"client": "clinic"}, HEADER, "client_column: table has no column 'clinic'; its columns are ward, id, age"),
        ({"label": "ill"}, HEADER, "label_column: table has no column 'ill'"),
        ({"drop": "ids"}, HEADER, "drop_columns: table has no column 'ids'"),
        ({"categories": "six=f|m"}, HEADER, "categories: table has no column 'six'"),
        ({"ranges": {"ages": (0, 1)}}, HEADER, "range: table has no column 'ages'"),
        ({"client": "sick", "label": "sick"}, HEADER, "label_column: 'sick' is also the client column"),
        ({"label": "c", "drop": "a,b"}, ["a", "b", "c"], "table has no input column left"),
        ({"categories": "y=0|1"}, ["a", "y"], "columns: 'y' is the label column of table; name it with --label-column too"),
        ({}, ["a", "a", "b"], "table has two columns called 'a'"),
        ({}, ["a"], "table needs a header row"),
        ({"label": "x"}, [f"c{n}" for n in range(30)], "c19, …"),
    ],
)
def test_columns_that_do_not_fit_the_table_are_named(options: dict[str, Any], header: list[str], message: str) -> None:
    with pytest.raises(DataError) as caught:
        column_rules(**options).roles(header, "table")
    assert message in str(caught.value)


def test_dropped_columns_may_share_a_name() -> None:
    assert column_rules(drop="a", label="c").roles(["a", "a", "b", "c"], "table")["a"] == "unused"


def test_a_file_declares_categories_ranges_and_classes(tmp_path: Path) -> None:
    path = tmp_path / "columns.toml"
    path.write_text('[sex]\ncategories = ["f", "m"]\n[age]\nrange = [0, 110]\n[sick]\ncategories = [0, 1]\n')
    rules = column_rules(label="sick", columns=path)
    assert (rules.categories, rules.ranges, rules.classes) == ({"sex": ("f", "m")}, {"age": (0, 110)}, ("0", "1"))
    assert column_rules(label="sick", columns=path, categories="sex=d|f|m").categories["sex"] == ("d", "f", "m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"age = 3", "section 'age' must hold categories = [...] or range = [low, high]"),
        (b"[age]", "section 'age' must hold"),
        (b"[age]\nrange = [0, 1]\ncategories = ['a', 'b']", "section 'age' must hold"),
        (b"[age]\nmean = 3", "section 'age' must hold"),
        (b"[age]\nrange = 3", "range of age: it must be two finite numbers"),
        (b"[age]\nrange = [1, nan]", "range of age: it must be two finite numbers"),
        (b"[sex]\ncategories = 'fm'", "section 'sex' must hold"),
        (b"[sex]\ncategories = [[1], [2]]", "categories of sex: it must list texts or numbers"),
        (b"[sex", "is not a TOML file"),
        (b"\xff", "is not a TOML file"),
        (b"#" * 2**19, "cannot be read: it is larger than"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_bad_columns_file_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "columns.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FedcdpError) as caught:
        column_rules(columns=path)
    assert message in str(caught.value)
    assert "columns.toml" in str(caught.value)
