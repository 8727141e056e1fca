"""Rules for the columns of a table: which one names the client, which are labels, and how the others become inputs.

Everything that the rules list (column names, categories, ranges, classes) is public. No rule computes anything from the
records, so a rule costs no privacy budget.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fedcdp.config.experiment import Missing, TableTask
from fedcdp.errors import DataError, PlanError
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded

Role = Literal["client", "label", "category", "number", "unused"]
LABEL_COLUMNS = ("label", "target", "y", "class")
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t"}
_SHOWN = 20  # column names in a message
_MOST = 1e30  # what the ends of a range may be: float32 holds them and their difference


@dataclass(frozen=True)
class ColumnRules:
    """What the user says about the columns of a table. `column_rules` makes one from options."""

    client: str | None = None
    labels: tuple[str, ...] = ()
    """Empty: the column named label, target, y or class (in upper or lower case), else the last one."""
    dropped: tuple[str, ...] = ()
    task: TableTask = "classification"
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    missing: Missing = "refuse"
    delimiter: str | None = None
    """Between the cells of a `.csv` file; None: found in its header line."""
    class_numbers: bool = False
    """Without `classes`, labels are class numbers already, as at a deployed client, whose labels must mean the same as
    everyone's. False: the distinct labels of the table are numbered."""

    def roles(self, header: Sequence[str], source: str) -> dict[str, Role]:
        """What each column of a table is for; a `DataError` names a column that is missing or has two roles."""
        if len(header) < 2:
            raise DataError(f"{source} needs a header row with at least one input column and one label column")
        labels = self.labels or (_usual_label(header),)
        named = {"client_column": (self.client,) if self.client else (), "label_column": labels,
                 "drop_columns": self.dropped, "categories": self.categories, "range": self.ranges}  # fmt: skip
        for option, columns in named.items():
            if unknown := next((name for name in columns if name not in header), None):
                listed = ", ".join(header[:_SHOWN]) + (", …" if len(header) > _SHOWN else "")
                raise DataError(f"{option}: {source} has no column {unknown!r}; its columns are {listed}")
        declared = {*self.categories, *(self.ranges if self.task != "regression" else ())}
        if not self.labels and labels[0] in declared:
            raise DataError(f"columns: {labels[0]!r} is the label column of {source}; name it with --label-column too")
        if self.client in labels:
            raise DataError(f"label_column: {self.client!r} is also the client column; a column has one role")
        roles: dict[str, Role] = {}
        for name in header:
            if name in roles and (name not in self.dropped or name in labels):
                raise DataError(f"{source} has two columns called {name!r}; each column needs a name of its own")
            roles[name] = self._role(name, labels)
        if not any(role in ("number", "category") for role in roles.values()):
            raise DataError(f"{source} has no input column left besides the client, label and dropped columns")
        return roles

    def _role(self, name: str, labels: Sequence[str]) -> Role:
        if name in labels:
            return "label"
        if name == self.client:
            return "client"
        if name in self.dropped:
            return "unused"
        return "category" if name in self.categories else "number"

    def is_text(self, role: Role) -> bool:
        """Whether a column of this role is read as text, not as numbers."""
        return role in ("client", "category") or (role == "label" and self.task != "regression")


def column_rules(
    *,
    client: str | None = None,
    label: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    task: str = "classification",
    categories: str | Mapping[str, Sequence[Any]] | None = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    columns: Path | str | None = None,
    classes: str | Sequence[Any] | None = None,
    missing: str = "refuse",
    delimiter: str | None = None,
) -> ColumnRules:
    """The rules from options, as Python or the command line give them; a `PlanError` names a bad option.

    Names come as `"a,b"` or as a sequence, categories as `"sex=f|m,smoker=yes|no"` or as a mapping, classes as `"no|yes"` or
    as a sequence. `columns` is a TOML file with one section for each column: `categories = [...]` or `range = [low, high]`.
    """
    if task not in get_args(TableTask):
        raise PlanError(f"task: {task!r} is not one of {', '.join(get_args(TableTask))}")
    if missing not in get_args(Missing):
        raise PlanError(f"missing: {missing!r} is not one of {', '.join(get_args(Missing))}")
    if delimiter is not None and delimiter not in (*DELIMITERS, *DELIMITERS.values()):
        raise PlanError(f"delimiter: {delimiter!r} is not one of {', '.join(DELIMITERS)}")
    if client is not None and (not isinstance(client, str) or not client):
        raise PlanError(f"client_column: {client!r} is not the name of a column")
    listed, spans = _read_columns(columns) if columns is not None else ({}, {})
    for name, given in _category_lists(categories).items():
        listed[name] = _texts(f"categories of {name}", given)
    for name, pair in (ranges or {}).items():
        spans[name] = _range(f"range of {name}", pair)
    if both := next((name for name in listed if name in spans), None):
        raise PlanError(f"columns: {both!r} has categories and a range; a column has one of them")
    labels = _names("label_column", label)
    if len(labels) > 1 and task not in ("multilabel", "regression"):
        raise PlanError(f"label_column: {len(labels)} columns are given, but task {task} has one label")
    named = None if classes is None else _texts("classes", classes.split("|") if isinstance(classes, str) else classes)
    if named is None and len(labels) == 1 and task != "regression":
        named = listed.pop(labels[0], None)
    if named is not None and task == "regression":
        raise PlanError("classes: task regression has none")
    if named is not None and len(named) != 2 and task in ("binary", "multilabel"):
        raise PlanError(f"classes: {len(named)} are given, but task {task} has 2")
    for name in labels:
        if name in listed or (name in spans and task != "regression"):
            raise PlanError(f"columns: {name!r} is a label of task {task}, which has {'no range' if name in spans else ''}"
                            f"{'no categories' if name in listed else ''}")  # fmt: skip
    if client in listed or client in spans:
        raise PlanError(f"columns: {client!r} is the client column, which needs neither categories nor a range")
    found = DELIMITERS.get(delimiter, delimiter) if delimiter is not None else None
    return ColumnRules(client, labels, _names("drop_columns", drop), task, listed, spans, named, missing, found)  # type: ignore[arg-type]


def _usual_label(header: Sequence[str]) -> str:
    names = [name.lower() for name in header]
    return header[next((names.index(name) for name in LABEL_COLUMNS if name in names), len(names) - 1)]


def _names(option: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Column names; in a text they are separated by commas, and a name that holds a comma is quoted."""
    if given is None:
        return ()
    names = _cells(option, given) if isinstance(given, str) else list(given)
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise PlanError(f"{option}: {given!r} is not a list of distinct column names")
    return tuple(names)


def _cells(option: str, given: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([given], skipinitialspace=True), [])]
    except csv.Error:
        raise PlanError(f"{option}: {given[:_SHOWN]!r} cannot be read; separate names by commas") from None


def _category_lists(given: str | Mapping[str, Sequence[Any]] | None) -> Mapping[str, Sequence[Any]]:
    if given is None or not isinstance(given, str):
        return given or {}
    lists: dict[str, Sequence[Any]] = {}
    for cell in _cells("categories", given):
        name, equals, values = cell.partition("=")
        if not equals or not name.strip():
            raise PlanError(f"categories: {cell!r} is not of the form column=first|second")
        lists[name.strip()] = values.split("|")
    return lists


def _texts(what: str, given: Iterable[Any]) -> tuple[str, ...]:
    """Categories or classes as texts: distinct, at least two, none empty."""
    values = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not all(isinstance(value, str | int | float) for value in values):
        raise PlanError(f"{what}: it must list texts or numbers")
    texts = tuple(value.strip() if isinstance(value, str) else text_of(value) for value in values)
    if len(texts) < 2 or not all(texts) or len(set(texts)) < len(texts):
        raise PlanError(f"{what}: at least two distinct values are needed, none of them empty, such as no|yes")
    return texts


def text_of(value: Any) -> str:
    """A number or a truth value as a category: whole numbers without a decimal point, True and False in words."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _range(what: str, given: Any) -> tuple[float, float]:
    pair = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    numbers = [value for value in pair if isinstance(value, int | float) and abs(value) <= _MOST and value is not True]
    if len(pair) != 2 or len(numbers) != 2 or not pair[0] < pair[1]:
        raise PlanError(f"{what}: it must be two finite numbers, the lower one first, such as [0, 120]")
    return float(pair[0]), float(pair[1])


def _read_columns(path: Path | str) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[float, float]]]:
    """The categories and the ranges that a TOML file declares."""
    try:
        sections = parse_toml(read_bounded(path, MOST_SETTINGS))
    except OSError as error:
        raise DataError(f"columns: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"columns: {path} is not a TOML file: {error}") from error
    listed: dict[str, tuple[str, ...]] = {}
    spans: dict[str, tuple[float, float]] = {}
    for name, section in sections.items():
        keys = set(section) if isinstance(section, dict) else set()
        if keys == {"categories"} and isinstance(section["categories"], list):
            listed[name] = _texts(f"{path}, categories of {name}", section["categories"])
        elif keys == {"range"}:
            spans[name] = _range(f"{path}, range of {name}", section["range"])
        else:
            raise PlanError(f"columns: {path}: section {name!r} must hold categories = [...] or range = [low, high]")
    return listed, spans
