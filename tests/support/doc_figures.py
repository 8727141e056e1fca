"""Figures in a page and where they come from: `.985<!-- = reproduction/accuracy.json / cells / mnist/non-private/plain / accuracy -->`.

After `=` stands a source, which says what the figure before the comment must be, to as many digits as are shown:

| source | is |
| --- | --- |
| `FILE.json / step / step …` | a value in `results/FILE.json`; a step is a key, `[key=value; key=value]` for the one row of a list that has them, or `mean KEY` or `deviation KEY` over a list's rows (without KEY: over a list of numbers) |
| `account OPTIONS / adversary / unit` | ε as `fedcdp account OPTIONS` gives it, of `zero-out` unless a relation follows |
| `text FILE` | any figure that is written in `results/FILE` in the same digits |
"""  # noqa: E501

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedcdp.cli.program import app

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(?P<shown>[\d.,]*\d)(?P<percent> ?%)?[*_]*<!-- = (?P<source>.*?) -->")
_STEP = re.compile(r"\[(.*)\]")


@dataclass(frozen=True)
class Figure:
    """A marked figure of a page."""

    shown: str
    percent: bool
    source: str
    line: int

    @property
    def decimals(self) -> int:
        """How many digits after the point are shown."""
        return len(self.shown.partition(".")[2])

    @property
    def holds(self) -> bool:
        """Whether it is what its source says."""
        if self.source.startswith("text "):
            text = (ROOT / "results" / self.source.removeprefix("text ")).read_text()
            return re.search(rf"(?<![\d.,]){re.escape(self.shown)}(?![\d]|[.,]\d)", text) is not None
        value = value_of(self.source) * (100 if self.percent else 1)
        return abs(float(self.shown.replace(",", "")) - value) <= 0.5 * 10**-self.decimals * (1 + 1e-9)


def figures_of(page: Path) -> Iterator[Figure]:
    """The marked figures of a page."""
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        for found in MARKED.finditer(line):
            yield Figure(found["shown"], bool(found["percent"]), found["source"], number)


@cache
def value_of(source: str) -> float:
    """What a source says."""
    first, *steps = source.split(" / ")
    if first.startswith("account "):
        wanted = dict(zip(("adversary", "unit", "relation"), [*steps, "zero-out"][:3], strict=True))
        rows = _accounted(first.removeprefix("account "))
        return next(float(row["epsilon"]) for row in rows if wanted.items() <= row.items())
    found: Any = _read(first)
    for step in steps:
        found = _step(found, step)
    return float(found)


def _step(found: Any, step: str) -> Any:
    if wanted := _STEP.fullmatch(step):
        pairs = [pair.split("=", 1) for pair in wanted[1].split("; ")]
        [row] = [row for row in found if all(str(row.get(key)) == value for key, value in pairs)]
        return row
    name, _, key = step.partition(" ")
    if isinstance(found, list) and name in ("mean", "deviation"):
        return {"mean": statistics.mean, "deviation": statistics.stdev}[name]([row[key] if key else row for row in found])
    return found[step]


@cache
def _read(file: str) -> Any:
    return json.loads((ROOT / "results" / file).read_text())


@cache
def _accounted(options: str) -> Any:
    done = CliRunner().invoke(app, ["account", *shlex.split(options), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)["rows"]
