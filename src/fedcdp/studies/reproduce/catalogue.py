"""The catalogue of experiments: one TOML file per table or figure of the paper, in `experiments`.

```
title, source, about     for people
layout                   how results become rows (`layouts.LAYOUTS`)
alone = true             cells are measured one at a time, because they are timed

[every]                  settings of every cell
[axes.NAME]              an axis: its values in order, each with the settings that it changes
[variants.NAME]          one way to measure a row (`rows`: which ones; `otherwise`: the variant that stands for it in the
                         others, for the layout `rivals`), with the settings that it changes
[printed]                the paper's printed values, by row; a list is assigned in order to the rows that a pattern matches
```

A *row* is one value of each axis, `fed-cdp/K100-Kt5`. A *cell* is a row measured in one of its variants,
`fed-cdp/K100-Kt5/cohort`: it is run, stored and resumed as a whole. Settings are those of a run's `config.toml` (sections
`data`, `model`, `plan`, `run`) over a `preset`, and those of the cell's `kind` (`runner.KINDS`).

A `Place` is where cells are measured: the device, the data, and a description of the machine.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from fedcdp.config import consent
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.presets import preset
from fedcdp.data.dataset import Splits
from fedcdp.errors import PlanError
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded
from fedcdp.training.autotune import machine
from fedcdp.training.prepared import load_splits

Given = dict[str, Any]

_FOLDER = "experiments"
_MOST_ROWS = 10_000
_LONGEST_SLUG = 150
_SECTIONS = ("data", "model", "plan", "run")
_KEYS = {"title", "source", "about", "layout", "alone", "every", "axes", "variants", "printed"}


@dataclass(frozen=True)
class Cell:
    """One thing to measure."""

    name: str
    row: str
    variant: str
    settings: Given = field(repr=False)

    @property
    def kind(self) -> str:
        """The kind of measurement (`runner.KINDS`)."""
        return str(self.settings.get("kind", "training"))

    def experiment(self, *changes: Given) -> Experiment:
        """The cell's experiment, with changes."""
        return self._assembled(*changes) if changes else self._own

    @cached_property
    def _own(self) -> Experiment:
        return self._assembled()

    def _assembled(self, *changes: Given) -> Experiment:
        base = preset(self.settings["preset"]) if "preset" in self.settings else {}
        own = {section: dict(self.settings[section]) for section in _SECTIONS if section in self.settings}
        experiment = assemble(base, own, *changes)
        consent.require(experiment.model.network, f"the cell {self.name}")
        return experiment

    @property
    def slug(self) -> str:
        """A file name for the cell."""
        plain = "".join(sign if (sign.isascii() and sign.isalnum()) or sign in ".-" else "_" for sign in self.name)
        if plain == self.name.replace("/", "_") and not plain.startswith(".") and len(plain) <= _LONGEST_SLUG:
            return plain
        # The name must stay in its folder, must not be too long, and must be unique among cells.
        return f"{plain.lstrip('.')[:_LONGEST_SLUG]}-{hashlib.sha256(self.name.encode(errors='replace')).hexdigest()[:8]}"


@dataclass(frozen=True)
class Table:
    """One table or figure of the paper."""

    name: str
    content: Given = field(repr=False)

    @property
    def title(self) -> str:
        """The table's title."""
        return str(self.content["title"])

    @property
    def axes(self) -> dict[str, dict[str, Given]]:
        """The axes, each with the settings of its values."""
        return dict(self.content["axes"])

    @cached_property
    def rows(self) -> list[tuple[str, ...]]:
        """All rows that some variant measures, as values of the axes."""
        return [values for values in itertools.product(*self.axes.values()) if self.variants_of("/".join(values))]

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """All cells by name, row by row."""
        return {cell.name: cell for values in self.rows for cell in self._cells_of(values)}

    def variants_of(self, row: str) -> list[str]:
        """The variants in which a row is measured."""
        return [name for name, each in self._variants.items() if _any_matches(row, each.get("rows", ["*"]))]

    @cached_property
    def printed(self) -> dict[str, Any]:
        """The paper's printed values, by row; rows without one are missing."""
        names = ["/".join(row) for row in self.rows]
        found: dict[str, Any] = {}
        for pattern, value in self.content.get("printed", {}).items():
            rows = [name for name in names if fnmatchcase(name, pattern)]
            dealt = _dealt(value, len(rows), f"{self.name}: printed.{pattern}")
            for row, each in zip(rows, dealt, strict=True):
                both = isinstance(each, dict) and isinstance(found.get(row), dict)
                found[row] = found[row] | each if both else each
        return found

    @property
    def _variants(self) -> dict[str, Given]:
        return dict(self.content.get("variants", {"": {}}))

    def _cells_of(self, values: tuple[str, ...]) -> Iterator[Cell]:
        row = "/".join(values)
        changes = [settings[value] for settings, value in zip(self.axes.values(), values, strict=True)]
        for variant in self.variants_of(row):
            own = {key: value for key, value in self._variants[variant].items() if key not in ("rows", "otherwise")}
            settings: Given = {}
            for layer in (self.content.get("every", {}), *changes, own):
                settings = merged(settings, layer)
            yield Cell(f"{row}/{variant}" if variant else row, row, variant, settings)


def tables() -> list[Table]:
    """All shipped tables, sorted by name."""
    folder = files("fedcdp.studies.reproduce") / _FOLDER
    names = sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))
    return [table(name) for name in names]


def table(name: str) -> Table:
    """A table by name, or from your own TOML file."""
    own = Path(name)
    if own.suffix == ".toml":
        return read(own.stem, own)
    place = files("fedcdp.studies.reproduce") / _FOLDER / f"{name}.toml"
    if not name.replace("-", "").isalnum() or not place.is_file():
        known = ", ".join(each.name for each in tables())
        raise PlanError(f"{name!r} is not one of the tables {known}, nor a TOML file")
    return read(name, place)


def chosen(known: Sequence[Table], patterns: Sequence[str]) -> list[tuple[Table, list[Cell]]]:
    """The cells of each table that match some pattern (all without patterns); raises for one that matches nothing."""
    for pattern in patterns:
        if not any(_matches(name, pattern) for each in known for name in each.cells):
            names = " or ".join(each.name for each in known)
            raise PlanError(f"--cells: no cell of {names} is called {pattern!r}; `reproduce TABLE --list` names them")
    return [
        (each, [cell for cell in each.cells.values() if not patterns or any(_matches(cell.name, p) for p in patterns)])
        for each in known
    ]


def read(name: str, place: Any) -> Table:
    """Read a table; raises an error that says what is wrong with it."""
    try:
        content = parse_toml(read_bounded(place, MOST_SETTINGS))
    except OSError as error:
        raise PlanError(f"{place} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{place} is not a TOML file: {error}") from error
    missing = {"title", "layout", "axes"} - set(content)
    unknown = set(content) - _KEYS
    if missing or unknown:
        what = f"lacks {', '.join(sorted(missing))}" if missing else f"has unknown keys {', '.join(sorted(unknown))}"
        raise PlanError(f"{place} {what}")
    if wrong := _objection(content):
        raise PlanError(f"{place}: {wrong}")
    return Table(name, content)


def _objection(content: Given) -> str | None:
    """What is wrong with a table's content, or None."""
    for key in ("title", "source", "about", "layout"):
        if not isinstance(content.get(key, ""), str):
            return f"{key} is not a string"
    if not isinstance(content.get("alone", False), bool):
        return "alone is not true or false"
    for key in ("every", "axes", "variants", "printed"):
        if not isinstance(content.get(key, {}), dict):
            return f"{key} is not a table"
    axes, variants = content["axes"], content.get("variants", {})
    if not axes or not all(isinstance(axis, dict) and axis for axis in axes.values()):
        return "axes holds an entry that is not an axis with values"
    if math.prod(len(axis) for axis in axes.values()) > _MOST_ROWS:
        return f"the axes make more than {_MOST_ROWS} rows"
    for variant in variants.values():
        rows = variant.get("rows", []) if isinstance(variant, dict) else None
        if not isinstance(rows, list) or not all(isinstance(each, str) for each in rows):
            return "variants holds an entry that is not a variant with patterns as rows"
        if variant.get("otherwise") not in (None, *list(variants)[: list(variants.values()).index(variant)]):
            return "otherwise is not the name of a variant above"
    layers = [content.get("every", {}), *variants.values(), *(value for axis in axes.values() for value in axis.values())]
    for layer in layers:
        if not isinstance(layer, dict):
            return "the settings of an axis or a variant are not a table"
        if not all(isinstance(layer.get(section, {}), dict) for section in _SECTIONS):
            return f"{', '.join(_SECTIONS)} must be tables of settings"
        if not all(isinstance(layer.get(key, ""), str) for key in ("preset", "kind")):
            return "preset and kind must be strings"
    return None


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Given:
    """Merge settings over others, table by table."""
    both = {key: merged(below[key], above[key]) for key in above if _are_tables(below.get(key), above[key])}
    return {**below, **above, **both}


def _are_tables(below: object, above: object) -> bool:
    return isinstance(below, dict) and isinstance(above, dict)


def _any_matches(row: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(row, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Whether a cell's name equals the pattern, matches it, or starts with it up to a slash."""
    return fnmatchcase(name, pattern) or name.startswith(pattern.rstrip("/") + "/")


def _dealt(value: Any, rows: int, where: str) -> list[Any]:
    """One value for each of some rows."""
    if isinstance(value, dict):
        columns = {key: _dealt(each, rows, f"{where}.{key}") for key, each in value.items()}
        return [{key: column[at] for key, column in columns.items()} for at in range(rows)]
    values = value if isinstance(value, list) else [value] * rows
    if len(values) != rows or not rows:
        raise PlanError(f"{where}: {len(values)} values for {rows} rows")
    return values


@dataclass(frozen=True)
class Place:
    """Where to measure; passed to worker processes unchanged."""

    out: Path
    """The folder of result files."""
    data_dir: Path | None = None
    run: dict[str, Any] = field(default_factory=dict)
    """Settings of the section `run`: the device, the engine, ..."""
    commit: str | None = None
    """The commit that is measured; None: that of the repository, if the package is in one."""

    @property
    def device(self) -> str:
        """The device that holds tensors."""
        return str(self.run.get("device", "cpu"))

    def scratch(self, table: str, cell: Cell) -> Path:
        """A cell's own folder while it runs: a killed attempt leaves its progress there for the next one."""
        return self.out / "running" / table / cell.slug

    def forget(self, table: str, cell: Cell) -> None:
        """Remove a cell's folder, and empty folders above it."""
        folder = self.scratch(table, cell)
        shutil.rmtree(folder, ignore_errors=True)
        for parent in (folder.parent, folder.parent.parent):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()

    def arrays(self, table: str, cell: Cell) -> Path:
        """The file for a cell's pictures."""
        return self.out / "arrays" / f"{table}-{cell.slug}.npz"

    def splits(self, experiment: Experiment) -> Splits:
        """The data of an experiment, loaded once per process."""
        settings = experiment.data
        if settings.dataset is None:
            return load_splits(experiment, self.data_dir, quiet=True)
        return _loaded(settings.dataset, settings.split_seed, self.data_dir)

    def machine(self) -> str:
        """Description of the machine."""
        device = torch.device(self.device)
        name = str(machine(device)["device"])
        if device.type == "cuda":
            name += ", tf32" if self.run.get("tf32") else ""
        else:
            name += f", {os.cpu_count()} cores, one thread a cell"
        return f"{name}, torch {torch.__version__}"


@lru_cache(maxsize=2)  # image datasets are large
def _loaded(dataset: str, split_seed: int, data_dir: Path | None) -> Splits:
    from fedcdp.data import load

    return load(dataset, data_dir, split_seed=split_seed, quiet=True)
